"""Which request is in which row of another engine's batch, from the tokens alone. Such an engine shows its
batch as rows of tokens, without the requests' ids, and moves rows when requests come and go. A request goes
on in a row whose text is its own followed by the tokens that were just sampled; any other row holds a new
request, or one that was away (preempted, resumed): it is read as a new one."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from outrider.core.data import Draft

Tokens = npt.NDArray[np.integer]
"""Token ids, shape (batch, tokens) or (tokens,); what lies after a row's length is not looked at."""

_COMPARED = 1024
"""Tokens at the end of a text by which it is recognized, with its length. Texts that agree so far are one to
any lookup; to compare whole ones would take a noticeable part of a step where texts are long."""


@dataclass(slots=True)
class Running:
    """A request as far as it has come. `sequence` is its number among those that are running: numbers are
    used again, the lowest first. `end` are the last tokens of its text, `length` is the whole text's."""

    sequence: int
    length: int
    end: Tokens
    draft: Draft = field(default_factory=Draft)
    """what was proposed for the step that is running"""
    unread: list[int] = field(default_factory=list)
    """tokens of its text that drafters have not read yet"""

    def note(self, row: Tokens, length: int) -> None:
        """Its text is now the first `length` tokens of `row`."""
        self.length, self.end = length, row[max(length - _COMPARED, 0) : length].copy()

    def goes_on_in(self, row: Tokens, length: int) -> bool:
        """Whether the first `length` tokens of `row` are its text."""
        end = row[self.length - len(self.end) : self.length]
        return self.length == length and bool(np.array_equal(self.end, end))


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a step: `tokens` were sampled for `request`; None while its prompt is being read, of which
    `length` tokens are known. `is_new`: the request was not in the step before."""

    request: Running | None
    tokens: tuple[int, ...]
    is_new: bool
    length: int


class Rows:
    """The requests of the last step, by the row that each was in."""

    def __init__(self) -> None:
        self._last: dict[int, Running] = {}
        self._free: list[int] = []
        self._num_taken = 0

    def update(
        self, sampled: Sequence[Sequence[int]], lengths: Sequence[int], texts: Tokens
    ) -> tuple[list[Row], list[Running]]:
        """The rows of a step, and the requests that are no longer among them. `sampled` are the tokens that
        each row got, none while a prompt is being read; `lengths` those of the texts, these tokens included.
        """
        found = self._find(sampled, lengths, texts)
        kept = set(found.values())
        gone = [request for i, request in self._last.items() if i not in kept]
        for request in gone:
            heapq.heappush(self._free, request.sequence)
        rows, now = [], dict[int, Running]()
        for i, tokens in enumerate(sampled):
            length = int(lengths[i])
            if not tokens:
                rows.append(Row(None, (), True, length))
                continue
            request = self._last[found[i]] if i in found else self._new(texts[i], length)
            now[i] = request
            request.note(texts[i], length)
            rows.append(Row(request, tuple(map(int, tokens)), i not in found, length))
        self._last = now
        return rows, gone

    def _find(
        self, sampled: Sequence[Sequence[int]], lengths: Sequence[int], texts: Tokens
    ) -> dict[int, int]:
        found, moved = dict[int, int](), list[int]()
        for i, tokens in enumerate(sampled):
            request = self._last.get(i)
            if tokens and request and request.goes_on_in(texts[i], int(lengths[i]) - len(tokens)):
                found[i] = i
            elif tokens:
                moved.append(i)
        left: dict[int, list[int]] = {}
        for i, request in self._last.items():
            if i not in found:
                left.setdefault(request.length, []).append(i)
        for i in moved:
            before = int(lengths[i]) - len(sampled[i])
            candidates = left.get(before, [])
            for j in candidates:
                if self._last[j].goes_on_in(texts[i], before):
                    found[i] = j
                    candidates.remove(j)
                    break
        return found

    def _new(self, row: Tokens, length: int) -> Running:
        if self._free:
            sequence = heapq.heappop(self._free)
        else:
            sequence, self._num_taken = self._num_taken, self._num_taken + 1
        return Running(sequence, length, row[:0], unread=row[:length].tolist())
