"""What a draft is worth at what calls cost here: expected tokens per second from its predictions.

A draft that is right more often is not always faster: what counts is whether it is right where it is sure,
and what the calls around it cost. Here its predictions on the target's own answers are known, and a draft
goes on as long as the product of its confidences stays above a threshold, up to a length. The best pair of
threshold and length is taken, as a policy would find it: confidence alone does not know where calls get dear.
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

    `confidences` (answer,): the probability of its most likely token, 0 where that is one it does not know;
    `matches` (answer,): whether that token is the target's.
    """

    confidences: npt.NDArray[np.float32]
    matches: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Worth:
    """What a draft makes of some answers at the best threshold and length; plain decoding alone where no pair
    pays.

    `tokens_per_s`; `plain_tokens_per_s` without a draft; `longest`: tokens of the longest draft that is
    allowed, 0 for none; `accepted` / `drafted`: tokens.
    """

    tokens_per_s: float
    plain_tokens_per_s: float
    threshold: float
    longest: int
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
    best = Worth(plain, plain, 1.0, 0, 0, 0)
    if not sum(len(answer.matches) for answer in answers) or not prices.max_draft:
        return best
    paths = _Paths(answers, prices)
    for threshold in THRESHOLDS:
        for longest, (seconds, drafted, accepted) in enumerate(paths.walked(threshold).tolist(), start=1):
            speed = paths.num_tokens / seconds
            if speed > best.tokens_per_s:
                best = Worth(speed, plain, threshold, longest, round(drafted), round(accepted))
    return best


class _Paths:
    """All answers one behind the other, walked at once for every greatest length of a draft."""

    def __init__(self, answers: Sequence[Predictions], prices: Prices) -> None:
        sizes = np.array([len(answer.matches) for answer in answers])
        self._ends = np.cumsum(sizes)
        self._starts = self._ends - sizes
        self.num_tokens = int(self._ends[-1])
        self._target_s = np.array(prices.target_s)
        self._draft_s = prices.draft_s
        self._confidences = np.concatenate([answer.confidences for answer in answers]).astype(np.float64)
        places = np.arange(self.num_tokens)
        wrong = np.where(np.concatenate([answer.matches for answer in answers]), self.num_tokens, places)
        self._right = np.minimum.accumulate(wrong[::-1])[::-1] - places
        """tokens in a row that are right from each place on; these may run past an answer's end"""

    def walked(self, threshold: float) -> npt.NDArray[np.float64]:
        """Seconds, drafted and accepted tokens (longest draft - 1, 3) of all answers."""
        most = len(self._target_s) - 1
        sure = self._sure(threshold, most)
        at, end = np.repeat(self._starts, most), np.repeat(self._ends, most)
        longest = np.tile(np.arange(1, most + 1), len(self._starts))
        found = np.zeros((most, 3))
        while (going := at < end).any():
            at, end, longest = at[going], end[going], longest[going]
            room = np.minimum(longest, end - at - 1)
            length = np.minimum(sure[at], room)
            # The step whose confidence ends a draft is made as well.
            spent_s = self._target_s[length] + (length + (length < room)) * self._draft_s
            accepted = np.minimum(self._right[at], length)
            for column, values in enumerate((spent_s, length, accepted)):
                found[:, column] += np.bincount(longest - 1, values, minlength=most)
            at = at + accepted + 1
        return found

    def _sure(self, threshold: float, most: int) -> npt.NDArray[np.int64]:
        """How many tokens from each place on are drafted until the product of confidences is too small."""
        products = np.ones(self.num_tokens)
        sure = np.zeros(self.num_tokens, dtype=np.int64)
        for ahead in range(min(most, self.num_tokens)):
            products[: self.num_tokens - ahead] *= self._confidences[ahead:]
            products[self.num_tokens - ahead :] = 0
            sure += products >= threshold
        return sure
