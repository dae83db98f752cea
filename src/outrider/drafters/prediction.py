"""Drafting from an answer that is known beforehand, nearly: an edited file, a corrected text.

It is what OpenAI's API calls predicted outputs. The draft follows the prediction from its start on
without looking anything up, and finds its way back where the answer departs from it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

from outrider.core.contracts import DraftRequest, StoppingRule
from outrider.core.data import Draft, DraftWork, Request
from outrider.drafters.suffix import Match, grow

SURE_TOKENS = 8
"""tokens that agree before a place is taken for the right one; as many count for the start"""

TOKEN_BITS = 4.0
"""how much a token that agrees says for a place; each doubling of the distance says 1 against it.
From 2 to 8 it makes little difference on files of source code and their next revisions."""

MAX_PLACES = 32
"""places that are compared, on either side of where the answer departed"""


class PredictionDrafter:
    """Drafts from the answer that a request expects; one that expects none is offered nothing."""

    name = "prediction"
    is_free = True

    def __init__(self) -> None:
        self._followed: dict[int, _Place] = {}

    def begin(self, sequence: int, request: Request) -> None:
        self._followed.pop(sequence, None)
        if request.prediction:
            self._followed[sequence] = _Place(_Prediction(request.prediction))

    def observe(self, sequence: int, tokens: Sequence[int]) -> None:
        place = self._followed.get(sequence)
        if place is not None:
            for token in tokens:
                place.read(token)

    def propose(
        self, requests: Sequence[DraftRequest], stopping: StoppingRule
    ) -> tuple[list[Draft], DraftWork]:
        return [self._draft(request, stopping) for request in requests], DraftWork()

    def _draft(self, request: DraftRequest, stopping: StoppingRule) -> Draft:
        place = self._followed.get(request.sequence)
        return Draft() if place is None else grow(place.copy(), request, stopping, self.name)

    def end(self, sequence: int) -> None:
        self._followed.pop(sequence, None)

    def reset(self) -> None:
        """Forget every sequence."""
        self._followed.clear()


class _Prediction:
    """The expected tokens, and where each of them occurs."""

    __slots__ = ("ends", "tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.ends: defaultdict[int, list[int]] = defaultdict(list)
        for end, token in enumerate(self.tokens, start=1):
            self.ends[token].append(end)


class _Place:
    """How far an answer has come in its prediction.

    While the answer agrees, the place moves on with it. After a departure every place where the
    answer's last tokens occur is weighed: longer agreement against the distance from where it
    departed. One that agrees for `SURE_TOKENS` is followed without weighing others.
    """

    __slots__ = ("_agreed", "_departed", "_distance", "_place", "_prediction", "_tail")

    def __init__(self, prediction: _Prediction) -> None:
        self._prediction = prediction
        self._tail: list[int] = []
        self._place = self._departed = self._distance = 0
        self._agreed = SURE_TOKENS  # the start is as good as that

    def copy(self) -> _Place:
        """A place of its own, for a draft."""
        copy = _Place(self._prediction)
        copy._tail = self._tail[-SURE_TOKENS:]
        copy._place, copy._departed = self._place, self._departed
        copy._agreed, copy._distance = self._agreed, self._distance
        return copy

    def read(self, token: int) -> None:
        self._tail.append(token)
        tokens = self._prediction.tokens
        goes_on = self._agreed > 0 and self._place < len(tokens) and tokens[self._place] == token
        if goes_on and self._agreed >= SURE_TOKENS:
            self._place += 1
            self._agreed += 1
            return
        if self._agreed >= SURE_TOKENS:
            self._departed = self._place
        self._place, self._agreed = self._nearest(token)
        self._distance = abs(self._place - self._departed)

    def _nearest(self, token: int) -> tuple[int, int]:
        """The most plausible place after the answer's last tokens, and how many agree."""
        ends = self._prediction.ends.get(token, [])
        here = bisect_left(ends, self._departed)
        best, place, agreed = 0.0, self._departed, 0
        for end in ends[max(here - MAX_PLACES, 0) : here + MAX_PLACES]:
            length = self._agreement(end)
            weight = TOKEN_BITS * length - math.log2(1 + abs(end - self._departed))
            if weight > best:
                best, place, agreed = weight, end, length
        return place, agreed

    def _agreement(self, end: int) -> int:
        """How many of the answer's last tokens precede a place."""
        expected = self._prediction.tokens[max(end - SURE_TOKENS, 0) : end]
        length = 0
        for ours, theirs in zip(reversed(self._tail), reversed(expected), strict=False):
            if ours != theirs:
                break
            length += 1
        return length

    def find(self) -> Match | None:
        tokens = self._prediction.tokens
        if self._agreed == 0 or self._place == len(tokens):
            return None
        return Match(tokens[self._place], self._agreed, 1, 1, self._distance)
