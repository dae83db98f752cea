"""A model call's spans, checked and laid out as the library reads them.

llama.cpp ends the process, or forgets what other sequences stored, where a call breaks its rules.
So every rule is checked here first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.core.data import Span
from outrider.core.errors import BackendError, OutOfMemory


class Batch:
    """The arrays of a llama_batch (the structure `kind`), allocated once and refilled for every call.

    A call has at most `max_rows` rows and `max_tokens` tokens over all spans, a sequence `context_length`.
    """

    def __init__(
        self,
        kind: type[ctypes.Structure],
        *,
        max_rows: int,
        max_tokens: int,
        context_length: int,
        vocabulary_size: int,
    ) -> None:
        size = self._max_tokens = max_tokens
        self._max_rows = max_rows
        self._context_length = context_length
        self._vocabulary_size = vocabulary_size
        self._token = np.zeros(size, dtype=np.int32)
        self._position = np.zeros(size, dtype=np.int32)
        self._sequence = np.zeros(size, dtype=np.int32)
        self._wanted = np.zeros(size, dtype=np.int8)
        self._num_sequences = np.ones(size, dtype=np.int32)
        # One sequence per token: each entry points at its own element of `_sequence`.
        self._sequences = self._sequence.ctypes.data + 4 * np.arange(size, dtype=np.uintp)
        self._native = kind(
            n_tokens=0,
            token=_pointer(self._token, ctypes.c_int32),
            pos=_pointer(self._position, ctypes.c_int32),
            n_seq_id=_pointer(self._num_sequences, ctypes.c_int32),
            seq_id=_pointer(self._sequences, ctypes.POINTER(ctypes.c_int32)),
            logits=_pointer(self._wanted, ctypes.c_int8),
        )

    def fill(self, spans: Sequence[Span], lengths: Sequence[int]) -> Any:
        """Lay the spans out one after another; returns the llama_batch over them.

        `lengths` are the stored tokens of each sequence. Raises BackendError for spans that break
        the contract or a limit, OutOfMemory for a sequence that leaves its context.
        """
        self._check(spans, lengths)
        start = 0
        for span in spans:
            end = start + len(span.tokens)
            self._token[start:end] = span.tokens
            self._position[start:end] = range(span.start, span.start + len(span.tokens))
            self._sequence[start:end] = span.sequence
            self._wanted[start:end] = 0
            self._wanted[end - span.rows : end] = 1
            start = end
        self._native.n_tokens = start
        return self._native

    def _check(self, spans: Sequence[Span], lengths: Sequence[int]) -> None:
        _require(bool(spans), "a call needs at least one")
        _require(len({span.sequence for span in spans}) == len(spans), "a call takes one for each sequence")
        for span in spans:
            self._check_span(span, lengths)
        num_tokens = sum(len(span.tokens) for span in spans)
        _require(num_tokens <= self._max_tokens, f"a call takes at most {self._max_tokens} tokens")
        num_rows = sum(span.rows for span in spans)
        _require(num_rows <= self._max_rows, f"a call gives at most {self._max_rows} rows", "Raise max_rows.")

    def _check_span(self, span: Span, lengths: Sequence[int]) -> None:
        num_tokens = len(span.tokens)
        _require(0 <= span.sequence < len(lengths), f"there is no sequence {span.sequence}")
        _require(num_tokens > 0, "it has no tokens")
        _require(0 <= span.rows <= num_tokens, f"{num_tokens} tokens cannot give {span.rows} rows")
        stored = lengths[span.sequence]
        _require(span.start == stored, f"it starts at {span.start}, but {stored} tokens are stored")
        _require(
            min(span.tokens) >= 0 and max(span.tokens) < self._vocabulary_size,
            f"a token is outside the vocabulary of {self._vocabulary_size}",
        )
        if span.start + num_tokens > self._context_length:
            raise OutOfMemory(
                "span",
                f"{num_tokens} more tokens do not fit a context of {self._context_length}, "
                f"of which {stored} are in use",
                "Give a larger context (-c).",
            )


def _require(holds: bool, why: str, way_out: str = "") -> None:
    if not holds:
        raise BackendError("span", why, way_out)


def _pointer(array: Any, kind: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(kind))
