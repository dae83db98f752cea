"""Where in an answer sampling is tested: a few tokens tell much only where much is left to chance.

A free answer is tested at its beginning. The beginning of a constrained one is often all but certain
(`{"name": "`), so its greedy text is followed, and the test begins where text is forced, if possible such
that the model likes to spell in several ways, and where the tokens leave most to chance: there masks, forced
drafts and what the draft model makes of both decide the outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.certify.memo import Rows
from outrider.certify.sampled import LENGTH
from outrider.core.contracts import Constraint, Vocabulary
from outrider.core.data import Distribution
from outrider.core.errors import ConstraintError
from outrider.core.params import SamplingParams
from outrider.sampling import RequestSampler

__all__ = ["LOOKED_AT", "Start", "find_start"]

LOOKED_AT = 32
"""Tokens of a constrained answer among which the start is chosen."""


_OPEN = 0.05
"""Nats above which a choice counts as open."""


@dataclass(frozen=True, slots=True)
class Start:
    """The prompt that samples are generated from; its last tokens are `said`, the beginning of the answer.

    `forced` grades what is ahead: 2 where text is forced that has several likely spellings, 1 where text
    is forced, else 0. `entropy` is what the first token (of a constrained answer: the texts' tokens
    together) leaves to chance, in nats.
    """

    prompt: tuple[int, ...]
    said: tuple[int, ...]
    forced: int
    entropy: float

    @property
    def worth(self) -> tuple[int, float]:
        """How much a test that starts here can tell; more is better."""
        return self.forced, self.entropy


def find_start(
    rows: Rows, vocabulary: Vocabulary, prompt: tuple[int, ...], constrain: Callable[[], Constraint] | None
) -> Start:
    """Where the answer to this prompt is tested; `constrain` makes its constraint, if it has one."""
    constraint = constrain() if constrain is not None else None
    sampler = RequestSampler(SamplingParams(temperature=1.0), vocabulary, prompt, constraint)
    said: list[int] = []
    places: list[tuple[int, float]] = []
    """for each place, the grade of what is forced there, and its entropy"""
    while len(places) < LOOKED_AT:
        try:
            drawn = sampler.distribution(rows.after((*prompt, *said), 1)[0], ())
        except ConstraintError:
            break
        entropy = _entropy(drawn)
        forced = constraint is not None and bool(constraint.forced(()))
        places.append((forced + (forced and entropy > _OPEN), entropy))
        likeliest = int(drawn.tokens[np.argmax(drawn.probs)])
        if constraint is None or vocabulary.ends_generation(likeliest):
            break
        constraint.accept((likeliest,))
        sampler.accept((likeliest,))
        said.append(likeliest)
        if constraint.is_complete:
            break
    starts = [_start(prompt, said[:i], places[i : i + LENGTH]) for i in range(len(places))]
    return max(starts, key=lambda start: start.worth, default=_start(prompt, (), ()))


def _start(prompt: tuple[int, ...], said: Sequence[int], ahead: Sequence[tuple[int, float]]) -> Start:
    forced = max((grade for grade, _ in ahead), default=0)
    return Start((*prompt, *said), tuple(said), forced, sum(entropy for _, entropy in ahead))


def _entropy(drawn: Distribution) -> float:
    return float(-(drawn.probs * np.log(drawn.probs)).sum())
