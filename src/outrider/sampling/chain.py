"""The chain of filters: from one row of logits to the distribution that a token is sampled from.

Order and meaning of the filters follow llama.cpp's samplers. None ever takes the last candidate.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from outrider.core.data import Distribution, Row, TopLogits, point_mass
from outrider.core.errors import BackendError
from outrider.core.params import SamplingParams

Tokens = npt.NDArray[np.int64]
Indices = npt.NDArray[np.intp]
Floats = npt.NDArray[np.floating]

_GROUP_SIZE = 64
"""Logits in a group that its maximum represents: searching the whole vocabulary would take too long."""
_FIRST_GUESS, _NEXT_GUESS = 256, 16
"""As many of the largest values are tried first, and so many times as many where they were too few."""
_SUMMED_SIZE = 16384  # up to so many exponentials take no longer than finding the maximum of each group
_FARTHEST = 40.0  # a logit so far below the best has no probability that counts
_FEW_GROUPS = 32  # where at most one group in so many can hold a large value, its members alone are looked at


def argmax(row: Row | TopLogits) -> int:
    """The most likely token, the lowest id on a tie. Raises BackendError where there is none."""
    if isinstance(row, TopLogits):
        _finite(row.logits[0])
        return int(row.tokens[0])
    best = int(row.argmax())
    _finite(row[best])
    return best


def _finite(best: np.float32) -> float:
    """The largest logit of a row (NaN where there is one in it)."""
    if not math.isfinite(best):
        raise BackendError("logits", f"the model returned {best}", "The model file may be damaged.")
    return float(best)


def most_likely(row: Row | TopLogits) -> tuple[int, float]:
    """The most likely token, the lowest id on a tie, and an estimate of its untempered probability, in one
    pass. Of a large vocabulary only the largest logit of each group enters the sum, so the probability is
    never too low; on the logits of Qwen2.5-Coder 0.5B it is 0.004 too high in the mean, 0.022 at most. Good
    enough to say how far to draft, not to sample from. Raises BackendError."""
    if isinstance(row, TopLogits):
        return int(row.tokens[0]), share(row.logits, _finite(row.logits[0]))
    if len(row) <= _SUMMED_SIZE:
        token = int(row.argmax())
        return token, share(row, _finite(row[token]))
    maxima = _group_maxima(row)
    best = _finite(maxima[maxima.argmax()])
    token = min([_first_member(row, group) for group in (maxima == best).nonzero()[0].tolist()])
    return token, share(maxima, best)


def best_few(row: Row, k: int) -> tuple[TopLogits, Row]:
    """The k most likely tokens of a row, and the logits of which `most_likely` takes the first one's `share`,
    in one pass."""
    maxima = _group_maxima(row)
    tokens = _ranked(row, k, maxima)
    return TopLogits(tokens, row[tokens]), maxima if len(row) > _SUMMED_SIZE else row


def share(logits: Row, best: float) -> float:
    """The probability of the best of some logits."""
    if len(logits) <= _GROUP_SIZE:
        shifted: Floats = logits - np.float64(best)
    else:  # nothing overflows, and what weighs nothing is not made to
        shifted = np.maximum(logits, np.float32(best - _FARTHEST))
        shifted -= np.float32(best)
    return min(1.0, 1.0 / float(np.add.reduce(np.exp(shifted, out=shifted))))


def _first_member(row: Row, group: int) -> int:
    """The first token with the largest logit of a group (`_group_maxima`)."""
    num_groups = len(row) // _GROUP_SIZE
    grouped = num_groups * _GROUP_SIZE
    if group >= num_groups:  # one of the rest
        return grouped + group - num_groups
    return int(row[group:grouped:num_groups].argmax()) * num_groups + group


def _group_maxima(row: Row) -> Row:
    """The maximum of each of len(row) / 64 groups; the row itself where it is short. A group's members lie
    far apart: whole stretches of memory are compared, several times as fast as neighbours would be."""
    num_groups = len(row) // _GROUP_SIZE
    if num_groups < _GROUP_SIZE:
        return row
    maxima: Row = row[: num_groups * _GROUP_SIZE].reshape(_GROUP_SIZE, num_groups).max(axis=0)
    rest = row[num_groups * _GROUP_SIZE :]
    return np.concatenate([maxima, rest]) if len(rest) else maxima


@lru_cache(maxsize=8)
def all_tokens(size: int) -> Tokens:
    """The ids of a whole vocabulary, shared and read-only."""
    tokens = np.arange(size, dtype=np.int64)
    tokens.setflags(write=False)
    return tokens


def ranked(values: Floats, k: int) -> Indices:
    """Indices of the k largest values (k > 0), best first, ties by the lower index. Raises BackendError."""
    return _ranked(values, k, _group_maxima(values))


def _ranked(values: Floats, k: int, maxima: Floats) -> Indices:
    _finite(maxima[maxima.argmax()])
    pool = _pool(values, min(k, len(values)), maxima)
    return pool[(-values[pool]).argsort(kind="stable")[:k]]


def _pool(values: Floats, k: int, maxima: Floats) -> Indices:
    """Ascending indices of a few values, the k largest among them: at least k values reach the k-th largest
    group maximum, so the rest of a large vocabulary is out."""
    if len(values) <= _FIRST_GUESS or k == len(values):
        return all_tokens(len(values))
    if not k < len(maxima) < len(values):
        return np.flatnonzero(values >= np.partition(values, len(values) - k)[len(values) - k])
    pool = _reaching(values, maxima, np.partition(maxima, len(maxima) - k)[len(maxima) - k])
    if len(pool) < k:  # a constraint leaves few: the first of the barred ones complete them
        barred = np.flatnonzero(values[:k] == -math.inf)[: k - len(pool)]
        pool = np.sort(np.concatenate([pool, barred]))
    return pool


def _reaching(values: Floats, maxima: Floats, least: np.float32) -> Indices:
    """Ascending indices of the values of at least `least`; of those above -inf where it is that."""
    if least == -math.inf:
        return np.flatnonzero(values > least)
    groups = (maxima >= least).nonzero()[0]
    if len(groups) * _FEW_GROUPS > len(maxima):
        return np.flatnonzero(values >= least)
    num_groups = len(values) // _GROUP_SIZE
    num_full = int(groups.searchsorted(num_groups))
    members = (_member_offsets(num_groups) + groups[:num_full]).ravel()
    found: Indices = members[values[members] >= least]
    if num_full == len(groups):
        return found
    return np.concatenate([found, groups[num_full:] + num_groups * (_GROUP_SIZE - 1)])


@lru_cache(maxsize=8)
def _member_offsets(num_groups: int) -> Indices:
    """How far the members of a group lie behind its first, as a column."""
    return np.arange(0, num_groups * _GROUP_SIZE, num_groups)[:, np.newaxis]


def fewest_reaching(values: Floats, weights: Floats, mass: float, *, beyond: bool = False) -> Indices:
    """Ascending indices of the fewest largest values whose weights reach `mass`, or go `beyond`
    it; ties by the lower index. All of them when rounding keeps them short of it."""
    side: Literal["left", "right"] = "right" if beyond else "left"
    guess = _FIRST_GUESS
    while True:  # a few values mostly have the mass, and sorting all would take long
        order = ranked(values, guess)
        reached: npt.NDArray[np.float64] = weights[order].cumsum(dtype=np.float64)
        if reached[-1] > mass or guess >= len(values):
            return np.sort(order[: int(reached.searchsorted(mass, side)) + 1])
        guess *= _NEXT_GUESS


# The filters

_FEW = 64
"""Of so many tokens a distribution is made in plain numbers: an array operation takes as long as twenty of
them."""
_SMALL = 4096  # up to so many candidates double precision costs nothing that matters
_NEGLIGIBLE = -1000.0
"""A logit so far below the best is as good as any other without weight, and can be squared."""


class Chain:
    """The filters of some settings: what these come to is worked out once for all rows."""

    def __init__(self, params: SamplingParams) -> None:
        self.needed = params.top_k if params.top_n_sigma <= 0 else 0
        """of how many most likely tokens a distribution is made; 0: of all"""
        if params.top_k == 1 or (params.is_greedy and params.typical_p == 1):
            self.needed = 1
        self._params = params
        # No two tokens can both have more than half of the probability.
        self._excludes_top_choices = params.xtc_probability > 0 and params.xtc_threshold <= 0.5
        keeps_most_likely = params.typical_p >= 1 and not params.dynatemp_range
        self._is_of_few = 1 < self.needed <= _FEW and keeps_most_likely and not self._excludes_top_choices
        """whether it is made of few tokens, of which each filter keeps the most likely"""

    def distribution(self, row: Row | TopLogits) -> Distribution:
        """The distribution that the next token is sampled from, given one row of logits after bias, bans and
        penalties, or as many of its tokens as are needed. Raises BackendError."""
        if self.needed == 1:
            return point_mass(argmax(row))
        if self._is_of_few:
            few = row if isinstance(row, TopLogits) else best_few(row, self.needed)[0]
            return _of_few(few, self._params)
        params, candidates = self._params, self._survivors(row)
        probs = _tempered(candidates, params)
        if self._excludes_top_choices:
            rest = _without_top_choices(candidates, params.xtc_threshold)
            if rest is not None:
                # Both outcomes of the coin that llama.cpp tosses: a distribution, not a draw.
                others = _tempered(candidates.only(rest, candidates.num_impossible), params)
                probs *= 1 - params.xtc_probability
                probs[rest] += params.xtc_probability * others
        tokens = candidates.tokens
        if probs.min() > 0:
            return Distribution(tokens, probs)
        kept = np.flatnonzero(probs)
        return Distribution(tokens[kept], probs[kept])

    def look(
        self, row: Row | TopLogits, *, with_distribution: bool
    ) -> tuple[int, float, Distribution | None]:
        """What `most_likely` says of a row, and its distribution if asked for: in one pass where that is made
        of few tokens."""
        if not with_distribution:
            return *most_likely(row), None
        if isinstance(row, TopLogits) or not self._is_of_few:
            return *most_likely(row), self.distribution(row)
        few, summed = best_few(row, self.needed)
        return int(few.tokens[0]), share(summed, float(few.logits[0])), _of_few(few, self._params)

    def _survivors(self, row: Row | TopLogits) -> Candidates:
        needed, params = self.needed, self._params
        if isinstance(row, TopLogits):
            order = row.tokens[:needed].argsort()
            candidates = Candidates(row.tokens[order], row.logits[order], float(row.logits[0]))
        elif 0 < needed < len(row):
            tokens = np.sort(ranked(row, needed))
            logits = row[tokens]
            candidates = Candidates(tokens, logits, float(logits.max()))
        else:
            candidates = Candidates(all_tokens(len(row)), row, float(row[argmax(row)]))
            if params.top_n_sigma > 0:
                candidates = _top_n_sigma(candidates.possible(), params.top_n_sigma)
            if 0 < params.top_k < candidates.num_listed:
                kept = np.sort(ranked(candidates.logits, params.top_k))
                candidates = candidates.only(kept, params.top_k - len(kept))
        candidates = candidates.possible()
        if params.typical_p < 1:
            candidates = _typical(candidates, params.typical_p)
        if params.top_p < 1:
            candidates = _top_p(candidates, params.top_p)
        if params.min_p:
            candidates = _min_p(candidates, params.min_p)
        return candidates


def _of_few(few: TopLogits, params: SamplingParams) -> Distribution:
    """The distribution of the k most likely tokens after top-p, min-p and temperature (above 0)."""
    logits: list[float] = few.logits[: params.top_k].tolist()
    best, size = logits[0], len(logits)
    if not math.isfinite(best):
        argmax(few)  # refuses what is no number
    if logits[-1] == -math.inf:
        size = logits.index(-math.inf)
    kept = size
    if params.min_p:
        least, kept = float(np.float32(best + math.log(params.min_p))), 1
        while kept < size and logits[kept] >= least:
            kept += 1
    if kept == 1:
        return point_mass(int(few.tokens[0]))
    if params.top_p < 1:
        reached = list(accumulate([math.exp(logit - best) for logit in logits[:kept]]))
        # If it needs the last of them for the mass of these alone, it needs it for that of all.
        if reached[-2] >= params.top_p * reached[-1]:
            reached = list(accumulate([math.exp(logit - best) for logit in logits[:size]]))
            kept = min(kept, bisect_left(reached, params.top_p * reached[-1]) + 1)
    weights = [math.exp((logit - best) / params.temperature) for logit in logits[:kept]]
    total = sum(weights)
    probs = [weight / total for weight in weights]
    while not probs[-1]:
        probs.pop()
    if len(probs) == 1:
        return point_mass(int(few.tokens[0]))
    pairs = sorted(zip(few.tokens[: len(probs)].tolist(), probs, strict=True))
    return Distribution(np.array([token for token, _ in pairs]), np.array([p for _, p in pairs]))


# Any number of candidates


@dataclass(slots=True)
class Candidates:
    """Tokens in the order of their ids, and their logits, of which `best` is the largest.

    `num_impossible` tokens without any probability are not listed but are part of llama.cpp's list:
    dynamic temperature measures the entropy against the number of both.
    """

    tokens: Tokens
    logits: Row
    best: float
    num_impossible: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_listed(self) -> int:
        """How many candidates llama.cpp would have."""
        return len(self.tokens) + self.num_impossible

    def only(self, kept: Indices, num_impossible: int = 0) -> Candidates:
        """Those at the ascending indices `kept`."""
        logits = self.logits[kept]
        # In a whole vocabulary every token is its own index.
        tokens = kept if len(self) == self.tokens[-1] + 1 else self.tokens[kept]
        return Candidates(tokens, logits, float(logits.max()), num_impossible)

    def possible(self) -> Candidates:
        """Without those whose logit is -inf."""
        if self.logits.min() > -math.inf:
            return self
        kept = (self.logits > -math.inf).nonzero()[0]
        return self.only(kept, self.num_listed - len(kept))


def _top_n_sigma(candidates: Candidates, n: float) -> Candidates:
    """Keep logits within n standard deviations of the best (Tang et al. 2024, arXiv:2411.07641)."""
    logits = candidates.logits
    with np.errstate(over="ignore"):
        centered = logits - np.float32(logits.mean(dtype=np.float64))
        variance = float(np.square(centered, out=centered).mean(dtype=np.float64))
        bound = np.float32(candidates.best - n * math.sqrt(variance))
    kept = np.flatnonzero(logits >= bound)
    return candidates.only(kept, candidates.num_listed - len(kept))


def _typical(candidates: Candidates, mass: float) -> Candidates:
    """Keep the tokens whose surprise is nearest the entropy, the fewest with more than `mass` of
    the probability (Meister et al. 2023, arXiv:2202.00666). The most likely token may not be one."""
    seen = _surprise(candidates)
    nearness = seen.each - seen.entropy
    np.negative(np.abs(nearness, out=nearness), out=nearness)
    return candidates.only(fewest_reaching(nearness, seen.weights, mass * seen.total, beyond=True))


def _top_p(candidates: Candidates, mass: float) -> Candidates:
    """Keep the fewest most likely tokens that reach `mass` of the probability (Holtzman et al. 2020,
    arXiv:1904.09751)."""
    relative = _weights(candidates, 1.0)
    needed = mass * float(relative.sum(dtype=np.float64))
    return candidates.only(fewest_reaching(candidates.logits, relative, needed))


def _min_p(candidates: Candidates, ratio: float) -> Candidates:
    """Keep tokens at least `ratio` (above 0) times as likely as the best (Nguyen et al. 2024,
    arXiv:2407.01082)."""
    is_kept = candidates.logits >= np.float32(candidates.best + math.log(ratio))
    if is_kept.all() and not candidates.num_impossible:
        return candidates
    return candidates.only(is_kept.nonzero()[0])


def _without_top_choices(candidates: Candidates, threshold: float) -> Indices | None:
    """Ascending indices of what XTC leaves: of all candidates that reach the threshold only the least likely
    stays. None where there are fewer than two of them."""
    relative = _weights(candidates, 1.0)
    above = np.flatnonzero(relative >= threshold * float(relative.sum(dtype=np.float64)))
    if len(above) < 2:
        return None
    spared = len(above) - 1 - int(candidates.logits[above][::-1].argmin())
    return np.delete(np.arange(len(candidates)), np.delete(above, spared))


def _tempered(candidates: Candidates, params: SamplingParams) -> npt.NDArray[np.float64]:
    temperature = _temperature(candidates, params)
    if temperature > 0:  # large vocabularies are normalised in double precision, too
        probs = _weights(candidates, temperature).astype(np.float64, copy=False)
        probs *= 1.0 / float(probs.sum())
        return probs
    probs = np.zeros(len(candidates))
    probs[candidates.logits.argmax()] = 1
    return probs


def _temperature(candidates: Candidates, params: SamplingParams) -> float:
    """The one set, or one within `dynatemp_range` of it, the higher the nearer the candidates' entropy comes
    to its maximum."""
    if params.dynatemp_range == 0 or candidates.num_listed == 1:
        return params.temperature
    evenness = np.float64(_surprise(candidates).entropy / math.log(candidates.num_listed))
    low = max(0.0, params.temperature - params.dynatemp_range)
    high = params.temperature + params.dynatemp_range
    with np.errstate(divide="ignore", over="ignore"):  # an infinite temperature makes all equal
        return low + (high - low) * float(evenness**params.dynatemp_exponent)


def _weights(candidates: Candidates, temperature: float) -> Floats:
    """Probabilities relative to that of the best candidate; 0 where the exponential underflows. Single
    precision for large vocabularies."""
    shifted: Floats
    if len(candidates) > _SMALL and 1e-3 <= temperature <= 1e3:
        with np.errstate(over="ignore"):  # far below the best is -inf, and that is right
            shifted = candidates.logits - np.float32(candidates.best)
            if temperature != 1:
                shifted *= np.float32(1 / temperature)
    else:
        shifted = candidates.logits.astype(np.float64)
        shifted -= candidates.best
        if temperature != 1:
            np.maximum(shifted, _NEGLIGIBLE * temperature, out=shifted)
            shifted /= temperature
    return np.exp(shifted, out=shifted)


class _Surprise(NamedTuple):
    """How much each candidate would surprise (-log of its probability before temperature, in
    nats), with its weight relative to the best, their sum, and the mean surprise: the entropy."""

    each: Floats
    weights: Floats
    total: float
    entropy: float


def _surprise(candidates: Candidates) -> _Surprise:
    relative = _weights(candidates, 1.0)
    total = float(relative.sum(dtype=np.float64))
    depth: Floats = candidates.logits.astype(relative.dtype)
    with np.errstate(over="ignore"):
        depth -= depth.dtype.type(candidates.best)
    np.maximum(depth, _NEGLIGIBLE, out=depth)
    entropy = math.log(total) - float((relative * depth).sum(dtype=np.float64)) / total
    np.subtract(math.log(total), depth, out=depth)
    return _Surprise(depth, relative, total, max(0.0, entropy))


# Distributions over tokens, and sampling from them


def probability(distribution: Distribution, token: int) -> float:
    """The probability of a token; 0 outside the support."""
    tokens = distribution.tokens
    i = 0 if len(tokens) == 1 else int(tokens.searchsorted(token))
    if i == len(tokens) or tokens[i] != token:
        return 0.0
    return float(distribution.probs[i])


def draw(distribution: Distribution, rng: np.random.Generator) -> int:
    """Draw a token by inverting the cumulative distribution: one uniform, none for a point mass."""
    if len(distribution.probs) == 1:
        return int(distribution.tokens[0])
    cumulative = distribution.probs.cumsum()
    i = int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
    return int(distribution.tokens[min(i, len(cumulative) - 1)])
