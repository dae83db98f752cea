"""A draft under construction, and what each length of it is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

import numpy as np
import numpy.typing as npt

from outrider.core.data import Distribution, Draft, TokenEstimate, point_masses

__all__ = ["Chain", "Growth", "Prices", "Rises", "best_length", "expected_tokens"]

Array = npt.NDArray[np.float64]

CAUTION = 0.05
"""What a longer call must bring in, for each second more, beyond its time. The best of many lengths is
more often one whose estimate is too good than one whose estimate is too bad."""

_WORTH_SEEING = 0.5
_MIN_SEEN = 0.02
"""Free tokens that stand more rarely than these are not looked for: half of what a token costs, at least."""
_ROUGHLY = 0.7
"""Offers that bring less than this part of what they seem to cost are dropped without a closer look."""


@dataclass(slots=True)
class Chain:
    """Tokens that may come next, and the probability of each that it stands if all before it do."""

    tokens: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    estimates: list[TokenEstimate] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)

    def extend(self, draft: Draft, chances: Sequence[float]) -> None:
        """Put what a drafter offered behind it."""
        self.tokens += draft.tokens
        self.sources += draft.sources
        self.estimates += draft.estimates
        self.chances += chances

    def append(self, other: Chain) -> None:
        """Put another chain behind it."""
        self.tokens += other.tokens
        self.sources += other.sources
        self.estimates += other.estimates
        self.chances += other.chances

    def first(self, length: int) -> Chain:
        """A chain of its first tokens."""
        return Chain(
            self.tokens[:length], self.sources[:length], self.estimates[:length], self.chances[:length]
        )

    def as_draft(self, offer: Draft, lead: int) -> Draft:
        """A draft of these tokens, of which those from `lead` on are a draft model's `offer`, as far as it
        goes. The others are certain, among drawn ones too."""

        def spread(known: tuple[Distribution, ...]) -> tuple[Distribution, ...]:
            certain = list(point_masses(self.tokens))
            certain[lead : lead + len(known)] = known
            return tuple(certain[: len(self)])

        return Draft(
            tokens=tuple(self.tokens),
            probs=spread(offer.probs) if offer.probs is not None else None,
            acceptance=tuple(self.chances),
            sources=tuple(self.sources),
            estimates=tuple(self.estimates),
            greedy_probs=spread(offer.greedy_probs) if offer.greedy_probs and len(self) > lead else (),
        )

    def __len__(self) -> int:
        return len(self.tokens)


def expected_tokens(chances: Sequence[float], survival: float = 1.0) -> Array:
    """Accepted tokens to be expected of the first 0, 1, … of a chain, shape (len + 1,)."""
    survivals = survival * np.cumprod(np.asarray(chances, dtype=np.float64))
    return np.concatenate(([0.0], survivals)).cumsum()


@dataclass(frozen=True, slots=True)
class Prices:
    """What the present step costs and earns, in seconds.

    `calls_s[n]` is the target's call with n drafted tokens; `step_s` one more step of the draft model
    and `first_s[i]` its first, with i tokens drafted by others to be read; `bonus_s` what the next first
    one costs more behind a draft that stood as a whole; `token_s` what an emitted token is worth: the
    time that it would take otherwise.
    """

    token_s: float
    calls_s: Array
    step_s: float = 0.0
    first_s: Array = field(default_factory=lambda: np.zeros(1))
    bonus_s: float = 0.0

    @property
    def longest(self) -> int:
        """The longest draft that there is a price for."""
        return len(self.calls_s) - 1

    def up_to(self, longest: int) -> Prices:
        """Those of drafts up to this length."""
        if longest >= self.longest:
            return self
        calls_s = self.calls_s[: longest + 1]
        return Prices(self.token_s, calls_s, self.step_s, self.first_s, self.bonus_s)


class Rises:
    """By how much a call rises with drafted tokens, in plain calls: what can be told without arithmetic
    on arrays, which takes a noticeable part of a small target's step.

    `calls_s` is as in `Prices`.
    """

    def __init__(self, calls_s: Array) -> None:
        self.calls_s = calls_s
        rises = calls_s[1:] / calls_s[0] - 1.0
        self.rises: list[float] = rises.tolist()
        """of 1, 2, … drafted tokens, in plain calls"""
        least = float((rises / np.arange(1, len(calls_s))).min())
        self.worth_seeing = min(max(_WORTH_SEEING * least, _MIN_SEEN), 1.0)
        """the probability to stand below which a free token is not looked for"""

    def may_pay(self, chances: Sequence[float]) -> bool:
        """Whether drafting free tokens with these chances may be worth it in a call of their own."""
        survival, expected = 1.0, 0.0
        for chance, rise in zip(chances, self.rises, strict=False):
            survival *= chance
            expected += survival
            if expected >= _ROUGHLY * rise:
                return True
        return False


class Growth:
    """The draft of one sequence while it grows: free tokens, those of a draft model, free ones again."""

    def __init__(self) -> None:
        self.chances: list[float] = []
        self.survival = 1.0
        self._expected = [1.0]

    def __len__(self) -> int:
        return len(self._expected) - 1

    @property
    def expected(self) -> float:
        """Tokens that the step is expected to emit, the target's own included."""
        return self._expected[-1]

    def add(self, chance: float) -> None:
        """One more token, which stands with this probability if all before it do."""
        self.chances.append(chance)
        self.survival *= chance
        self._expected.append(self._expected[-1] + self.survival)

    def best(self, prices: Prices, tail: Chain, least: int = 0) -> tuple[int, float]:
        """The best length, of `least` or more, if no model is asked any more, the free `tail` included;
        and what the step then gains in seconds."""
        room = max(prices.longest - len(self), 0)
        return best_length([*self.chances, *tail.chances[:room]], prices.calls_s, prices.token_s, least)


def best_length(
    chances: Sequence[float], calls_s: Array, token_s: float, least: int = 0
) -> tuple[int, float]:
    """How many tokens of a chain to draft now, `least` or more, and what is gained from here to where the
    chain breaks off, in seconds.

    What is not drafted now can be drafted by the next step, if all before it turns out to stand: a long draft
    must be worth more than two short ones. So the chain is solved from its end (Bellman's principle): with
    k of its tokens known to stand, a step that drafts n more and, by the target's own token, reaches place
    k + n + 1 gains what it emits and what is gained from there. Where the chain breaks off or ends nothing is
    known of what comes, which is then worth `token_s` a token.
    """
    size = min(len(chances), len(calls_s) - 1)
    costs: list[float] = calls_s[: size + 1].tolist()
    costs = [cost + CAUTION * (cost - costs[0]) for cost in costs]
    survivals = list(accumulate(chances[:size], mul, initial=1.0))
    earned = list(accumulate(survivals[1:], initial=0.0))
    # Everything is weighed by the probability that its place is reached.
    worth, gains, onward = [token_s * tokens for tokens in earned], [0.0], 0.0
    for k in range(size, -1, -1):
        worth[k] += onward
        gains = [reached - survivals[k] * cost for reached, cost in zip(worth[k:], costs, strict=False)]
        onward = token_s * (survivals[k] - earned[k]) + max(gains)
    length = max(range(least, size + 1), key=gains.__getitem__)
    return length, token_s + gains[length]
