"""What a draft is worth at what calls cost here: expected tokens per second from its predictions.

A draft that is right more often is not always faster: what counts is whether it is right where it is sure,
and what the calls around it cost. Here its predictions on the target's own answers are known, and a draft
goes on as long as the product of its confidences stays above a threshold; the best threshold is taken, as
a policy would find it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Predictions", "Prices", "Worth", "worth_of"]

THRESHOLDS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True, slots=True)
class Prices:
    """What calls cost: `target_s[n - 1]` a target call over n tokens, `draft_s` a step of the draft."""

    target_s: tuple[float, ...]
    draft_s: float

    @property
    def max_draft(self) -> int:
        """The longest draft whose check has a price."""
        return len(self.target_s) - 1


@dataclass(frozen=True, slots=True)
class Predictions:
    """A draft's predictions along one greedy answer of the target, the answer itself given up to each.

    `confidences` (answer,): the probability of its likeliest token, 0 where that is one it does not know;
    `matches` (answer,): whether that token is the target's.
    """

    confidences: npt.NDArray[np.float32]
    matches: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Worth:
    """What a draft makes of some answers at the best threshold; plain decoding alone where none pays.

    `tokens_per_s`; `plain_tokens_per_s` without a draft; `accepted` / `drafted`: tokens.
    """

    tokens_per_s: float
    plain_tokens_per_s: float
    threshold: float
    drafted: int
    accepted: int

    @property
    def speedup(self) -> float:
        """Over plain decoding."""
        return self.tokens_per_s / self.plain_tokens_per_s

    @property
    def acceptance(self) -> float:
        """Accepted tokens of those drafted, 0-1; 0 where none are."""
        return self.accepted / self.drafted if self.drafted else 0.0


def worth_of(answers: Sequence[Predictions], prices: Prices) -> Worth:
    """Expected speed over some answers, each of which starts behind its own prompt."""
    plain = 1 / prices.target_s[0]
    best = Worth(plain, plain, 1.0, 0, 0)
    for threshold in THRESHOLDS:
        found = _at(answers, prices, threshold, plain)
        if found.tokens_per_s > best.tokens_per_s:
            best = found
    return best


def _at(answers: Sequence[Predictions], prices: Prices, threshold: float, plain: float) -> Worth:
    seconds, tokens, drafted, accepted = 0.0, 0, 0, 0
    for answer in answers:
        confidences, matches = answer.confidences.tolist(), answer.matches.tolist()
        at = 0
        while at < len(matches):
            length, steps = _length(confidences, at, threshold, prices.max_draft)
            right = 0
            while right < length and matches[at + right]:
                right += 1
            seconds += prices.target_s[length] + steps * prices.draft_s
            tokens += min(right + 1, len(matches) - at)
            drafted, accepted = drafted + length, accepted + right
            at += right + 1
    return Worth(tokens / seconds if seconds else plain, plain, threshold, drafted, accepted)


def _length(confidences: Sequence[float], at: int, threshold: float, most: int) -> tuple[int, int]:
    """How many tokens are drafted from here, and how many steps of the draft that takes: the one whose
    confidence ends the draft is made as well."""
    product, length = 1.0, 0
    most = min(most, len(confidences) - at - 1)
    while length < most:
        product *= confidences[at + length]
        if product < threshold:
            return length, length + 1
        length += 1
    return length, length
