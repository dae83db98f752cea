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
(4) Look-ahead. How much of a candidate is drafted now is decided with the steps to come: what is not drafted
    now can be drafted by the next step if all before it are accepted. With k tokens accepted and J(k) the
    value to go, J(k) = max_n { λ (1 + Σ_{i=k+1..k+n} p_i / p_k) − C(n) + p_{k+n+1} / p_k · J(k+n+1) }, and J
    = 0 where the candidate ends or breaks off (Bellman, "Dynamic Programming", 1957): `best_length`.
    Whether to ask a draft model, and to go on, compares values of this one step: (3), (5) and (6).
(5) Continuation value. A draft model's next acceptance is random until its step was paid for: an optimal
    stopping problem, solved by backward induction in `stopping`.
(6) Agreement value. Where a lookup has a candidate, one step of the draft model tells whether it agrees. With
    the probability α of that: α · (3) of the model's token and the rest of the candidate + (1 − α) · (3) of
    the model's token alone − d.
(7) Allocation. Sequences that share a call draft the tokens of the greatest λ p_i of all of them: `allocate`.
(8) Rejection. A target of checkpoints evaluates again what it accepted of a rejected draft, with the next
    call: rejected after i tokens (probability p_i − p_{i+1}), these and the last token before them. That
    costs R(i + 1), the difference that so many more tokens make to a call: `rejection_costs`, part of (3),
    (4) and (7).
(9) Budgets. (1) to (8) hold for estimates that may be wrong. How much slower than plain decoding a text may
    become by drafts of a model is limited (`slowdown_budget`), and so is asking a model to learn how good it
    is (`exploration_budget_s`), and reading a prompt for it (`amortises_prefill`). Where others wait for
    their next tokens so is a step's length: `StepCosts.limited`, `within`.
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
_PRIOR_RATIO = 0.85
"""λ starts as this part of a plain step and counts for so many tokens"""

_MIN_USEFUL_SHARE = 0.5
"""Lookup tokens are not looked for where their prefix acceptance probability is below this share of the least
marginal cost of a token"""

_SLOWDOWN_STEPS = 0.3
_SLOWDOWN_STEPS_PER_TOKEN = 0.005
"""plain steps that any text may lose to a draft model, and how many more for each of its tokens"""
_SAVED_SHARE = 0.1
"""the part of what all texts have saved that a text may lose besides"""
_EXPLORATION_SHARE = 0.02
"""of a text's time that may go to asking a draft model against expectation"""

_SHORT_ANSWER = 16
_REMAINING_RATIO = 3
"""An answer is expected to go on for so many times its tokens beyond those that short answers have too."""
_PREFILL_SHARE = 0.25
"""of what the answer's tokens took plainly: more is not spent on reading its prompt"""


def reward_per_token(spent_s: float, emitted: float, plain_s: float, num_sequences: int) -> float:
    """λ in seconds: what a token took lately, shrunk towards a part of `plain_s`, a plain step of all
    `num_sequences` sequences."""
    prior_s = _PRIOR_RATIO * plain_s * _PRIOR_TOKENS
    return (spent_s + prior_s) / (emitted + _PRIOR_TOKENS * num_sequences)


def rejection_costs(prefix_probs: Sequence[float], reread_s: Array | None) -> list[float]:
    """Expected seconds that a rejection costs a draft of 0, 1, … tokens, equation (8), shape (n + 1,).

    `prefix_probs` are p_0, …, p_n, `reread_s[i]` is R(i); None where nothing is evaluated again.
    """
    if reread_s is None:
        return [0.0] * len(prefix_probs)
    rejected = (p - q for p, q in pairwise(prefix_probs))
    return list(accumulate(map(mul, rejected, reread_s[1:].tolist()), initial=0.0))


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a step costs and earns, in seconds.

    `calls_s[n]` is the target's call with n drafted tokens; `draft_step_s` one more step of the draft model
    and `first_draft_s[i]` its first, where it also reads i tokens of a lookup's; `uncached_s` what its first
    step of the next draft costs more where all of this one are accepted, since the last was never evaluated;
    `reward_s` is λ. `reread_s[i]` is what i tokens cost that are evaluated again with the next call; None
    where a rejection costs nothing.
    """

    reward_s: float
    calls_s: Array
    draft_step_s: float = 0.0
    first_draft_s: Array = field(default_factory=lambda: np.zeros(1))
    uncached_s: float = 0.0
    reread_s: Array | None = None

    @property
    def max_length(self) -> int:
        """The longest draft whose cost is known."""
        return len(self.calls_s) - 1

    def limited(self, max_step_s: float, num_sequences: int) -> StepCosts:
        """The same without the drafts with which the step would take longer than that, if each of so many
        sequences added as much to a call without any."""
        drafted_s = float(self.first_draft_s[0]) + self.draft_step_s * np.arange(-1, self.max_length)
        plain_s = float(self.calls_s[0])
        added_s = within(self.calls_s - plain_s + drafted_s, (max_step_s - plain_s) / num_sequences)
        return replace(self, calls_s=self.calls_s[: len(added_s)])


def expected_rewards(acceptance: Sequence[float], costs: StepCosts) -> list[float]:
    """What a step that drafts the first 0, 1, … of these tokens earns, in seconds, less what their rejection
    costs; shape (len + 1,)."""
    prefix_probs = list(accumulate(acceptance, mul, initial=1.0))
    lost = rejection_costs(prefix_probs, costs.reread_s)
    return [costs.reward_s * n - loss for n, loss in zip(accumulate(prefix_probs), lost, strict=True)]


class MarginalCosts:
    """What drafted tokens add to a call, in plain calls: for decisions without arithmetic on arrays, which
    takes a noticeable part of a small target's step. `calls_s` is as in `StepCosts`."""

    def __init__(self, calls_s: Array) -> None:
        self.calls_s = calls_s
        marginal = calls_s[1:] / calls_s[0] - 1.0
        self.ratios: list[float] = marginal.tolist()
        """of 1, 2, … drafted tokens together"""
        least = float((marginal / np.arange(1, len(calls_s))).min())
        self.min_useful_prob = min(_MIN_USEFUL_SHARE * least, 1.0)
        """the prefix acceptance probability below which a lookup token is not looked for"""

    def may_pay(self, acceptance: Sequence[float]) -> bool:
        """Whether drafting a candidate may pay in a call of its own, if a token takes no longer than
        a plain step."""
        prefix_prob, expected = 1.0, 0.0
        for probability, ratio in zip(acceptance, self.ratios, strict=False):
            prefix_prob *= probability
            expected += prefix_prob
            if expected >= ratio:
                return True
        return False


