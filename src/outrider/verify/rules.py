"""Which drafted tokens the target keeps: the rules, as pure functions over distributions.

`target` are the target's distributions p at the draft's n positions and at the one after them;
`draft` holds tokens x sampled from its own distributions q. For a draft without distributions q is a
point mass: lookup drafts follow the same rules and need no code path of their own.

- `verify_tokens`: Leviathan et al. 2023 (2211.17192), algorithm 1, and Chen et al. 2023
  (2302.01318), algorithm 2. A token is accepted with probability min(1, p(x) / q(x)); the first
  rejected one is replaced by a recovered token from norm(max(0, p - q)).
- `verify_block`: Sun et al. 2024 (2403.10444), algorithm 2. The draft is verified as a whole, by
  the ratio of its joint probabilities; in expectation it never accepts fewer tokens.
- `verify_choices`: a token is accepted when the target chooses it too, so that the text never depends on the
  draft: under greedy decoding, where both rules above come to this, and by noise that target and draft share,
  which depends on seed and position alone (the coupling of Daliri et al. 2024, 2408.07978).

Under each of them the emitted tokens are distributed exactly as if each had been sampled from p.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from outrider.core.data import Distribution, Draft, Verdict
from outrider.sampling import draw, point_mass, probability


def accept_probability(target: Distribution, draft: Distribution | None, token: int) -> float:
    """The probability that `token`, sampled from `draft` (None: the point mass on it), is accepted:
    min(1, p / q).

    0 where p is 0, whatever q is: a token that the target rules out is never accepted.
    """
    p = probability(target, token)
    q = 1.0 if draft is None else probability(draft, token)
    if p == 0:
        return 0.0
    return 1.0 if p >= q else p / q


def excess(target: Distribution, draft: Distribution, scale: float = 1.0) -> np.ndarray:
    """max(0, scale p - q) for each token of the target's support."""
    if target.tokens is draft.tokens:
        q = draft.probs
    else:
        at = draft.tokens.searchsorted(target.tokens)
        q = draft.probs.take(at, mode="clip") * (draft.tokens.take(at, mode="clip") == target.tokens)
    left: npt.NDArray[np.float64] = np.maximum(scale * target.probs - q, 0.0)
    return left


def residual(target: Distribution, draft: Distribution, scale: float = 1.0) -> Distribution:
    """What is left of the target after a rejection: norm(max(0, scale p - q)).

    Where nothing is left (p equals q up to rounding) a rejection has probability 0; the target
    itself is returned, so that the rule stays total.
    """
    left = excess(target, draft, scale)
    total = left.sum()
    if total <= 0:
        return target
    kept = left > 0
    return Distribution(target.tokens[kept], left[kept] / total)


def verify_tokens(target: Sequence[Distribution], draft: Draft, rng: np.random.Generator) -> Verdict:
    """Verify token by token. Each uniform is used once: one for a decision that is not certain,
    one for a token that is drawn from more than one candidate."""
    drawn_from = draft.probs
    for i, token in enumerate(draft.tokens):
        p, q = target[i], None if drawn_from is None else drawn_from[i]
        accept = accept_probability(p, q, token)
        if accept < 1 and (accept == 0 or rng.random() >= accept):
            return Verdict(i, draw(residual(p, q or point_mass(token)), rng), "recovered")
    return Verdict(len(draft), draw(target[len(draft)], rng), "bonus")


def block_ratios(
    target: Sequence[Distribution], tokens: Sequence[int], offered: Sequence[Distribution]
) -> list[float]:
    """The ratios p_0 … p_n of block verification: p_i = min(1, p_{i-1} p(x_i) / q(x_i)) is the probability
    that at least i tokens are accepted, given the draft's first i. The first that is 0 ends them: no later
    token can be accepted."""
    ratios = [1.0]
    for i, token in enumerate(tokens):
        p, q = probability(target[i], token), probability(offered[i], token)
        ratios.append(min(1.0, ratios[-1] * p / q) if q > 0 else (1.0 if p > 0 else 0.0))
        if ratios[-1] == 0:
            break
    return ratios


def block_accept(
    target: Sequence[Distribution], offered: Sequence[Distribution], ratios: Sequence[float], i: int
) -> float:
    """The probability h_i that exactly i tokens are accepted, given that no more are. A draft's length may
    depend on its first tokens: the last position, whatever it is, has h_n = p_n."""
    ratio = ratios[i]
    if i == len(offered) or ratio == 0:
        return ratio
    left = float(excess(target[i], offered[i], scale=ratio).sum())
    return left / (left + (1.0 - ratio)) if left > 0 else 0.0


def verify_block(target: Sequence[Distribution], draft: Draft, rng: np.random.Generator) -> Verdict:
    """Verify the draft as a whole, from its last token back: the longest accepted prefix is kept.

    Each uniform is used once, as in `verify_tokens`.
    """
    tokens = draft.tokens
    offered = draft.probs or [point_mass(token) for token in tokens]
    ratios = block_ratios(target, tokens, offered)
    for i in range(len(ratios) - 1, 0, -1):
        accept = block_accept(target, offered, ratios, i)
        if accept >= 1 or (accept > 0 and rng.random() < accept):
            if i == len(tokens):
                return Verdict(i, draw(target[i], rng), "bonus")
            return Verdict(i, draw(residual(target[i], offered[i], ratios[i]), rng), "recovered")
    if not tokens:
        return Verdict(0, draw(target[0], rng), "bonus")
    return Verdict(0, draw(residual(target[0], offered[0]), rng), "recovered")


def verify_choices(choose: Callable[[int], int], tokens: Sequence[int]) -> Verdict:
    """Accept the tokens that the target chooses itself; `choose(i)` is its choice at a position, counted from
    the first of the draft."""
    for i, token in enumerate(tokens):
        own = choose(i)
        if own != token:
            return Verdict(i, own, "recovered")
    return Verdict(len(tokens), choose(len(tokens)), "bonus")


# Noise that depends on a seed, a position and a token, and on nothing else.

_STEP = 0x9E3779B97F4A7C15


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014): every bit depends on all others."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed


def uniforms(seed: int, position: int, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One uniform variate in (0, 1) for each token, fixed by seed, position and token."""
    entropy = np.random.SeedSequence((seed, position)).generate_state(1, np.uint64)
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64
        bits = _mix(_mix(entropy + (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(_STEP)) + entropy)
    mantissas = (bits >> np.uint64(12)).astype(np.float64)
    found: npt.NDArray[np.float64] = (mantissas + 0.5) * 2.0**-52
    return found


def scores(distribution: Distribution, seed: int, position: int) -> npt.NDArray[np.float64]:
    """Log p plus Gumbel noise, for each token of the support; the greatest is picked."""
    noise: npt.NDArray[np.float64] = -np.log(-np.log(uniforms(seed, position, distribution.tokens)))
    return np.log(distribution.probs) + noise


def pick(distribution: Distribution, seed: int, position: int) -> int:
    """The token of the distribution that the noise of this position picks."""
    if len(distribution.tokens) == 1:
        return int(distribution.tokens[0])
    return int(distribution.tokens[scores(distribution, seed, position).argmax()])
