"""The teacher-forced pass: what a model makes of a text that is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.core.contracts import Model
from outrider.core.data import Logits, Span
from outrider.engine import PREFILL_CHUNK_TOKENS

CHUNK_TOKENS = 64
"""whose logits are held at once"""


def teacher_forced(
    model: Model, tokens: Sequence[int], first: int, *, sequence: int = 0, chunk: int = CHUNK_TOKENS
) -> Iterator[Logits]:
    """Evaluate what a sequence does not hold of `tokens` yet, and give the logits after `tokens[first]`
    and each later token, a row each: an array for every call, empty for those that only read what is before.

    The rows are valid until the next array is asked for. `tokens[first]` is read with the last chunk of
    what is before, as the engine does with a prompt; later calls have up to `chunk` tokens.
    Raises BackendError when a call fails or the text does not fit.
    """
    at = model.length(sequence)
    while at < len(tokens):
        if at < first:
            end = min(at + min(PREFILL_CHUNK_TOKENS, model.max_batch_tokens), first)
            num_rows = int(end == first < len(tokens) and end - at < model.max_batch_tokens)
            end += num_rows
        else:
            end = min(at + min(chunk, model.max_rows, model.max_batch_tokens), len(tokens))
            num_rows = end - at
        [rows] = model.decode([Span(sequence, tuple(tokens[at:end]), at, num_rows)])
        yield rows
        at = end
