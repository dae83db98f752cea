"""Every setting over the recorded answers, at measured costs: what it would take, without running it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter

from outrider.core.contracts import FREE, Rewinding
from outrider.core.data import StepRecord
from outrider.core.numbers import Interval
from outrider.costs import CallCosts
from outrider.drafters.lookup import SuffixDrafter
from outrider.drafters.model import ModelDrafter
from outrider.engine import PreferredTokenization
from outrider.engine.limits import PreferredConstraint
from outrider.lab.recording import Recording
from outrider.lab.replay import replay
from outrider.lab.rows import AnswerRow, CaseOutcome
from outrider.lab.settings import AUTO_LOOKUP, PLAIN, Setting
from outrider.lab.statistics import speedup_of
from outrider.policy.state import PretrainedCalibration

DRAFT = ModelDrafter.name

_MIN_CALLS = 3
"""of a size that make its time known"""
_TIMED_CASES = 3


@dataclass(frozen=True, slots=True)
class Prices:
    """What everything costs: the target's calls, the draft model's if there is one, the engine itself.

    `own_s` are the engine's own seconds in a step by the kind of setting ("plain", "lookup", "auto"; one that
    is missing takes plain's), `own_token_s` those for each drafted token that is checked. `prior` is what the
    draft's file says of its acceptance.
    """

    target: CallCosts
    draft: CallCosts | None = None
    own_s: Mapping[str, float] = field(default_factory=dict)
    own_token_s: float = 0.0
    prior: PretrainedCalibration | None = None
    rewinding: Rewinding = FREE
    """the target's"""

    def step_own_s(self, setting: Setting) -> float:
        kind = "auto" if setting.is_auto else "lookup" if setting.uses_lookup else "plain"
        return self.own_s.get(kind, self.own_s.get("plain", 0.0))

    def drafts(self, setting: Setting) -> dict[str, CallCosts]:
        return {DRAFT: self.draft} if setting.uses_model and self.draft is not None else {}


def prices_of(target: CallCosts, answers: Sequence[AnswerRow], cases: Sequence[Recording]) -> Prices:
    """A target's prices: the engine's own times are those in the recorded calls of these answers, and what
    looking up and choosing take in a step is measured while replaying the cases, where no model is called."""
    own: dict[int, list[float]] = defaultdict(list)
    for answer in answers:
        for num_tokens, _, _, seconds in answer.calls:
            own[num_tokens].append(seconds)
    plain_s = median(own[1]) if own[1] else 0.0
    rises = [
        (median(seconds) - plain_s) / (num_tokens - 1)
        for num_tokens, seconds in own.items()
        if num_tokens > 3 and len(seconds) >= _MIN_CALLS
    ]
    token_s = max(median(rises), 0.0) if rises else 0.0
    own_s, prices = {"plain": plain_s}, Prices(target, None, {"plain": plain_s}, token_s)
    for kind, setting in (("lookup", Setting("lookup", 8)), ("auto", AUTO_LOOKUP)):
        per_step = []
        for case in cases[:_TIMED_CASES]:
            before = perf_counter()
            [outcome] = predict([case], setting, prices)
            per_step.append((perf_counter() - before) / max(outcome.target_calls, 1))
        own_s[kind] = plain_s + (median(per_step) if per_step else 0.0)
    return replace(prices, own_s=own_s)


def predict(cases: Sequence[Recording], setting: Setting, prices: Prices) -> list[CaseOutcome]:
    """The outcome of each case, one after the other under one policy, as in a block of real runs.

    An automatic policy begins with these prices and no knowledge of the texts, and learns from case to case.
    """
    policy = setting.policy(prices.target, prices.drafts(setting), prices.prior)
    preferred = PreferredTokenization()
    found = []
    for case in cases:
        played = replay(
            case,
            policy,
            prices.target,
            prices.drafts(setting),
            free=[SuffixDrafter()] if setting.uses_lookup else [],
            constraint=case.constrain and PreferredConstraint(case.constrain(), preferred),
            own_s=prices.step_own_s(setting),
            own_token_s=prices.own_token_s,
            rewinding=prices.rewinding,
            is_warm=True,
        )
        places = range(len(case.prompt), len(case.prompt) + len(case.tokens))
        plain_s = sum(prices.target.call_s(1, context=place) + prices.step_own_s(PLAIN) for place in places)
        outcome = outcome_of(case.id, played.records, plain_s)
        if outcome.draft_calls and prices.draft is not None:
            unread_s = prices.draft.prefill_s(len(case.prompt)) * (1 - case.whole_ratio)
            outcome = outcome.model_copy(update={"seconds": outcome.seconds - unread_s})
        found.append(outcome)
    return found


def outcome_of(case: str, records: Sequence[StepRecord], plain_s: float) -> CaseOutcome:
    """What step records say, real ones or those of a replay."""
    decode = [record for record in records if record.kind == "decode"]
    read_s = sum(record.work.prefill_s for record in records)
    longest = max((len(record.draft) for record in decode), default=0)
    return CaseOutcome(
        case=case,
        tokens=sum(len(record.tokens) for record in decode),
        seconds=sum(record.total_s - record.work.prefill_s - record.read_s for record in decode) + read_s,
        plain_s=plain_s,
        target_calls=len(decode),
        draft_calls=sum(record.work.calls for record in decode),
        drafted=tuple(sum(len(record.draft) > i for record in decode) for i in range(longest)),
        accepted=tuple(sum(record.num_accepted > i for record in decode) for i in range(longest)),
        draft_s=sum(record.work.model_s for record in decode) + read_s,
        verify_s=sum(record.verify_s for record in decode),
    )


@dataclass(frozen=True, slots=True)
class Expectation:
    """What some answers came to under each setting. `error` is how uncertain the costs of steps with a draft
    are against those of plain ones, as a relative standard error."""

    outcomes: Mapping[Setting, Sequence[CaseOutcome]]
    error: float

    def over(self, setting: Setting, other: Setting) -> Interval:
        slow_s, fast_s = ([one.seconds for one in self.outcomes[who]] for who in (other, setting))
        drafting = max(self._drafting(setting), self._drafting(other))
        return speedup_of(slow_s, fast_s, error=0.0 if slow_s == fast_s else self.error * drafting)

    def _drafting(self, setting: Setting) -> float:
        found = self.outcomes[setting]
        drafts = sum(outcome.drafted[0] for outcome in found if outcome.drafted)
        return drafts / max(sum(outcome.target_calls for outcome in found), 1)


def expect(cases: Sequence[Recording], prices: Prices, settings: Sequence[Setting]) -> Expectation:
    """Replay settings over the answers; those of a draft model need its offers in each of them."""
    # A call over a single token, which all ratios are to, is as uncertain as its measured spread.
    curves = [prices.target] if prices.draft is None else [prices.target, prices.draft]
    single = [[p.spread_ratio for p in c.points if p.num_tokens == 1] for c in curves]
    error = max(min(found, default=0.05) for found in single)
    return Expectation({setting: predict(cases, setting, prices) for setting in settings}, error)
