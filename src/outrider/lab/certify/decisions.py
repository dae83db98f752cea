"""Every decision about a draft, against the probabilities that the papers give it.

The verdicts that the engine got are recorded while it samples, and each is asked for again many times with
fresh random numbers. How far they depart in the direction of an error is tested: the acceptance ratio p / q
off by a factor, q subtracted with such a factor after a rejection, a bonus token of another temperature. The
laws are written out here once more: those of `outrider.verify` are under test.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from outrider.core.data import Distribution, Draft, Request, Verdict
from outrider.lab.certify.texts import Wrapped
from outrider.sampling import point_mass, probability
from outrider.verify import Verifier

Probs = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Kind = Literal["acceptance", "recovered", "bonus"]
KINDS: tuple[Kind, ...] = ("acceptance", "recovered", "bonus")
RULES = ("token", "block")
"""Those that decide by chance (the seed-stable rule's texts are compared). Drafts without distributions
follow the law of `token` under `block` too."""

_NORMAL_95 = 1.645
"""what a normal variable stays below with that probability"""

# A test against one kind of error, over outcomes of many laws at once

ERRORS = (0.0, -0.01, 0.01, -0.03, 0.03, -0.1, 0.1, -0.3, 0.3)
"""The errors under which a law is known: none, then pairs; the first pair gives the direction."""

_MAX_SCORE = 20.0
"""Scores are cut there: a rare outcome must not decide alone."""
_STEEPNESS = np.array([*np.arange(0.5, 9, 0.5), 10, 12, 16, 24, 36])
"""In standard deviations: at which exponents the bound on the tail is tried."""


class ScoreTest:
    """Do outcomes, each of a known law, deviate from their laws as an error of a known kind would make them?

    The score of an outcome is by how much an error changes the logarithm of its probability, per unit of
    error; their sum is compared with its bound under the laws (Chernoff's, which holds for any number
    of outcomes). An outcome that its law rules out decides at once.
    """

    def __init__(self) -> None:
        self.outcomes = 0
        self.impossible = 0
        self._sum = self._variance = 0.0
        self._shifts = np.zeros(len(ERRORS))
        self._laws: list[tuple[int, Probs, Probs]] = []

    def add(self, laws: Sequence[Probs], counts: Counts, impossible: int = 0) -> None:
        """Add outcomes of one law: `laws` are their probabilities under each of `ERRORS`, `counts` how often
        each was seen; `impossible` others were."""
        law = laws[0]
        possible = law > 0
        self.outcomes += int(counts.sum()) + impossible
        self.impossible += int(counts[~possible].sum()) + impossible
        law, counts = law[possible], counts[possible]
        others = np.array([other[possible] for other in laws])
        scores = np.clip((others[2] - others[1]) / (ERRORS[2] - ERRORS[1]) / law, -_MAX_SCORE, _MAX_SCORE)
        scores -= law @ scores
        variance, count = float(law @ scores**2), int(counts.sum())
        if variance < 1e-12 or not count:
            return
        self._sum += float(counts @ scores)
        self._variance += count * variance
        self._shifts += count * (others @ scores)
        self._laws.append((count, law, scores))

    @property
    def statistic(self) -> float | None:
        """The sum of scores in standard deviations; None where an outcome was impossible, or none tells."""
        return None if self.impossible or not self._laws else self._sum / math.sqrt(self._variance)

    def p_value(self) -> float:
        """At least the probability of a sum so far from 0; 0 where an outcome was impossible."""
        if self.impossible or not self._laws:
            return 0.0 if self.impossible else 1.0
        exponents, cumulants = self._cumulants(math.copysign(1.0, self._sum))
        return min(1.0, 2 * math.exp(min(0.0, float((cumulants - exponents * abs(self._sum)).min()))))

    def detectable_error(self, level: float) -> float | None:
        """The smallest error that is found with probability 0.95 at this level, whatever its sign, worked
        out from the laws of these outcomes; None where none up to 0.3 is."""
        if not self._laws:
            return None
        found = []
        for sign, shifts in ((1.0, self._shifts[2::2]), (-1.0, -self._shifts[1::2])):
            exponents, cumulants = self._cumulants(sign)
            critical = float(((cumulants + math.log(2 / level)) / exponents).min())
            wanted = critical + _NORMAL_95 * math.sqrt(self._variance)
            shifts = np.maximum.accumulate([0.0, *shifts])
            if shifts[-1] < wanted:
                return None
            found.append(float(np.interp(wanted, shifts, [0.0, *ERRORS[2::2]])))
        return max(found)

    def _cumulants(self, sign: float) -> tuple[Probs, Probs]:
        exponents: Probs = _STEEPNESS / math.sqrt(self._variance)
        counts = np.array([count for count, _, _ in self._laws])
        probs = np.concatenate([law for _, law, _ in self._laws])
        scores = sign * np.concatenate([scores for _, _, scores in self._laws])
        starts = np.cumsum([0, *(len(law) for _, law, _ in self._laws[:-1])])
        with np.errstate(over="ignore"):  # an infinite bound is none
            moments = (np.add.reduceat(probs * np.exp(e * scores), starts) for e in exponents)
            return exponents, np.array([counts @ np.log(moment) for moment in moments])


# The decisions, and their laws


@dataclass(frozen=True, slots=True)
class DecisionTest:
    """Were the decisions of a rule made with its probabilities? `statistic` is the sum of the scores in
    standard deviations; None where one of `impossible` outcomes decides, or no outcome tells.
    `detectable_error` is the smallest error that these decisions show with probability 0.95: of the
    acceptance ratio, of what is subtracted after a rejection, of the temperature (None: none up to 30 %)."""

    rule: str
    kind: str
    decisions: int
    impossible: int
    statistic: float | None
    p_value: float
    detectable_error: float | None
    rejected: bool = False


MakeVerifier = Callable[[Request, int], Verifier]
ScoreTests = dict[tuple[str, Kind], ScoreTest]
_Key = tuple[tuple[int, ...], tuple[int, ...], bool]


class Decisions:
    """The verdicts of one rule on one prompt, by what decides them: the tokens before, and the draft."""

    def __init__(self, rule: str) -> None:
        self._rule = rule
        self._verdicts: dict[_Key, tuple[_Law, Counter[tuple[int, int]]]] = {}

    def recorded(self, make: MakeVerifier) -> MakeVerifier:
        return lambda request, seed: cast(Verifier, _Recorded(make(request, seed), self._note))

    def _note(
        self, before: tuple[int, ...], target: Sequence[Distribution], draft: Draft, verdict: Verdict
    ) -> None:
        if not draft.tokens or verdict.token is None or self._rule not in RULES:
            return
        key = (before, draft.tokens, draft.probs is None)
        if key not in self._verdicts:
            rule = "token" if self._rule == "block" and draft.probs is None else self._rule
            targets = [target[i] for i in range(len(draft) + 1)]
            self._verdicts[key] = _Law(rule, targets, draft), Counter()
        self._verdicts[key][1][verdict.num_accepted, verdict.token] += 1

    def repeat(self, make: MakeVerifier, request: Request, times: int, seed: int) -> None:
        """Ask for each verdict again, `times` as often."""
        verifier = make(request, seed)
        for (before, _, _), (law, verdicts) in self._verdicts.items():
            for _ in range(times * verdicts.total()):
                found = verifier.verify(law.targets, law.draft, len(before))  # type: ignore[arg-type]
                if found.token is not None:
                    verdicts[found.num_accepted, found.token] += 1

    def add_to(self, tests: ScoreTests) -> None:
        for law, verdicts in self._verdicts.values():
            accepted = np.zeros(len(law.draft) + 1, dtype=np.int64)
            followed: defaultdict[int, Counter[int]] = defaultdict(Counter)
            for (num_accepted, token), count in verdicts.items():
                accepted[num_accepted] += count
                followed[num_accepted][token] += count
            tests[law.rule, "acceptance"].add([law.accepted(error) for error in ERRORS], accepted)
            for num_accepted, tokens in followed.items():
                kind: Kind = "bonus" if num_accepted == len(law.draft) else "recovered"
                counts = np.array([tokens.pop(int(t), 0) for t in law.targets[num_accepted].tokens])
                laws = [law.following(num_accepted, error) for error in ERRORS]
                tests[law.rule, kind].add(laws, counts, impossible=tokens.total())


class _Recorded(Wrapped):
    def __init__(self, inner: Verifier, note: Callable[..., None]) -> None:
        super().__init__(inner)
        self._note = note
        self._before: tuple[int, ...] = ()

    def verify(self, target: Sequence[Distribution], draft: Draft, position: int) -> Verdict:
        verdict: Verdict = self.inner.verify(target, draft, position)
        self._note(self._before, target, draft, verdict)
        if verdict.token is not None:
            self._before += (*draft.tokens[: verdict.num_accepted], verdict.token)
        return verdict


class _Law:
    """What a rule does with a draft. `error` makes it wrong: 0.03 takes p / q for 3 % more than it is."""

    def __init__(self, rule: str, targets: Sequence[Distribution], draft: Draft) -> None:
        offered = draft.probs or tuple(map(point_mass, draft.tokens))
        self.rule = rule
        self.targets = targets
        self.draft = draft
        self._ratios = []
        self._offered = []
        """q of the tokens of p, at each position"""
        for p, q, token in zip(targets, offered, draft.tokens, strict=False):
            q_of = dict(zip(q.tokens.tolist(), q.probs.tolist(), strict=True))
            self._offered.append(np.array([q_of.get(other, 0.0) for other in p.tokens.tolist()]))
            self._ratios.append(probability(p, token) / max(q_of.get(token, 0.0), 1e-300))

    def accepted(self, error: float) -> Probs:
        length, left = len(self.draft), 1.0
        law = np.zeros(length + 1)
        if self.rule == "block":
            running = self._running(error)
            for i in range(length, 0, -1):
                chance = running[i]
                if i < length:
                    rest = self._excess(i, error).sum()
                    chance = rest / (rest + 1 - chance) if rest > 0 else 0.0
                law[i], left = left * chance, left * (1 - chance)
            law[0] = left
            return law
        for i, ratio in enumerate(self._ratios):
            accept = min(1.0, (1 + error) * ratio)
            law[i], left = left * (1 - accept), left * accept
        law[length] = left
        return law

    def following(self, num_accepted: int, error: float) -> Probs:
        """The distribution, over the target's tokens, of what follows `num_accepted` draft tokens."""
        p = self.targets[num_accepted].probs
        if num_accepted == len(self.draft):
            tempered: Probs = p ** (1 + error)
            tempered /= tempered.sum()
            return tempered
        rest = self._excess(num_accepted, error)
        # where a rejection has probability 0 there is no law; the rule gives the target's
        return rest / rest.sum() if rest.sum() > 0 else p

    def _running(self, error: float) -> list[float]:
        """The products of p / q along the draft, cut to 1 after each factor (Sun et al. 2024)."""
        running = [1.0]
        for ratio in self._ratios:
            running.append(min(1.0, running[-1] * (1 + error) * ratio))
        return running

    def _excess(self, i: int, error: float) -> Probs:
        """max(0, p - q) at position i, of which block verification first scales p."""
        scale = self._running(error)[i] if self.rule == "block" else 1.0
        rest: Probs = np.maximum(scale * self.targets[i].probs - self._offered[i] / (1 + error), 0.0)
        return rest