def stopping_value(acceptance: Sequence[float], costs: StepCosts, min_length: int = 0) -> float:
    """The value in seconds of a step that drafts the best part, `min_length` tokens or more, of a
    candidate."""
    rewards = expected_rewards(acceptance[: costs.max_length], costs)
    calls_s: list[float] = costs.calls_s[: len(rewards)].tolist()
    values = [reward - cost for reward, cost in zip(rewards, calls_s, strict=True)]
    return max(values[min_length:])


def best_length(
    acceptance: Sequence[float],
    calls_s: Array,
    reward_s: float,
    min_length: int = 0,
    reread_s: Array | None = None,
) -> tuple[int, float]:
    """How many tokens of a candidate to draft now, `min_length` or more, and the value in seconds from here
    to where the candidate breaks off or ends: equation (4), solved from the end.

    All terms are weighed by the probability that their place is reached, so nothing is divided by it.
    `reread_s` is as in `StepCosts`.
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
        if reread_s is not None:
            values = list(map(sub, values, rejection_costs(prefix_probs[k:], reread_s)))
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
    reread_s: Array | None = None,
) -> list[int]:
    """How many tokens of each candidate to draft; `calls_s[n]` is the call with n drafted tokens in all.

    A candidate is the acceptance of its tokens, and how many of them are drafted in any case. A token's
    marginal reward, λ times its prefix acceptance probability, falls along a candidate: the best call with n
    tokens takes the n most likely of all candidates, and the best n is tried out. A candidate that has the
    call to itself is also weighed against the steps to come (`best_length`). `reread_s` as in `StepCosts`.
    """
    if len(candidates) == 1:
        [(acceptance, num_fixed)] = candidates
        return [best_length(acceptance, calls_s, reward_s, num_fixed, reread_s)[0]]
    lengths = [num_fixed for _, num_fixed in candidates]
    probs = [list(accumulate(acceptance, mul, initial=1.0)) for acceptance, _ in candidates]
    tokens: list[tuple[float, int, float]] = []
    for i, (num_fixed, found) in enumerate(zip(lengths, probs, strict=True)):
        rejected = np.diff(rejection_costs(found, reread_s)).tolist()
        marginal = [p * reward_s - cost for p, cost in zip(found[1:], rejected, strict=True)]
        tokens += [(-p, i, reward) for p, reward in zip(found[1:], marginal, strict=True)][num_fixed:]
    tokens.sort(key=lambda token: token[:2])
    rewards = np.cumsum([0.0, *(reward for _, _, reward in tokens)])
    costs = calls_s[sum(lengths) :][: len(rewards)]
    for _, i, _ in tokens[: int((rewards[: len(costs)] - costs).argmax())]:
        lengths[i] += 1
    return lengths


def slowdown_budget(generated: int, saved_steps: float, slowdown_steps: float) -> float:
    """How much slower than plain decoding a text of `generated` tokens may become, in plain steps.

    `saved_steps` is what all texts have saved so far, `slowdown_steps` how much slower this text is already.
    """
    return (
        _SLOWDOWN_STEPS + _SLOWDOWN_STEPS_PER_TOKEN * generated + _SAVED_SHARE * saved_steps - slowdown_steps
    )


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
    gains of the steps to come; never more than a part of what the answer took so far."""
    remaining = _REMAINING_RATIO * max(generated - _SHORT_ANSWER, 0)
    if max_tokens is not None:
        remaining = min(remaining, max_tokens - generated)
    return gain_s + min(usual_gain_s * remaining / 2, _PREFILL_SHARE * generated * plain_s) > prefill_s
