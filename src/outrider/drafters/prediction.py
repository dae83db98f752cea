"""Drafting from an answer that is nearly known: an edited file, a corrected text.

The draft follows the prediction from its start on, and finds its way back where the answer departs from it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from copy import copy

from outrider.core.data import Request
from outrider.core.sequences import common_prefix
from outrider.drafters.lookup import LookupDrafter, Match

SURE_TOKENS = 8  # that agree before a place is taken for the right one; as many count for the start
TOKEN_BITS = 4.0  # weight of a token that agrees with a place; each doubling of the distance takes 1 away
MAX_PLACES = 32  # that are compared, on either side of where the answer departed


class _Place:
    """How far an answer has come in its prediction.

    After a departure every place where the answer's last tokens occur is weighed: longer agreement against
    the distance from where it departed. One that agrees for `SURE_TOKENS` is followed without weighing.
    """

    def __init__(self, prediction: Sequence[int]) -> None:
        self._tokens = list(prediction)
        self._ends: defaultdict[int, list[int]] = defaultdict(list)  # numbers of tokens up to each, by token
        for end, token in enumerate(prediction, start=1):
            self._ends[token].append(end)
        self._recent: tuple[int, ...] = ()  # the last tokens of the answer
        self._place = self._departed = 0
        self._agreed = SURE_TOKENS  # the start is as good as that

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.read(token)

    def read(self, token: int) -> None:
        self._recent = (*self._recent[1 - SURE_TOKENS :], token)
        tokens = self._tokens
        goes_on = self._agreed > 0 and self._place < len(tokens) and tokens[self._place] == token
        if goes_on and self._agreed >= SURE_TOKENS:
            self._place += 1
            self._agreed += 1
            return
        if self._agreed >= SURE_TOKENS:
            self._departed = self._place
        self._place, self._agreed = self._nearest(token)

    def _nearest(self, token: int) -> tuple[int, int]:
        """The most plausible place after the answer's last tokens, and how many agree."""
        ends = self._ends.get(token, [])
        here = bisect_left(ends, self._departed)
        best, place, agreed = 0.0, self._departed, 0
        for end in ends[max(here - MAX_PLACES, 0) : here + MAX_PLACES]:
            expected = self._tokens[max(end - SURE_TOKENS, 0) : end]
            length = common_prefix(reversed(self._recent), reversed(expected))
            weight = TOKEN_BITS * length - math.log2(1 + abs(end - self._departed))
            if weight > best:
                best, place, agreed = weight, end, length
        return place, agreed

    def reader(self) -> _Place:
        return copy(self)

    def find(self) -> Match | None:
        if self._agreed == 0 or self._place == len(self._tokens):
            return None
        return Match(self._tokens[self._place], self._agreed, 1, 1)


class PredictionDrafter(LookupDrafter[_Place]):
    """Drafts from the answer that a request expects; one that expects none is offered nothing."""

    name = "prediction"

    def begin(self, sequence: int, request: Request) -> None:
        self.end(sequence)
        if request.prediction:
            self._texts[sequence] = _Place(request.prediction)
