"""Checks of model calls before anything is computed: a native library may end the process, or lose other
sequences' KV, when a call breaks its rules."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.contracts import Model
from outrider.core.data import Span
from outrider.core.errors import BackendError, OutOfMemory
from outrider.core.saved import SavedState


def check_spans(model: Model, spans: Sequence[Span]) -> None:
    """Raise BackendError for spans that break the contract or a limit, OutOfMemory for one that does not fit
    the context."""
    if not spans:
        raise BackendError("span", "a call needs at least one")
    if len(spans) > 1 and len({span.sequence for span in spans}) < len(spans):
        raise BackendError("span", "a call takes one for each sequence")
    num_tokens = num_rows = 0
    for span in spans:
        if why := _fault(model, span):
            raise BackendError("span", why)
        num_tokens, num_rows = num_tokens + len(span.tokens), num_rows + span.rows
        if span.start + len(span.tokens) > model.context_length:
            used = f"a context of {model.context_length}, of which {span.start} are in use"
            why = f"{len(span.tokens)} more tokens do not fit {used}"
            raise OutOfMemory("span", why, "Give a larger context (-c).")
    if num_tokens > model.max_batch_tokens:
        raise BackendError("span", f"a call takes at most {model.max_batch_tokens} tokens")
    if num_rows > model.max_rows:
        raise BackendError("span", f"a call gives at most {model.max_rows} rows", "Raise max_rows.")


def _fault(model: Model, span: Span) -> str:
    tokens, rows = span.tokens, span.rows
    if not 0 <= span.sequence < model.max_sequences:
        return f"there is no sequence {span.sequence}"
    if not tokens:
        return "it has no tokens"
    if not 0 <= rows <= len(tokens):
        return f"{len(tokens)} tokens cannot give {rows} rows"
    if span.start != (stored := model.length(span.sequence)):
        return f"it starts at {span.start}, but {stored} tokens are stored"
    if min(tokens) < 0 or max(tokens) >= model.vocabulary.size:
        return f"a token is outside the vocabulary of {model.vocabulary.size}"
    return ""


def check_copy(model: Model, source: int, sequence: int, length: int) -> None:
    """Raise BackendError if `sequence` cannot take the first `length` tokens of `source`."""
    if not 0 < length <= model.length(source):
        raise BackendError("copy", f"sequence {source} does not hold {length} tokens")
    if model.length(sequence):
        raise BackendError("copy", f"sequence {sequence} is not empty")


def check_restore(model: Model, sequence: int, state: SavedState) -> None:
    """Raise BackendError if `sequence` cannot hold `state`."""
    if model.length(sequence):
        raise BackendError("restore", f"sequence {sequence} is not empty")
    if not 0 < state.extent.length <= model.context_length:
        raise BackendError("restore", f"a context does not hold {state.extent.length} tokens")
