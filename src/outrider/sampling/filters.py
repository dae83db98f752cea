"""The filters of the sampling chain, each from candidates to candidates, and the temperature.

Order and meaning follow llama.cpp's samplers. No filter ever takes the last candidate.
"""

from __future__ import annotations

import math

import numpy as np

from outrider.core.params import SamplingParams
from outrider.sampling.candidates import Candidates, surprise, weights
from outrider.sampling.selection import Indices, fewest_reaching, largest


def top_n_sigma(candidates: Candidates, n: float) -> Candidates:
    """Keep logits within n standard deviations of the best (Tang et al. 2024, arXiv:2411.07641)."""
    logits = candidates.logits
    with np.errstate(over="ignore"):
        centered = logits - np.float32(logits.mean(dtype=np.float64))
        variance = float(np.square(centered, out=centered).mean(dtype=np.float64))
        bound = np.float32(candidates.best - n * math.sqrt(variance))
    kept = np.flatnonzero(logits >= bound)
    return candidates.only(kept, candidates.num_listed - len(kept))


def top_k(candidates: Candidates, k: int) -> Candidates:
    """Keep the k most likely, ties by the lower id."""
    if k >= candidates.num_listed:
        return candidates
    kept = largest(candidates.logits, k)
    return candidates.only(kept, k - len(kept))


def typical(candidates: Candidates, mass: float) -> Candidates:
    """Keep the tokens whose surprise is nearest the entropy, the fewest with more than `mass` of
    the probability (Meister et al. 2023, arXiv:2202.00666). The most likely token may not be one."""
    seen = surprise(candidates)
    nearness = seen.each - seen.entropy
    np.negative(np.abs(nearness, out=nearness), out=nearness)
    return candidates.only(fewest_reaching(nearness, seen.weights, mass * seen.total, beyond=True))


def top_p(candidates: Candidates, mass: float) -> Candidates:
    """Keep the fewest most likely tokens that reach `mass` of the probability (Holtzman et al. 2020,
    arXiv:1904.09751)."""
    relative = weights(candidates)
    needed = mass * float(relative.sum(dtype=np.float64))
    return candidates.only(fewest_reaching(candidates.logits, relative, needed))


def min_p(candidates: Candidates, share: float) -> Candidates:
    """Keep tokens at least `share` (above 0) times as likely as the best (Nguyen et al. 2024,
    arXiv:2407.01082)."""
    is_kept = candidates.logits >= np.float32(candidates.best + math.log(share))
    if is_kept.all() and not candidates.num_impossible:
        return candidates
    return candidates.only(is_kept.nonzero()[0])


def xtc(candidates: Candidates, threshold: float) -> Indices | None:
    """Ascending indices of what is left when the top choices are excluded: of all candidates that
    reach the threshold only the least likely stays. None where there are fewer than two of them."""
    relative = weights(candidates)
    above = np.flatnonzero(relative >= threshold * float(relative.sum(dtype=np.float64)))
    if len(above) < 2:
        return None
    spared = len(above) - 1 - int(candidates.logits[above][::-1].argmin())
    return np.delete(np.arange(len(candidates)), np.delete(above, spared))


def temperature(candidates: Candidates, params: SamplingParams) -> float:
    """The temperature for these candidates: the one set, or one within `dynatemp_range` of it, the
    higher the nearer their entropy comes to its maximum."""
    if params.dynatemp_range == 0 or candidates.num_listed == 1:
        return params.temperature
    evenness = np.float64(surprise(candidates).entropy / math.log(candidates.num_listed))
    low = max(0.0, params.temperature - params.dynatemp_range)
    high = params.temperature + params.dynatemp_range
    with np.errstate(divide="ignore", over="ignore"):  # an infinite temperature makes all equal
        return low + (high - low) * float(evenness**params.dynatemp_exponent)
