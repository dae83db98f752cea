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
    _require(bool(spans), "a call needs at least one")
    _require(len({span.sequence for span in spans}) == len(spans), "a call takes one for each sequence")
    size = model.vocabulary.size
    for span in spans:
        num_tokens = len(span.tokens)
        _require(0 <= span.sequence < model.max_sequences, f"there is no sequence {span.sequence}")
        _require(num_tokens > 0, "it has no tokens")
        _require(0 <= span.rows <= num_tokens, f"{num_tokens} tokens cannot give {span.rows} rows")
        stored = model.length(span.sequence)
        _require(span.start == stored, f"it starts at {span.start}, but {stored} tokens are stored")
        known = min(span.tokens) >= 0 and max(span.tokens) < size
        _require(known, f"a token is outside the vocabulary of {size}")
        if span.start + num_tokens > model.context_length:
            used = f"a context of {model.context_length}, of which {stored} are in use"
            why = f"{num_tokens} more tokens do not fit {used}"
            raise OutOfMemory("span", why, "Give a larger context (-c).")
    num_tokens, num_rows = sum(len(span.tokens) for span in spans), sum(span.rows for span in spans)
    most_tokens, most_rows = model.max_batch_tokens, model.max_rows
    _require(num_tokens <= most_tokens, f"a call takes at most {most_tokens} tokens")
    _require(num_rows <= most_rows, f"a call gives at most {most_rows} rows", "Raise max_rows.")


def _require(holds: bool, why: str, way_out: str = "") -> None:
    if not holds:
        raise BackendError("span", why, way_out)


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
