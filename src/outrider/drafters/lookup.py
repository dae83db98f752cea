"""What all lookups share: what they find, how good it is, and the draft that is made from it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from outrider.core.contracts import DraftRequest, StoppingRule
from outrider.core.data import Draft, DraftWork, TokenEstimate

EVIDENCE = ("match_length", "count", "total", "age")
"""What the numbers of a lookup's `TokenEstimate.evidence` are, in order; those of `Match`."""

DOUBT = 5.0
"""phantom misses against a match of one token"""

DOUBT_DECAY = 1.5
"""power of the match length by which they fade"""


def estimate(match_length: int, count: int, total: int) -> float:
    """The probability that a token is accepted which followed a match of `match_length` tokens
    `count` out of `total` times (1 or more, each).

    It is `count / (total + DOUBT / match_length ** DOUBT_DECAY)`: the share, smoothed as Laplace
    did by events that were not seen, here misses only, and the fewer the longer the match. It
    rises with the match length and with the share and stays below 1. The constants minimise the
    log-loss on the drafts of a replay over Python sources and English prose.
    """
    return count / (total + DOUBT / math.pow(match_length, DOUBT_DECAY))


@dataclass(slots=True)  # frozen ones take three times as long to make, and each step makes dozens
class Match:
    """The most likely token after the longest match.

    The last `length` tokens were found, `total` times with something after them, and `count`
    times that was `token`. `age` is how many tokens back that was the last time (1: right before),
    0 where what is looked up in has no place in time. Of a prediction it is how far from where the
    answer departed from it (0: nowhere so far) they were found again.
    """

    token: int
    length: int
    count: int
    total: int
    age: int

    @property
    def estimate(self) -> TokenEstimate:
        """What the drafter says about the token; `EVIDENCE` names the numbers."""
        evidence = (float(self.length), float(self.count), float(self.total), float(self.age))
        return TokenEstimate(estimate(self.length, self.count, self.total), evidence)


class Reader(Protocol):
    """A place in something that can be looked up in; reading changes nothing but the place."""

    def read(self, token: int) -> None:
        """Go on by one token, whether or not it is the one that was found."""
        ...

    def find(self) -> Match | None:
        """What is most likely to come next; None where nothing matches."""
        ...


class LookupDrafter(ABC):
    """A drafter that looks up what may come next. Its tokens are point masses."""

    name: ClassVar[str]
    is_free = True

    def propose(
        self, requests: Sequence[DraftRequest], stopping: StoppingRule
    ) -> tuple[list[Draft], DraftWork]:
        """One draft per request, empty where nothing matches; no model is called for it."""
        return [self._draft(request, stopping) for request in requests], DraftWork()

    @abstractmethod
    def _reader(self, sequence: int) -> Reader | None:
        """A reader at the end of the sequence's text; None where there is nothing to look up in."""

    def _draft(self, request: DraftRequest, stopping: StoppingRule) -> Draft:
        """What continues the request's prefix, as far as `stopping` lets it."""
        reader = self._reader(request.sequence)
        if reader is None:
            return Draft()
        for token in request.prefix:
            reader.read(token)
        tokens: list[int] = []
        estimates: list[TokenEstimate] = []
        while len(tokens) < request.max_tokens and stopping.should_continue(request, tokens):
            match = reader.find()
            if match is None:
                break
            estimate = match.estimate
            if not stopping.accept(request, tokens, estimate):
                break
            tokens.append(match.token)
            estimates.append(estimate)
            reader.read(match.token)
        return Draft(
            tokens=tuple(tokens),
            acceptance=tuple(estimate.acceptance for estimate in estimates),
            sources=(self.name,) * len(tokens),
            estimates=tuple(estimates),
        )
