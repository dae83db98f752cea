"""Whether two tokenizers can line up, by the headers of their files: a pair that cannot is refused before
anything is loaded. Whether they cut text alike shows once both are loaded (`vocab`)."""

from __future__ import annotations

from outrider.core.errors import VocabularyMismatch
from outrider.models.constants import Keys, TokenType
from outrider.models.gguf import ModelCard
from outrider.models.header import fields_of, read_header
from outrider.models.vocab.alignment import MIN_TEXT_RATIO, OTHER_DRAFT, too_few_in_common

_CONTROL = (int(TokenType.CONTROL), int(TokenType.UNUSED))


def check_tokenizers(target: ModelCard, draft: ModelCard) -> None:
    """Raise VocabularyMismatch where too few spellings of text tokens are the target's. A file that has no
    tokens is passed over, and a reduced vocabulary, whose map is read when it is loaded."""
    if target.tokens is None or draft.tokens is None or draft.has_reduced_vocabulary:
        return
    ours, theirs = _tokens(target), _tokens(draft)
    (_, texts), (others, _) = sorted((theirs, ours), key=lambda tokens: len(tokens[1]))
    known = set(others)
    num_common = sum(text in known for text in texts)
    if num_common < MIN_TEXT_RATIO * len(texts):
        why = too_few_in_common(target.tokenizer, draft.tokenizer, num_common, len(texts))
        raise VocabularyMismatch("draft", why, OTHER_DRAFT)


def _tokens(card: ModelCard) -> tuple[list[bytes], list[bytes]]:
    """The spellings of all tokens, and of those of text."""
    keys = (Keys.Tokenizer.LIST, Keys.Tokenizer.TOKEN_TYPE)
    fields = fields_of(card.path, read_header(card.path), keys)
    tokens: list[bytes] = fields[Keys.Tokenizer.LIST].value
    kinds = fields[Keys.Tokenizer.TOKEN_TYPE].value if Keys.Tokenizer.TOKEN_TYPE in fields else []
    return tokens, [
        t for t, kind in zip(tokens, kinds or [0] * len(tokens), strict=False) if kind not in _CONTROL
    ]
