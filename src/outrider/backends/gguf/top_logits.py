"""The most likely tokens of each row, picked where the model is computed, so that no whole row is copied.
llama.cpp runs samplers as a part of the graph, one for each sequence. Its top-k sampler hands out tokens with
their logits, and of these everything follows that most filters ask for. What a build's sampler gives is
compared with whole rows before it is relied on. Where one token is enough the whole row is copied: picking
takes the GPU longer than the copy and an argmax (benchmarks/gpu)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from outrider.backends.gguf.c_types import functions, structure
from outrider.backends.gguf.library import Handle, Library
from outrider.core.data import Logits, Span, TopLogits
from outrider.core.notices import notify

_NUM_PICKED, _MAX_ASKED = 64, 48
"""of each row: the others show whether a tie leaves open which are the most likely"""
_TOLERANCE = 0.01
"""by which a logit may differ between two calls over the same tokens"""

ChainParams = structure("llama_sampler_chain_params", "bool no_perf")
_SIGNATURES = functions(
    """
    ptr llama_sampler_chain_init (params)
    void llama_sampler_chain_add (ptr ptr)
    ptr llama_sampler_init_top_k (i32)
    void llama_sampler_free (ptr)
    bool llama_set_sampler (ptr i32 ptr)
    ptr llama_get_sampled_logits_ith llama_get_sampled_candidates_ith (ptr i32)
    u32 llama_get_sampled_logits_count_ith (ptr i32)
    """,
    params=ChainParams,
)


class TopSampling:
    """The samplers of a context's sequences. Raises LibraryRefused for a library without them."""

    def __init__(self, library: Library, context: int, size: int) -> None:
        library.declare(_SIGNATURES)
        self._library, self._native, self._context, self._size = library, library.functions, context, size
        self._chains: dict[int, Handle] = {}
        self._checked: set[bool] = set()
        """whether calls of several rows, and of one, were compared with whole rows"""
        self.is_off = False

    def prepare(self, spans: Sequence[Span]) -> bool:
        """Get ready for a call; whether `read` will have its rows: those of all sequences, or of none."""
        with_rows = [span for span in spans if span.rows]
        for span in with_rows:
            if not all(1 < each.top <= _MAX_ASKED for each in with_rows) or self.is_off:
                self._detach(span.sequence)
            elif span.sequence not in self._chains:
                self._attach(span.sequence)
        return bool(with_rows) and all(span.sequence in self._chains for span in with_rows)

    def _detach(self, sequence: int) -> None:
        if chain := self._chains.pop(sequence, None):
            self._native.llama_set_sampler(self._context, sequence, None)
            chain.close()

    def _attach(self, sequence: int) -> None:
        native = self._native
        chain = Handle("sampler", native.llama_sampler_chain_init(ChainParams()), native.llama_sampler_free)
        native.llama_sampler_chain_add(chain.pointer, native.llama_sampler_init_top_k(_NUM_PICKED))
        if native.llama_set_sampler(self._context, sequence, chain.pointer):
            self._chains[sequence] = chain
        else:
            self._give_up("cannot be used with these settings")

    def _give_up(self, why: str) -> None:
        self.is_off = True
        notify(f"{self._library.title}'s sampler in the model's graph {why}: whole rows are copied instead")

    def read(self, spans: Sequence[Span]) -> list[list[TopLogits]] | None:
        """The rows of a call; None where they do not show for certain what was asked for."""
        tops = np.repeat([span.top for span in spans], [span.rows for span in spans])
        picked = self._native.llama_get_sampled_logits_count_ith(self._context, -1)
        if picked != _NUM_PICKED:
            self._give_up(f"gave {picked} tokens for {_NUM_PICKED}")
            return None
        tokens = self._values("llama_get_sampled_candidates_ith", ctypes.c_int32, len(tops))
        logits = self._values("llama_get_sampled_logits_ith", ctypes.c_float, len(tops))
        order = np.lexsort((tokens, -logits))
        tokens = np.take_along_axis(tokens, order, 1).astype(np.int64)
        logits = np.take_along_axis(logits, order, 1)
        last = logits[np.arange(len(tops)), tops - 1]
        if not (last > logits[:, -1]).all():  # nor where one is no number
            return None
        rows = [TopLogits(*row) for row in zip(tokens, logits, strict=True)]
        ends = accumulate(span.rows for span in spans)
        return [rows[end - span.rows : end] for span, end in zip(spans, ends, strict=True)]

    def _values(self, name: str, kind: Any, num_rows: int) -> Any:
        """A view of what was picked of each row; the library leaves room for whole rows."""
        first = getattr(self._native, name)(self._context, -num_rows)
        length = (num_rows - 1) * self._size + _NUM_PICKED
        values = np.ctypeslib.as_array((kind * length).from_address(first))
        width = values.itemsize
        return np.lib.stride_tricks.as_strided(
            values, (num_rows, _NUM_PICKED), (width * self._size, width), writeable=False
        )

    def is_checked(self, spans: Sequence[Span]) -> bool:
        """Whether such calls were compared with whole rows."""
        return (sum(span.rows for span in spans) > 1) in self._checked

    def check(self, found: Sequence[Sequence[TopLogits]], whole: Sequence[Logits]) -> None:
        """Compare the rows of a call with the whole ones; where they differ, there are no more of them."""
        pairs = [
            pair for tops, rows in zip(found, whole, strict=True) for pair in zip(tops, rows, strict=True)
        ]
        self._checked.add(len(pairs) > 1)
        for top, row in pairs:
            is_near = np.abs(row[top.tokens] - top.logits).max() <= _TOLERANCE
            num_above = np.count_nonzero(row > top.logits.min() + _TOLERANCE)
            if not is_near or num_above > _NUM_PICKED:
                self._give_up("picks other tokens than the logits say")
                return
