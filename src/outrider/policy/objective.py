"""The equations that decide how far to draft, derived in docs/choice.md.

A step drafts n tokens and emits G of them and the target's own; a_i is the probability that token i is
accepted if all before it were, p_i = a_1 ⋯ a_i the prefix acceptance probability (p_0 = 1). λ is what a token
takes under the best choices, V(n) the target's call with n drafted tokens, d a step of the draft model. A
step's value, in seconds, is λ E[G] − E[C].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from operator import mul, sub

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

MAX_MODEL_DRAFT = 16  # tokens; the prefix acceptance probability of longer drafts is small
_PRIOR_TOKENS, _PRIOR_RATIO = (
    30.0,
    0.75,
)  # λ starts as this part of a plain step and counts for so many tokens
_MIN_REMAINING = 24  # an answer is expected to go on for as many tokens as it has, and at first for so many
# No more than this part of what the answer took plainly is spent on reading its prompt, or so many steps …
PREFILL_SHARE, PREFILL_STEPS = 0.15, 3.5
GAIN_SHARE = 0.25  # … but as much as this part of what the draft model gained in earlier answers
_MAX_AVERAGE = 0.98  # of confidence: no draft goes on for ever


def reward_per_token(
    spent_s: float, emitted: float, plain_s: float, num_sequences: int, ratio: float = 1.0
) -> float:
    """λ in seconds: what a token took lately, shrunk towards a part of `plain_s`, a plain step of all
    `num_sequences` sequences: that of a draft model (`ratio`), or of lookups where these are faster."""
    prior_s = min(ratio, _PRIOR_RATIO) * plain_s * _PRIOR_TOKENS
    return (spent_s + prior_s) / (emitted + _PRIOR_TOKENS * num_sequences)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a step costs and earns, in seconds."""

    reward_s: float  # λ
    calls_s: Array  # V: the target's call with 0, 1, … drafted tokens
    recompute_s: Array | None = None  # what it costs to evaluate 0, 1, … tokens again; None: nothing is
    plain_s: float = 0.0  # the step without drafts
    num_sequences: int = 1  # those that share it
    draft_step_s: float = 0.0  # d: one more step of the draft model
    first_draft_s: Array = field(
        default_factory=lambda: np.zeros(1)
    )  # its first, with 0, 1, … guessed tokens
    block: int = 1  # tokens that its first step drafts: the steps after it cost nothing

    @property
    def max_length(self) -> int:
        """The longest draft whose cost is known."""
        return len(self.calls_s) - 1

    def longest(self, most: int) -> int:
        """The longest draft that the draft model takes part in: `most` at most, and within its block."""
        return min(self.max_length, most, self.block if self.block > 1 else most)

    def limited(self, max_step_s: float, *, num_sequences: int = 1, num_fixed: int = 0) -> StepCosts:
        """The same up to the first draft with which the step would take longer than that, if each of so many
        sequences added as much to a plain one; drafts of up to `num_fixed` tokens stay."""
        steps = np.arange(-1, self.max_length) // self.block  # a block is drafted in one
        plain_s, drafting_s = self.calls_s[0], self.draft_step_s * steps
        added_s = self.calls_s - plain_s + self.first_draft_s[0] + drafting_s
        longer = np.flatnonzero(added_s > (max_step_s - plain_s) / num_sequences)
        end = max(int(longer[0]), num_fixed + 1) if len(longer) else None
        return replace(self, calls_s=self.calls_s[:end])


def rejection_costs(prefix_probs: Sequence[float], recompute_s: Array | None) -> list[float]:
    """Expected seconds that a rejection costs a draft of 0, 1, … tokens, shape (n + 1,).

    A target of checkpoints evaluates again what it accepted of a rejected draft: rejected after i tokens
    (probability p_i − p_{i+1}), these and the last token before them. `prefix_probs` are p_0, …, p_n.
    """
    if recompute_s is None:
        return [0.0] * len(prefix_probs)
    rejected = (p - q for p, q in pairwise(prefix_probs))
    return list(accumulate(map(mul, rejected, recompute_s[1:].tolist()), initial=0.0))


def expected_rewards(acceptance: Sequence[float], costs: StepCosts) -> list[float]:
    """What a step that drafts the first 0, 1, … of these tokens earns, less what their rejection costs:
    λ (1 + p_1 + … + p_n), shape (len + 1,)."""
    prefix_probs = list(accumulate(acceptance, mul, initial=1.0))
    lost = rejection_costs(prefix_probs, costs.recompute_s)
    return [costs.reward_s * n - loss for n, loss in zip(accumulate(prefix_probs), lost, strict=True)]


def stopping_value(acceptance: Sequence[float], costs: StepCosts, min_length: int = 0) -> float:
    """The value of a step that drafts the best part, `min_length` tokens or more, of a candidate. V has
    stairs and may fall, so all lengths are compared."""
    rewards = expected_rewards(acceptance[: costs.max_length], costs)
    calls_s: list[float] = costs.calls_s[: len(rewards)].tolist()
    values = [reward - cost for reward, cost in zip(rewards, calls_s, strict=True)]
    return max(values[min_length:])


def continuation_values(
    length: int, average: float, prefix_prob: float, costs: StepCosts, max_length: int, num_more: int = 0
) -> list[float]:
    """The most that k ≥ 1 further steps of the draft model earn less what they cost, after 0, 1, … `num_more`
    tokens that it confirms: λ p_n (m + m² + … + m^k) − V(n + k) − k d for n tokens drafted so far (`length`).
    m is the moving `average` of the model's confidence: the next one is known once its step was paid."""
    calls_s: list[float] = costs.calls_s[length + 1 : max_length + 1].tolist()
    gain, value_s, values_s = min(average, _MAX_AVERAGE), 0.0, []
    for i in range(len(calls_s)):
        prefix_prob *= gain
        value_s += costs.reward_s * prefix_prob - (0.0 if i % costs.block else costs.draft_step_s)
        values_s.append(value_s)
    return [max(map(sub, values_s, calls_s[n:]), default=-np.inf) for n in range(num_more + 1)]


