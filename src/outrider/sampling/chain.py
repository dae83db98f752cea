"""The chain of filters: from one row of logits to the distribution that a token is sampled from."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from outrider.core.data import Distribution, Row, TopLogits, point_mass
from outrider.core.params import SamplingParams
from outrider.sampling import filters
from outrider.sampling.candidates import Candidates, softmax, top, whole
from outrider.sampling.selection import argmax, top_k

_FEW = 64
"""Of so many tokens a distribution is made in plain numbers: an array operation takes as long as twenty of
them."""


def num_needed(params: SamplingParams) -> int:
    """Of how many most likely tokens the distribution is made; 0: of all."""
    if params.top_k == 1 or (params.is_greedy and params.typical_p == 1):
        return 1
    return params.top_k if params.top_n_sigma <= 0 else 0


def distribution(row: Row | TopLogits, params: SamplingParams) -> Distribution:
    """The distribution that the next token is sampled from, given one row of logits to which bias,
    bans and penalties were already applied, or as many of its tokens as are needed.

    Raises BackendError when the logits are not numbers.
    """
    needed = num_needed(params)
    if needed == 1:
        return point_mass(argmax(row))
    if 0 < needed <= _FEW and _keeps_beginnings(params):
        return _of_few(row, needed, params)
    candidates = _survivors(row, needed, params)
    probs = _tempered(candidates, params)
    if _excludes_top_choices(params):
        rest = filters.xtc(candidates, params.xtc_threshold)
        if rest is not None:
            # Both outcomes of the coin that llama.cpp tosses: a distribution, not a draw.
            num_impossible = candidates.num_impossible
            probs *= 1 - params.xtc_probability
            probs[rest] += params.xtc_probability * _tempered(candidates.only(rest, num_impossible), params)
    tokens = candidates.tokens
    if probs.min() > 0:
        return Distribution(tokens, probs)
    kept = np.flatnonzero(probs)
    return Distribution(tokens[kept], probs[kept])


def _keeps_beginnings(params: SamplingParams) -> bool:
    """Whether each filter after top-k keeps the most likely tokens that it was given."""
    return params.typical_p >= 1 and not params.dynatemp_range and not _excludes_top_choices(params)


def _of_few(row: Row | TopLogits, k: int, params: SamplingParams) -> Distribution:
    """The distribution of the k most likely tokens after top-p, min-p and temperature (above 0)."""
    values = row.logits if isinstance(row, TopLogits) else row
    ranked = top_k(values, k)
    logits: list[float] = values[ranked].tolist()
    best, size = logits[0], len(logits)
    if logits[-1] == -math.inf:
        size = logits.index(-math.inf)
    if params.top_p < 1:
        reached = list(accumulate([math.exp(logit - best) for logit in logits[:size]]))
        size = bisect_left(reached, params.top_p * reached[-1]) + 1
    if params.min_p:
        least = float(np.float32(best + math.log(params.min_p)))
        while logits[size - 1] < least:
            size -= 1
    weights = [math.exp((logit - best) / params.temperature) for logit in logits[:size]]
    total = sum(weights)
    probs = [weight / total for weight in weights]
    while not probs[-1]:
        probs.pop()
    kept = ranked[: len(probs)]
    tokens = row.tokens[kept] if isinstance(row, TopLogits) else kept
    if len(probs) == 1:
        return point_mass(int(tokens[0]))
    in_order = tokens.argsort()
    return Distribution(tokens[in_order], np.array(probs)[in_order])


def _excludes_top_choices(params: SamplingParams) -> bool:
    # No two tokens can both have more than half of the probability.
    return params.xtc_probability > 0 and params.xtc_threshold <= 0.5


def _survivors(row: Row | TopLogits, needed: int, params: SamplingParams) -> Candidates:
    """What the filters before XTC leave."""
    if isinstance(row, TopLogits) or 0 < needed < len(row):
        candidates = top(row, needed)
    else:
        candidates = whole(row)
        if params.top_n_sigma > 0:
            candidates = filters.top_n_sigma(candidates.possible(), params.top_n_sigma)
        if params.top_k > 0:
            candidates = filters.top_k(candidates, params.top_k)
    candidates = candidates.possible()
    if params.typical_p < 1:
        candidates = filters.typical(candidates, params.typical_p)
    if params.top_p < 1:
        candidates = filters.top_p(candidates, params.top_p)
    if params.min_p:
        candidates = filters.min_p(candidates, params.min_p)
    return candidates


def _tempered(candidates: Candidates, params: SamplingParams) -> npt.NDArray[np.float64]:
    """The probability of each candidate at its temperature; the maximum has it all at 0."""
    temperature = filters.temperature(candidates, params)
    if temperature > 0:
        return softmax(candidates, temperature)
    probs = np.zeros(len(candidates))
    probs[candidates.logits.argmax()] = 1
    return probs
