"""The objective of the automatic policy: every equation that decides how far to draft.

Notation. A step drafts n tokens and emits G of them and the target's own; a_i is the probability that
token i is accepted if all before it were, p_i = a_1 ⋯ a_i the prefix acceptance probability (p_0 = 1).

(1) Reward. The tokens per second of a text are ΣG / ΣC. They are largest where every step maximises
    E[G] λ − E[C] with λ the seconds that a token takes under the best policy (Dinkelbach, "On nonlinear
    fractional programming", 1967; for renewal processes the average-reward criterion). λ is estimated by
    what tokens took lately: `reward_per_token`.
(2) Expected tokens. E[G] = 1 + Σ_{i≤n} p_i (Leviathan et al., "Fast Inference from Transformers via
    Speculative Decoding", 2023, equation 1, with an acceptance of its own for each token):
    `expected_rewards`.
(3) Step cost. C(n) = V(n) + k·d + own time: V(n) the target's call with n drafted tokens, d a draft model's
    step, of which k were made. `StepCosts`; V(n) has stairs and may fall, so all n are compared. A step that
    stops with a candidate of N tokens has the value max_{n≤N} E[G] λ − C(n): `stopping_value`.
(4) Continuation value. A draft model's next acceptance is unknown until its step was paid for; it is expected
    to be m, the moving average of its confidence. With n tokens drafted, another k of them are worth
    λ p_n (m + m² + … + m^k) − C(n + k) − k d, and going on is worth the best k: `continuation_values`. A call
    of the draft model may read on in what lookups guess: where it would have said the same it confirms j
    tokens for the price of one step, and goes on from there: `asking_value`. It reads as many as spare more
    steps than they cost: `best_guess`. A block drafter's first step drafts all that it can: d is paid once,
    and with its confidences known only the width of the check is left to choose, by (5). (5) Look-ahead. How
    much of a candidate is drafted now is decided with the steps to come: what is not drafted now can be
    drafted by the next step if all before it are accepted. With k tokens accepted and J(k) the value to go,
    J(k) = max_n { λ (1 + Σ_{i=k+1..k+n} p_i / p_k) − C(n) + p_{k+n+1} / p_k · J(k+n+1) }, and J = 0 where the
    candidate ends or breaks off (Bellman, "Dynamic Programming", 1957): `best_length`. (6) Allocation.
    Sequences that share a call draft the tokens of the greatest λ p_i of all of them: `allocate`. (7)
    Rejection. A target of checkpoints evaluates again what it accepted of a rejected draft, with the next
    call: rejected after i tokens (probability p_i − p_{i+1}), these and the last token before them. That
    costs R(i + 1), the difference that so many more tokens make to a call: `rejection_costs`, part of (3),
    (5) and (6).
(8) Budgets. Reading a prompt for a draft model has to be repaid (`amortises_prefill`), and asking one to
    learn how good it is may cost a part of the time (`exploration_budget_s`). Where others wait for their
    next tokens a step's length is limited: `StepCosts.limited`, `within`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from operator import mul, sub

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

_PRIOR_TOKENS = 30.0
_PRIOR_RATIO = 0.75
"""λ starts as this part of a plain step and counts for so many tokens"""

_MAX_AVERAGE = 0.98
"""of confidence: no draft goes on for ever"""

_EXPLORATION_SHARE = 0.02
"""of a text's time that may go to asking a draft model against expectation"""

_SHORT_ANSWER = 16
_REMAINING_RATIO = 3
_MIN_REMAINING = 24
"""An answer is expected to go on for so many times its tokens beyond those that short answers have too, and
at first for so many tokens."""
_PREFILL_SHARE = 0.15
_PREFILL_STEPS = 3.5
"""No more than this part of what the answer took plainly is spent on reading its prompt, or so many steps."""


def reward_per_token(
    spent_s: float, emitted: float, plain_s: float, num_sequences: int, ratio: float = 1.0
) -> float:
    """λ in seconds: what a token took lately, shrunk towards a part of `plain_s`, a plain step of all
    `num_sequences` sequences: that of a draft model (`ratio`), or of lookups where these are faster."""
    prior_s = min(ratio, _PRIOR_RATIO) * plain_s * _PRIOR_TOKENS
    return (spent_s + prior_s) / (emitted + _PRIOR_TOKENS * num_sequences)


