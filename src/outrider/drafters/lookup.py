"""What all lookups share: reading along, the estimate, and growing a draft from what was found."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from outrider.core.contracts import Extend, Wish
from outrider.core.data import Draft, Hint

__all__ = ["EVIDENCE", "Match", "Reader", "estimate", "grow"]

EVIDENCE = ("match_length", "count", "total", "age")
"""What the numbers of a lookup's `Hint.evidence` are, in order; those of `Match`."""

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
    """The likeliest token behind the longest match.

    The last `length` tokens were found, `total` times with something behind them, and `count`
    times that was `token`. `age` is how many tokens back it stood the last time (1: right before),
    0 where what is looked up in has no place in time. Of a prediction it is how far from where the
    answer departed from it (0: nowhere so far) they were found again.
    """

    token: int
    length: int
    count: int
    total: int
    age: int

    @property
    def hint(self) -> Hint:
        """What the drafter says about the token; `EVIDENCE` names the numbers."""
        evidence = (float(self.length), float(self.count), float(self.total), float(self.age))
        return Hint(estimate(self.length, self.count, self.total), evidence)


class Reader(Protocol):
    """A place in something that can be looked up in; reading changes nothing but the place."""

    def read(self, token: int) -> None:
        """Go on by one token, whether or not it is the one that was found."""
        ...

    def find(self) -> Match | None:
        """What is likeliest to come next; None where nothing matches."""
        ...


def grow(reader: Reader, wish: Wish, extend: Extend, source: str) -> Draft:
    """A draft of certain tokens that follows the wish's prefix, as far as `extend` takes it."""
    for token in wish.prefix:
        reader.read(token)
    tokens: list[int] = []
    hints: list[Hint] = []
    while len(tokens) < wish.max_tokens and extend.wants(wish, tokens):
        match = reader.find()
        if match is None:
            break
        hint = match.hint
        if not extend.takes(wish, tokens, hint):
            break
        tokens.append(match.token)
        hints.append(hint)
        reader.read(match.token)
    return Draft(
        tokens=tuple(tokens),
        acceptance=tuple(hint.acceptance for hint in hints),
        sources=(source,) * len(tokens),
        hints=tuple(hints),
    )
