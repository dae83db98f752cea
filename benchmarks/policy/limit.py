"""How much of the hindsight bound estimates can reach at all.

The informed decoder knows every confidence ahead: at each position of the answer, how sure the draft
model will be there and what the lookup will offer, each with its calibrated chance to be right. It does
not know the outcome. Its plan is the one of least expected time (backward induction over positions and
tokens that the draft model has not read); carried out on what came in fact, it says what perfect use of
such estimates is worth. A policy that sees confidences only as it pays for them cannot expect more; to
go further takes better estimates, not better choices.

A plan is a step's free tokens alone, or up to 8 of them, then up to 16 of the draft model's, then free
ones again: what the bound may choose from too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from outrider.costs import CallCosts
from outrider.lab.recording import Recording
from outrider.policy.state import PolicyState
from policy.ahead import MAX_FREE, MAX_LEAD, MAX_MODEL, Found, Offers, offers_of

MAX_UNREAD = 48

Array = npt.NDArray[np.float64]
Plan = tuple[int, int, int]
"""free tokens, the draft model's, and free ones after those"""


def informed_limit(
    recording: Recording,
    knowledge: PolicyState,
    costs: CallCosts,
    draft: tuple[str, CallCosts] | None,
    own_s: float = 0.0,
) -> tuple[float, float]:
    """The informed decoder's seconds: as it expects them, and as they come. With a draft model it asks
    it or never does, whichever it expects to be faster."""
    found = [Informed(recording, offers_of(recording, knowledge, None), costs, None, own_s).seconds()]
    if draft is not None:
        name, curve = draft
        informed = Informed(recording, offers_of(recording, knowledge, name), costs, curve, own_s)
        read_s = curve.prefill_s(len(recording.prompt))
        expected_s, seconds = informed.seconds()
        found.append((read_s + expected_s, read_s + seconds))
    return min(found)


class Informed:
    """The plans of one answer, worked out from its end; `draft` is what calls of the draft model take,
    None to do without it."""

    def __init__(
        self,
        recording: Recording,
        offers: Offers,
        costs: CallCosts,
        draft: CallCosts | None,
        own_s: float = 0.0,
    ) -> None:
        self._end, self._prompt = len(recording.tokens), len(recording.prompt)
        self._offers = offers
        self._draft = draft
        longest = MAX_LEAD + MAX_MODEL + MAX_FREE
        self._calls_s = [
            costs.calls_s(longest + 1, context=self._prompt + i) + own_s for i in range(self._end)
        ]
        self._times = np.zeros((self._end + 1, MAX_UNREAD + 1))
        self._plans: list[list[Plan]] = [[] for _ in range(self._end)]
        for position in range(self._end - 1, -1, -1):
            self._plan(position)

    def _free(self, position: int, drafted: int = 0) -> list[float]:
        """The lookup's chances after a draft, as far as there is room: the target adds a token."""
        found = self._offers.free[position].get(drafted, Found([], 0))
        return found.chances[: max(self._end - position - drafted - 1, 0)]

    def _rest(self, position: int, chances: Sequence[float], unread: int) -> Array:
        """Expected time after a call that checks the first 0, 1, … of these tokens, all before them
        right; so many tokens are unread by the draft model if none of them is right."""
        survivals = np.cumprod([1.0, *chances])
        at = np.arange(len(survivals))
        later_s = self._times[position + at + 1, np.minimum(unread + at, MAX_UNREAD)]
        stopped_s = np.append(0.0, np.cumsum(survivals[:-1] * (1 - np.asarray(chances)) * later_s[:-1]))
        rest: Array = stopped_s + survivals * later_s
        return rest

    def _plan(self, position: int) -> None:
        """The best plan for each number of unread tokens."""
        chances, calls_s = self._free(position), self._calls_s[position]
        models = self._with_model(position, chances)
        for unread in range(MAX_UNREAD + 1):
            totals = calls_s[: len(chances) + 1] + self._rest(position, chances, unread + 1)
            count = int(totals.argmin())
            best_s, plan = float(totals[count]), (count, 0, 0)
            for lead, (rest_s, with_model) in enumerate(models):
                total_s = rest_s + self._first_s(position, unread + lead)
                if total_s < best_s:
                    best_s, plan = total_s, with_model
            self._times[position, unread] = best_s
            self._plans[position].append(plan)

    def _first_s(self, position: int, num_tokens: int) -> float:
        """The draft model's first call, which reads what it has not seen."""
        if self._draft is None:
            return 0.0
        return self._draft.call_s(max(num_tokens, 1), context=self._prompt + position)

    def _with_model(self, position: int, chances: Sequence[float]) -> list[tuple[float, Plan]]:
        """Behind each number of free tokens the best draft of the model's, without its first call."""
        if self._draft is None:
            return []
        room = self._end - position - 1
        leads = range(min(len(chances), MAX_LEAD, room - 1) + 1)
        tails = {
            drafted: self._rest(position + drafted, self._free(position, drafted), 2)
            for drafted in range(1, min(MAX_LEAD + MAX_MODEL, room) + 1)
        }
        return [self._behind_lead(position, chances[:lead], tails) for lead in leads if room > lead]

    def _behind_lead(
        self, position: int, lead: Sequence[float], tails: Mapping[int, Array]
    ) -> tuple[float, Plan]:
        calls_s, step_s = self._calls_s[position], self._first_s(position, 1)
        survival, stopped_s = 1.0, 0.0
        best: tuple[float, Plan] = (np.inf, (0, 0, 0))
        most = min(MAX_MODEL, self._end - position - 1 - len(lead))
        for i, chance in enumerate([*lead, *self._offers.model[position + len(lead) :][:most]]):
            stopped_s += survival * (1 - chance) * float(self._times[position + i + 1, 1])
            survival *= chance
            drafted = i + 1 - len(lead)
            if drafted < 1:
                continue
            behind_s = survival * tails[i + 1]
            totals = behind_s + calls_s[i + 1 : i + 1 + len(behind_s)]
            tail = int(totals.argmin())
            total_s = stopped_s + (drafted - 1) * step_s + float(totals[tail])
            best = min(best, (total_s, (len(lead), drafted, tail)))
        return best

    def seconds(self) -> tuple[float, float]:
        """Expected, and when the plans are carried out on what came."""
        position, unread, spent_s = 0, 1, 0.0
        while position < self._end:
            lead, model, tail = self._plans[position][min(unread, MAX_UNREAD)]
            drafted, right = lead + model, min(lead, self._offers.free[position][0].right)
            spent_s += float(self._calls_s[position][drafted + tail])
            if model:
                spent_s += self._first_s(position, unread + lead)
                spent_s += (model - 1) * self._first_s(position, 1)
                if right == lead:
                    right += min(model, self._offers.model_right[position + lead])
            if right == drafted and tail:
                right += min(tail, self._offers.free[position][drafted].right)
            if model:
                unread = 2 + right - drafted if right >= drafted else 1
            else:
                unread += right + 1
            position += right + 1
        return float(self._times[0, 1]), spent_s