def rejection_costs(prefix_probs: Sequence[float], recompute_s: Array | None) -> list[float]:
    """Expected seconds that a rejection costs a draft of 0, 1, … tokens, equation (7), shape (n + 1,).

    `prefix_probs` are p_0, …, p_n, `recompute_s[i]` is R(i); None where nothing is evaluated again.
    """
    if recompute_s is None:
        return [0.0] * len(prefix_probs)
    rejected = (p - q for p, q in pairwise(prefix_probs))
    return list(accumulate(map(mul, rejected, recompute_s[1:].tolist()), initial=0.0))


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a step costs and earns, in seconds.

    Args:
        reward_s: λ.
        calls_s: The target's call with 0, 1, … drafted tokens.
        draft_step_s: One more step of the draft model.
        first_draft_s: Its first step, where it also reads 0, 1, … tokens of a lookup's.
        recompute_s: What 0, 1, … tokens cost that are evaluated again with the next call; None where a
            rejection costs nothing.
        block: Tokens that the draft model's first step drafts: the steps after it cost nothing.
    """

    reward_s: float
    calls_s: Array
    draft_step_s: float = 0.0
    first_draft_s: Array = field(default_factory=lambda: np.zeros(1))
    recompute_s: Array | None = None
    block: int = 1

    @property
    def max_length(self) -> int:
        """The longest draft whose cost is known."""
        return len(self.calls_s) - 1

    def longest(self, most: int) -> int:
        """The longest draft that the draft model takes part in: `most` at most, and within its block."""
        return min(self.max_length, most, self.block if self.block > 1 else most)

    def limited(self, max_step_s: float, num_sequences: int) -> StepCosts:
        """The same without the drafts with which the step would take longer than that, if each of so many
        sequences added as much to a call without any."""
        steps = np.arange(-1, self.max_length) // self.block  # a block is drafted in one
        drafted_s = float(self.first_draft_s[0]) + self.draft_step_s * steps
        plain_s = float(self.calls_s[0])
        added_s = within(self.calls_s - plain_s + drafted_s, (max_step_s - plain_s) / num_sequences)
        return replace(self, calls_s=self.calls_s[: len(added_s)])


def expected_rewards(acceptance: Sequence[float], costs: StepCosts) -> list[float]:
    """What a step that drafts the first 0, 1, … of these tokens earns, in seconds, less what their rejection
    costs; shape (len + 1,)."""
    prefix_probs = list(accumulate(acceptance, mul, initial=1.0))
    lost = rejection_costs(prefix_probs, costs.recompute_s)
    return [costs.reward_s * n - loss for n, loss in zip(accumulate(prefix_probs), lost, strict=True)]


def stopping_value(acceptance: Sequence[float], costs: StepCosts, min_length: int = 0) -> float:
    """The value in seconds of a step that drafts the best part, `min_length` tokens or more, of a
    candidate."""
    rewards = expected_rewards(acceptance[: costs.max_length], costs)
    calls_s: list[float] = costs.calls_s[: len(rewards)].tolist()
    values = [reward - cost for reward, cost in zip(rewards, calls_s, strict=True)]
    return max(values[min_length:])


def continuation_values(
    length: int, average: float, prefix_prob: float, costs: StepCosts, max_length: int, num_more: int = 0
) -> list[float]:
    """What at least one more step of the draft model earns less what it costs, equation (4), in seconds,
    after 0, 1, … `num_more` tokens that it confirms.

    Args:
        length: Tokens drafted so far.
        average: The moving average of the model's confidence.
        prefix_prob: The probability that all of them are accepted.
        costs: Those of the step.
        max_length: The longest draft that is considered.
        num_more: How many may be confirmed at once.
    """
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
    """What the next call of the draft model earns less what it costs, equation (4), in seconds. Parameters as
    in `continuation_values`; `guess` is the acceptance of the tokens that the call checks. A model that is
    wrong learns nothing of them, and what stopping earns (`stop_s`) is left."""
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


def best_length(
    acceptance: Sequence[float],
    calls_s: Array,
    reward_s: float,
    min_length: int = 0,
    recompute_s: Array | None = None,
) -> tuple[int, float]:
    """How many tokens of a candidate to draft now, `min_length` or more, and the value in seconds from here
    to where the candidate breaks off or ends: equation (5), solved from the end.

    All terms are weighed by the probability that their place is reached, so nothing is divided by it.
    `recompute_s` is as in `StepCosts`.
    """
    size = min(len(acceptance), len(calls_s) - 1)
    costs: list[float] = calls_s[: size + 1].tolist()
    prefix_probs = list(accumulate(acceptance[:size], mul, initial=1.0))
    accepted = list(accumulate(prefix_probs[1:], initial=0.0))
    reached = [reward_s * tokens for tokens in accepted]
    values, value_to_go = [0.0], 0.0
    for k in range(size, -1, -1):
        reached[k] += value_to_go
        values = [value - prefix_probs[k] * cost for value, cost in zip(reached[k:], costs, strict=False)]
        if recompute_s is not None:
            values = list(map(sub, values, rejection_costs(prefix_probs[k:], recompute_s)))
        value_to_go = reward_s * (prefix_probs[k] - accepted[k]) + max(values)
    length = max(range(min_length, size + 1), key=values.__getitem__)
    return length, reward_s + values[length]


def within(calls_s: Array, max_call_s: float, num_fixed: int = 0) -> Array:
    """The calls of `calls_s` before the first one that takes longer than `max_call_s`, and in any case those
    with no more than `num_fixed` drafted tokens."""
    longer = np.flatnonzero(calls_s > max_call_s)
    return calls_s[: max(int(longer[0]), num_fixed + 1)] if len(longer) else calls_s


def allocate(
    candidates: Sequence[tuple[Sequence[float], int]],
    calls_s: Array,
    reward_s: float,
    recompute_s: Array | None = None,
) -> list[int]:
    """How many tokens of each candidate to draft; `calls_s[n]` is the call with n drafted tokens in all.

    A candidate is the acceptance of its tokens, and how many of them are drafted in any case. A token's
    marginal reward, λ times its prefix acceptance probability, falls along a candidate: the best call with n
    tokens takes the n most likely of all candidates, and the best n is tried out. A candidate that has the
    call to itself is also weighed against the steps to come (`best_length`). `recompute_s` as in `StepCosts`.
    """
    if len(candidates) == 1:
        [(acceptance, num_fixed)] = candidates
        return [best_length(acceptance, calls_s, reward_s, num_fixed, recompute_s)[0]]
    lengths = [num_fixed for _, num_fixed in candidates]
    probs = [list(accumulate(acceptance, mul, initial=1.0)) for acceptance, _ in candidates]
    tokens: list[tuple[float, int, float]] = []
    for i, (num_fixed, found) in enumerate(zip(lengths, probs, strict=True)):
        rejected = np.diff(rejection_costs(found, recompute_s)).tolist()
        marginal = [p * reward_s - cost for p, cost in zip(found[1:], rejected, strict=True)]
        tokens += [(-p, i, reward) for p, reward in zip(found[1:], marginal, strict=True)][num_fixed:]
    tokens.sort(key=lambda token: token[:2])
    rewards = np.cumsum([0.0, *(reward for _, _, reward in tokens)])
    costs = calls_s[sum(lengths) :][: len(rewards)]
    for _, i, _ in tokens[: int((rewards[: len(costs)] - costs).argmax())]:
        lengths[i] += 1
    return lengths


def exploration_budget_s(decoded_s: float, explored_s: float) -> float:
    """Seconds for which a text that took `decoded_s`, of it `explored_s` for that, may still ask a draft
    model that is not expected to pay."""
    return _EXPLORATION_SHARE * decoded_s - explored_s


def amortises_prefill(
    prefill_s: float,
    *,
    gain_s: float,
    usual_gain_s: float,
    generated: int,
    max_tokens: int | None,
    plain_s: float,
) -> bool:
    """Whether a draft model's reading of the prompt is repaid by the gain of this step and half of the usual
    gains of the steps to come; never for more than a part of what the answer took so far, or a step or
    two."""
    remaining = max(_REMAINING_RATIO * (generated - _SHORT_ANSWER), _MIN_REMAINING)
    if max_tokens is not None:
        remaining = min(remaining, max_tokens - generated)
    most_s = max(_PREFILL_SHARE * generated, _PREFILL_STEPS) * plain_s
    return gain_s + min(usual_gain_s * remaining / 2, most_s) > prefill_s
