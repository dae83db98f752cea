"""Exact enumeration: code that asks for random numbers is run once for each way they can fall.

Instead of a number, the stand-in hands out an interval. Where the code compares it, or looks it up
in a cumulative distribution, the run splits: each outcome is followed, weighed by its share of the
interval, and the interval shrinks to it. Nothing else can be done with it, so no dependence on a
random number goes unnoticed, and one that is used twice is correlated as it would be.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from outrider.core.contracts import Vocabulary
from outrider.core.data import Distribution, Draft, DraftToken, Request, Row, Verdict
from outrider.sampling import RequestSampler, draw
from outrider.verify import Verifier

Result = TypeVar("Result")
Probs = npt.NDArray[np.float64]
Rng = np.random.Generator
Rule = Callable[[Sequence[Distribution], Draft, Rng], Verdict]
Text = tuple[int, ...]
Language = Callable[[Text], Probs]
"""The probabilities of the next token after a context."""
Offer = Callable[[Rng], Draft]
"""What makes a draft."""


class Branching:
    """The stand-in for a generator during one run, which follows `script` where the run splits."""

    def __init__(self, script: Text = ()) -> None:
        self.weight = 1.0
        self.uniforms: list[Uniform] = []
        self.others: list[tuple[float, Text]] = []
        """scripts of the runs that went another way where this one's script had ended, each after its weight
        so far"""
        self._script = script
        self._taken: list[int] = []

    def random(self) -> Uniform:
        self.uniforms.append(Uniform(self))
        return self.uniforms[-1]

    def choose(self, chances: Sequence[float]) -> int:
        possible = [i for i, chance in enumerate(chances) if chance > 0]
        if len(self._taken) < len(self._script):
            choice = self._script[len(self._taken)]
        else:
            choice = possible[0]
            self.others += [(self.weight * chances[i], (*self._taken, i)) for i in possible[1:]]
        self._taken.append(choice)
        self.weight *= chances[choice]
        return choice


@dataclass(slots=True, eq=False)
class Uniform:
    """A random number of which only an interval is known."""

    world: Branching
    low: float = 0.0
    high: float = 1.0
    num_uses: int = 0

    def among(self, edges: Sequence[float]) -> int:
        """How many of these ascending edges it reaches."""
        cuts = [self.low, *(min(max(edge, self.low), self.high) for edge in edges), self.high]
        cell = self.world.choose([(b - a) / (self.high - self.low) for a, b in pairwise(cuts)])
        self.low, self.high = cuts[cell], cuts[cell + 1]
        self.num_uses += 1
        return cell

    def __lt__(self, edge: float) -> bool:
        return self.among([float(edge)]) == 0

    def __ge__(self, edge: float) -> bool:
        return self.among([float(edge)]) == 1

    def __mul__(self, scale: float) -> _Moved:
        return _Moved(self, float(scale))

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> int:
        return _Moved(self, 1.0).__array_function__(function, types, args, kwargs)


@dataclass(frozen=True, slots=True, eq=False)
class _Moved:
    """A uniform times a scale, less an offset."""

    uniform: Uniform
    scale: float
    offset: float = 0.0

    def __sub__(self, offset: float) -> _Moved:
        return _Moved(self.uniform, self.scale, self.offset + float(offset))

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> int:
        del types
        assert function is np.searchsorted and kwargs == {"side": "right"}, "an unknown use of a uniform"
        return self.uniform.among(((args[0] + self.offset) / self.scale).tolist())


def explore(run: Callable[[Rng], Result], share: float = math.inf) -> Iterator[tuple[Result, float]]:
    """Every result of `run`, with its probability; a result may come more than once. With a `share` the
    most likely ways alone, until they have that probability together."""
    scripts: list[tuple[float, Text]] = [(-1.0, ())]
    explored = 0.0
    while scripts and explored < share:
        world = Branching(heappop(scripts)[1])
        result = run(cast(Rng, world))
        for weight, script in world.others:
            heappush(scripts, (-weight, script))
        explored += world.weight
        yield result, world.weight


def texts_of(run: Callable[[Rng], Text]) -> dict[Text, float]:
    """The distribution of the text that a run returns."""
    texts: dict[Text, float] = {}
    for text, weight in explore(run):
        texts[text] = texts.get(text, 0.0) + weight
    assert abs(sum(texts.values()) - 1) < 1e-12
    return texts


def distance(a: dict[Text, float], b: dict[Text, float]) -> float:
    """The total variation between two distributions."""
    return sum(abs(a.get(text, 0.0) - b.get(text, 0.0)) for text in a.keys() | b.keys()) / 2


class Enumerated(Verifier):
    """The rule of a request with numbers from elsewhere."""

    def __init__(self, request: Request, rng: Rng) -> None:
        super().__init__(request.verification, 0, greedy=request.sampling.is_greedy)
        self._rng = rng


def plain(
    request: Request, logits: Callable[[Sequence[int]], Row], vocabulary: Vocabulary
) -> dict[Text, float]:
    """The distribution of plain decoding, worked out without an engine."""
    texts: dict[Text, float] = {(): 1.0}
    done: dict[Text, float] = {}
    for _ in range(request.max_tokens or 0):
        grown: dict[Text, float] = {}
        for text, weight in texts.items():
            sampler = RequestSampler(request.sampling, vocabulary, request.prompt)
            sampler.accept(text)
            p = sampler.distribution(logits([*request.prompt, *text]), ())
            for token, share in zip(p.tokens.tolist(), p.probs.tolist(), strict=True):
                (done if vocabulary.ends_generation(token) else grown)[(*text, token)] = weight * share
        texts = grown
    return done | texts


# Languages, and what plain decoding makes of them


def dense(probs: Sequence[float] | Probs) -> Distribution:
    weights = np.asarray(probs, dtype=np.float64)
    tokens = np.flatnonzero(weights > 0)
    return Distribution(tokens.astype(np.int64), weights[tokens] / weights[tokens].sum())


def language(size: int, seed: int, kind: str = "dense") -> Language:
    """Random probabilities that depend on the whole context."""

    @cache
    def probs(context: Text) -> Probs:
        key = hashlib.blake2b(repr((seed, context)).encode(), digest_size=8).digest()
        weights = np.random.default_rng(int.from_bytes(key)).dirichlet(np.ones(size))
        if kind == "one-hot":
            weights = (weights == weights.max()).astype(float)
        elif kind == "zeros":
            weights[np.argmin(weights)] = 0
        elif kind == "ties":
            weights = np.round(weights * 4) + (weights == weights.max())
        return cast(Probs, weights / weights.sum())

    return probs


def continuations(p: Language, text: Text, length: int) -> Iterator[tuple[Text, float]]:
    """All texts of `length` that begin with `text`, finished by plain decoding."""
    if len(text) >= length:
        yield text[:length], 1.0
        return
    for token, share in enumerate(p(text).tolist()):
        if share > 0:
            for longer, weight in continuations(p, (*text, token), length):
                yield longer, share * weight


# Drafts


def offer(tokens: Sequence[int], probs: Sequence[Distribution] | None = None) -> Draft:
    drawn_from: Sequence[Distribution | None] = probs or [None] * len(tokens)
    return Draft(tuple(DraftToken(t, "test", 0.5, (), q) for t, q in zip(tokens, drawn_from, strict=True)))


@dataclass(frozen=True, slots=True)
class Drawn:
    """Drafts drawn from q, up to `length` or to where `stops` says so of the tokens before."""

    q: Language
    length: int
    stops: Callable[[Text], bool] = field(default=lambda _tokens: False)

    def __call__(self, rng: Rng) -> Draft:
        tokens: Text = ()
        probs: list[Distribution] = []
        while len(tokens) < self.length and not self.stops(tokens):
            probs.append(dense(self.q(tokens)))
            tokens = (*tokens, draw(probs[-1], rng))
        return offer(tokens, probs)


def certain(*tokens: int) -> Offer:
    """Always the same tokens, offered as certain."""
    return lambda _rng: offer(tokens)


def most_likely(q: Language, length: int) -> Offer:
    """The most likely tokens of q, offered as certain."""
    tokens: Text = ()
    for _ in range(length):
        tokens = (*tokens, int(np.argmax(q(tokens))))
    return certain(*tokens)


def verdicts(rule: Rule, target: Sequence[Distribution], draft: Draft) -> Iterator[tuple[Verdict, float]]:
    """Everything that a rule can make of one draft, with its probability."""
    return explore(lambda rng: rule(target, draft, rng))


def emitted(rule: Rule, p: Language, offers: Offer, length: int) -> dict[Text, float]:
    """The texts of one round under `rule`, finished by plain decoding to length + 1."""

    def run(rng: Rng) -> Text:
        draft = offers(rng)
        verdict = rule([dense(p(draft.tokens[:i])) for i in range(len(draft) + 1)], draft, rng)
        assert verdict.token is not None
        return (*draft.tokens[: verdict.num_accepted], verdict.token)

    texts: dict[Text, float] = {}
    for text, weight in texts_of(run).items():
        for longer, share in continuations(p, text, length + 1):
            texts[longer] = texts.get(longer, 0.0) + weight * share
    return texts


def bias(rule: Rule, p: Language, offers: Offer, length: int) -> float:
    """The total variation between what comes out under `rule` and plain decoding."""
    return distance(emitted(rule, p, offers, length), dict(continuations(p, (), length + 1)))


def expected_accepted(rule: Rule, p: Language, offers: Offer) -> float:
    """The expected number of drafted tokens that are accepted."""

    def run(rng: Rng) -> int:
        draft = offers(rng)
        rows = [dense(p(draft.tokens[:i])) for i in range(len(draft) + 1)]
        return rule(rows, draft, rng).num_accepted

    return sum(accepted * weight for accepted, weight in explore(run))
