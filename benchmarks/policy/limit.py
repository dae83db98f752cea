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

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.core.contracts import Wish
from outrider.core.data import Hint
from outrider.costs import CallCosts
from outrider.drafters.suffix import SuffixDrafter
from outrider.policy.acceptance import TextState
from outrider.policy.knowledge import Knowledge
from outrider.replay import Recording
from outrider.replay.run import SAMPLER

MOST_FREE, MOST_MODEL, MOST_LEAD, MOST_UNREAD = 64, 16, 8, 48

Array = npt.NDArray[np.float64]
Plan = tuple[int, int, int]
"""free tokens, the draft model's, and free ones behind those"""


@dataclass(frozen=True, slots=True)
class Offers:
    """What is known ahead at each position of an answer, and how much of it comes true."""

    free: list[list[float]]
    """chances of the tokens that the lookup offers there"""
    free_right: list[int]
    model: list[float]
    """the chance of the draft model's token there"""
    model_right: list[int]


def offers_of(recording: Recording, knowledge: Knowledge, model: str | None) -> Offers:
    """The recording's offers, with chances by what a policy has learned of all texts before and, as it
    would, of this one up to the position."""
    answer, lookup, state = recording.tokens, SuffixDrafter(), TextState()
    lookup.begin(0, recording.prompt)
    estimator = copy.deepcopy(knowledge.estimator(lookup.name))
    free, free_right = [], []
    for done in range(len(answer)):
        [draft], _ = lookup.propose([Wish(0, MOST_FREE, SAMPLER)], _Everything())
        free.append([estimator.probability(hint, state) for hint in draft.hints])
        right = _agreement(draft.tokens, answer[done:])
        free_right.append(right)
        for i, hint in enumerate(draft.hints[: min(right + 1, len(answer) - done)]):
            estimator.learn(hint, state, i < right)
        if draft.tokens:
            state.note_first(right > 0)
        lookup.observe(0, answer[done : done + 1])
    return Offers(free, free_right, *_model_offers(recording, knowledge, model))


def _model_offers(
    recording: Recording, knowledge: Knowledge, model: str | None
) -> tuple[list[float], list[int]]:
    """The chance of the draft model's token at each position, and how many of them stand from there on."""
    answer, chances = recording.tokens, []
    if model is None:
        return [0.0] * len(answer), [0] * len(answer)
    offered, state = recording.offers[model], TextState()
    estimator = copy.deepcopy(knowledge.estimator(model))
    right = [int(a == b) for a, b in zip(offered.tokens, answer, strict=True)]
    for confidence, is_right in zip(offered.confidence, right, strict=True):
        chances.append(estimator.probability(Hint(confidence), state))
        estimator.learn(Hint(confidence), state, bool(is_right))
    for i in range(len(answer) - 2, -1, -1):
        right[i] *= 1 + right[i + 1]
    return chances, right


class _Everything:
    def wants(self, wish: Wish, drafted: Sequence[int]) -> bool:
        del wish, drafted
        return True

    def takes(self, wish: Wish, drafted: Sequence[int], hint: Hint) -> bool:
        del wish, drafted, hint
        return True


def _agreement(drafted: Sequence[int], answer: Sequence[int]) -> int:
    pairs = enumerate(zip(drafted, answer, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(drafted), len(answer)))


def informed_limit(
    recording: Recording,
    knowledge: Knowledge,
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
        self, recording: Recording, offers: Offers, costs: CallCosts, draft: CallCosts | None, own_s: float
    ) -> None:
        self._end, self._prompt = len(recording.tokens), len(recording.prompt)
        self._offers = offers
        self._draft = draft
        longest = MOST_LEAD + MOST_MODEL + MOST_FREE
        self._calls_s = [
            costs.calls_s(longest + 1, context=self._prompt + i) + own_s for i in range(self._end)
        ]
        self._times = np.zeros((self._end + 1, MOST_UNREAD + 1))
        self._behind: list[Array] = [np.zeros(1)] * (self._end + 1)
        """at each position, what is still to come with 0, 1, … free tokens behind a model's draft"""
        self._plans: list[list[Plan]] = [[] for _ in range(self._end)]
        for position in range(self._end - 1, -1, -1):
            self._behind[position] = self._rest(position, self._free(position), 2)
            self._plan(position)

    def _free(self, position: int) -> list[float]:
        """The lookup's chances there, as far as the answer has room for: the target adds a token."""
        return self._offers.free[position][: max(self._end - position - 1, 0)]

    def _rest(self, position: int, chances: Sequence[float], unread: int) -> Array:
        """Expected time behind a call that checks the first 0, 1, … of these tokens, all before them
        right; so many tokens are unread by the draft model if none of them is right."""
        survivals = np.cumprod([1.0, *chances])
        at = np.arange(len(survivals))
        later_s = self._times[position + at + 1, np.minimum(unread + at, MOST_UNREAD)]
        stopped_s = np.append(0.0, np.cumsum(survivals[:-1] * (1 - np.asarray(chances)) * later_s[:-1]))
        rest: Array = stopped_s + survivals * later_s
        return rest

    def _plan(self, position: int) -> None:
        """The best plan for each number of unread tokens."""
        chances, calls_s = self._free(position), self._calls_s[position]
        models = self._with_model(position, chances)
        for unread in range(MOST_UNREAD + 1):
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
        leads = range(min(len(chances), MOST_LEAD, room - 1) + 1)
        return [self._behind_lead(position, chances[:lead]) for lead in leads if room > lead]

    def _behind_lead(self, position: int, lead: Sequence[float]) -> tuple[float, Plan]:
        calls_s, step_s = self._calls_s[position], self._first_s(position, 1)
        survival, stopped_s = 1.0, 0.0
        best: tuple[float, Plan] = (np.inf, (0, 0, 0))
        most = min(MOST_MODEL, self._end - position - 1 - len(lead))
        for i, chance in enumerate([*lead, *self._offers.model[position + len(lead) :][:most]]):
            stopped_s += survival * (1 - chance) * float(self._times[position + i + 1, 1])
            survival *= chance
            drafted = i + 1 - len(lead)
            if drafted < 1:
                continue
            behind_s = survival * self._behind[position + i + 1]
            totals = behind_s + calls_s[i + 1 : i + 1 + len(behind_s)]
            tail = int(totals.argmin())
            total_s = stopped_s + (drafted - 1) * step_s + float(totals[tail])
            best = min(best, (total_s, (len(lead), drafted, tail)))
        return best

    def seconds(self) -> tuple[float, float]:
        """Expected, and when the plans are carried out on what came."""
        position, unread, spent_s = 0, 1, 0.0
        while position < self._end:
            lead, model, tail = self._plans[position][min(unread, MOST_UNREAD)]
            drafted, right = lead + model, min(lead, self._offers.free_right[position])
            spent_s += float(self._calls_s[position][drafted + tail])
            if model:
                spent_s += self._first_s(position, unread + lead)
                spent_s += (model - 1) * self._first_s(position, 1)
                if right == lead:
                    right += min(model, self._offers.model_right[position + lead])
            if right == drafted and tail:
                right += min(tail, self._offers.free_right[position + drafted])
            if model:
                unread = 2 + right - drafted if right >= drafted else 1
            else:
                unread += right + 1
            position += right + 1
        return float(self._times[0, 1]), spent_s
