"""Do the tokenizers of target and draft line up, and which token of one is which of the other."""

from outrider.models.vocab.alignment import Alignment, AlignmentReport, align, compare, tokenizer_id

__all__ = ["Alignment", "AlignmentReport", "align", "compare", "tokenizer_id"]