def asking_value(
    length: int,
    average: float,
    prefix_prob: float,
    costs: StepCosts,
    max_length: int,
    guess: Sequence[float] = (),
    stop_s: float = 0.0,
) -> float:
    """What the next call of the draft model earns less what it costs. `guess` is the acceptance of lookup
    tokens that it checks: after those that it confirms it goes on for the price of one step. Where it is
    wrong, what stopping earns (`stop_s`) is left."""
    values_s = continuation_values(length, average, prefix_prob, costs, max_length, len(guess))
    if not guess:
        return values_s[0]
    confirmed, value_s = pairwise([1.0, *accumulate(guess, mul), 0.0]), 0.0
    for n, (after_s, (reached, passed)) in enumerate(zip(values_s, confirmed, strict=True)):
        if reached > passed:
            value_s += (reached - passed) * (costs.reward_s * prefix_prob * n + after_s)
    read_s = float(costs.first_draft_s[len(guess)] - costs.first_draft_s[0])
    return average * value_s + (1 - average) * (stop_s - costs.draft_step_s) - read_s


def best_guess(guess: Sequence[float], costs: StepCosts, most: int) -> int:
    """How many tokens of a guess a draft model's call should read: each that it confirms spares a step."""
    read_s = (costs.first_draft_s[: most + 1] - costs.first_draft_s[0]).tolist()
    spared = accumulate(accumulate(guess, mul), initial=0.0)
    gains = [costs.draft_step_s * n - cost_s for n, cost_s in zip(spared, read_s, strict=False)]
    return max(range(len(gains)), key=gains.__getitem__)


def best_length(acceptance: Sequence[float], costs: StepCosts, min_length: int = 0) -> tuple[int, float]:
    """How many tokens of a candidate to draft now, `min_length` or more, and the value from here to where the
    candidate breaks off or ends. What is not drafted now can be drafted by the next step if all before it are
    accepted: with k tokens accepted the value to go is J(k) = max_n { λ (1 + Σ_{i=k+1..k+n} p_i / p_k) − V(n)
    + p_{k+n+1} / p_k · J(k+n+1) }, solved from the end, with all terms times the probability of their place.
    """
    size, reward_s = min(len(acceptance), costs.max_length), costs.reward_s
    calls_s: list[float] = costs.calls_s[: size + 1].tolist()
    prefix_probs = list(accumulate(acceptance[:size], mul, initial=1.0))
    accepted = list(accumulate(prefix_probs[1:], initial=0.0))
    reached = [reward_s * tokens for tokens in accepted]
    values, value_to_go = [0.0], 0.0
    for k in range(size, -1, -1):
        reached[k] += value_to_go
        values = [value - prefix_probs[k] * cost for value, cost in zip(reached[k:], calls_s, strict=False)]
        if costs.recompute_s is not None:
            values = list(map(sub, values, rejection_costs(prefix_probs[k:], costs.recompute_s)))
        value_to_go = reward_s * (prefix_probs[k] - accepted[k]) + max(values)
    length = max(range(min_length, size + 1), key=values.__getitem__)
    return length, reward_s + values[length]


def allocate(candidates: Sequence[tuple[Sequence[float], int]], costs: StepCosts) -> list[int]:
    """How many tokens of each candidate (their acceptance, and how many are drafted in any case) to draft in
    one call, whose drafted tokens `costs` counts together. The marginal reward λ p_i falls along a candidate:
    the best call with n tokens takes the n most likely of all. A candidate that has the call to itself is
    weighed against the steps to come (`best_length`).
    """
    if len(candidates) == 1:
        [(acceptance, num_fixed)] = candidates
        return [best_length(acceptance, costs, num_fixed)[0]]
    lengths = [num_fixed for _, num_fixed in candidates]
    probs = [list(accumulate(acceptance, mul, initial=1.0)) for acceptance, _ in candidates]
    tokens: list[tuple[float, int, float]] = []
    for i, (num_fixed, found) in enumerate(zip(lengths, probs, strict=True)):
        rejected = np.diff(rejection_costs(found, costs.recompute_s)).tolist()
        marginal = [p * costs.reward_s - cost for p, cost in zip(found[1:], rejected, strict=True)]
        tokens += [(-p, i, reward) for p, reward in zip(found[1:], marginal, strict=True)][num_fixed:]
    tokens.sort(key=lambda token: token[:2])
    rewards = np.cumsum([0.0, *(reward for _, _, reward in tokens)])
    calls_s = costs.calls_s[sum(lengths) :][: len(rewards)]
    for _, i, _ in tokens[: int((rewards[: len(calls_s)] - calls_s).argmax())]:
        lengths[i] += 1
    return lengths


def repays(
    read_s: float, saved_s: float, generated: int, left: float, plain_s: float, usual_gain: float
) -> bool:
    """Whether a draft model's reading of the prompt is repaid: by what it is expected to save in this step,
    and half as much in each of the steps to come (`left` at most), but never for more than a part of what the
    answer took; or by a part of what it gained in earlier answers, in plain steps (`usual_gain`)."""
    remaining = min(max(generated, _MIN_REMAINING), left)
    most_s = max(PREFILL_SHARE * generated, PREFILL_STEPS) * plain_s
    expected_s = saved_s + min(saved_s * remaining / 2, most_s)
    if saved_s > 0:
        expected_s = max(expected_s, GAIN_SHARE * usual_gain * plain_s)
    return expected_s > read_s
