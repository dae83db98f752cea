"""A model call's spans, laid out as the library reads them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.core.data import Span


class Batch:
    """The arrays of a llama_batch (the structure `kind`) of up to `size` tokens, allocated once and refilled
    for every call."""

    def __init__(self, kind: type[ctypes.Structure], size: int) -> None:
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

    def fill(self, spans: Sequence[Span]) -> Any:
        """Lay the spans out one after another; returns the llama_batch over them. Whether they keep the
        library's rules is the caller's to check: it ends the process otherwise."""
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


def _pointer(array: Any, kind: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(kind))
