"""The hindsight bound: the fastest sequence of choices that the drafters' offers allowed.

It knows what will be accepted, so no policy that draws on these drafters can be faster at these
costs; what separates a policy from it is luck and the quality of its estimates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.core.contracts import Drafter, Wish
from outrider.core.data import Hint
from outrider.costs import CallCosts
from outrider.drafters.suffix import SuffixDrafter
from outrider.replay.recording import Offers, Recording
from outrider.replay.run import SAMPLER

__all__ = ["hindsight_bound"]

_MOST_FREE = 64
_MOST_MODEL = 16
_MOST_LEAD = 8
_MOST_UNREAD = 96


def hindsight_bound(
    recording: Recording,
    costs: CallCosts,
    draft_costs: Mapping[str, CallCosts] | None = None,
    *,
    free: Sequence[Drafter] | None = None,
    own_s: float = 0.0,
) -> float:
    """The least seconds in which the recorded answer could be decoded; see `replay` for the parameters.

    Choices at each step: nothing; free tokens; a draft model's, behind free ones or not, and with free
    ones behind them or not. Draft models are not mixed within an answer.
    """
    right = _right_free_tokens(recording, [SuffixDrafter()] if free is None else free)
    best = _solve(recording, right, costs, None, None, own_s)
    for name, draft in (draft_costs or {}).items():
        read_s = draft.prefill_s(len(recording.prompt))
        best = min(best, read_s + _solve(recording, right, costs, draft, recording.offers[name], own_s))
    return best


class _All:
    def wants(self, wish: Wish, drafted: Sequence[int]) -> bool:
        del wish, drafted
        return True

    def takes(self, wish: Wish, drafted: Sequence[int], hint: Hint) -> bool:
        del wish, drafted, hint
        return True


def _right_free_tokens(recording: Recording, free: Sequence[Drafter]) -> list[int]:
    """At each position of the answer, how many tokens of the best free offer would have stood."""
    answer, found = recording.tokens, []
    for drafter in free:
        drafter.begin(0, recording.prompt)
    for done in range(len(answer)):
        most = 0
        for drafter in free:
            [draft], _ = drafter.propose([Wish(0, _MOST_FREE, SAMPLER)], _All())
            most = max(most, _agreement(draft.tokens, answer[done:]))
            drafter.observe(0, answer[done : done + 1])
        found.append(most)
    return found


def _right_model_tokens(answer: Sequence[int], offers: Offers) -> list[int]:
    """At each position, how many tokens of the model's would have stood."""
    right = [0] * (len(answer) + 1)
    for i in range(len(answer) - 1, -1, -1):
        right[i] = right[i + 1] + 1 if offers.tokens[i] == answer[i] else 0
    return right


def _agreement(drafted: Sequence[int], answer: Sequence[int]) -> int:
    count = 0
    while count < min(len(drafted), len(answer)) and drafted[count] == answer[count]:
        count += 1
    return count


@dataclass(slots=True)
class _Problem:
    """Backward induction over positions and tokens that the draft model has yet to read."""

    free: Sequence[int]
    model: Sequence[int]
    times: np.ndarray
    """seconds still needed, shape (positions + 1, unread tokens + 1)"""
    calls_s: np.ndarray
    """of the target with 0, 1, … drafted tokens, at the present position"""
    step_s: float
    end: int

    def with_model(self, position: int, lead: int) -> float:
        """The least seconds of a step behind `lead` free tokens and all that follow it, the draft
        model's first call left out."""
        best = np.inf
        for j in range(1, min(self.model[position + lead], _MOST_MODEL, self.end - position - lead - 1) + 1):
            at = position + lead + j
            most = min(self.free[at] if at < self.end else 0, self.end - at - 1)
            tail = np.arange(max(most, 0) + 1)
            after = self.times[at + tail + 1, np.minimum(tail + 2, _MOST_UNREAD)]
            best = min(best, (j - 1) * self.step_s + float((self.calls_s[lead + j + tail] + after).min()))
        return best


def _solve(
    recording: Recording,
    right: Sequence[int],
    costs: CallCosts,
    draft: CallCosts | None,
    offers: Offers | None,
    own_s: float,
) -> float:
    end, prompt = len(recording.tokens), len(recording.prompt)
    model = _right_model_tokens(recording.tokens, offers) if offers else [0] * (end + 1)
    times = np.zeros((end + 1, _MOST_UNREAD + 1))
    unread = np.arange(_MOST_UNREAD + 1)
    longest = _MOST_FREE + _MOST_MODEL + _MOST_LEAD
    for position in range(end - 1, -1, -1):
        context = prompt + position
        calls_s = costs.calls_s(longest + 2, context=context) + own_s
        room = end - position - 1
        best = np.full(_MOST_UNREAD + 1, np.inf)
        for n in range(min(right[position], room) + 1):
            best = np.minimum(
                best, calls_s[n] + times[position + n + 1, np.minimum(unread + n + 1, _MOST_UNREAD)]
            )
        if draft is not None:
            problem = _Problem(right, model, times, calls_s, draft.call_s(1, context=context), end)
            first_s = draft.calls_s(_MOST_UNREAD + _MOST_LEAD + 1, context=context)
            for lead in range(min(right[position], room - 1, _MOST_LEAD) + 1):
                rest = problem.with_model(position, lead)
                best = np.minimum(best, first_s[np.maximum(unread, 1) + lead - 1] + rest)
        times[position] = best
    return float(times[0, 1])
