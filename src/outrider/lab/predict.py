"""Every setting over the recorded answers, at measured costs: what it would take, without running it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

from outrider.core.contracts import Constraint, Drafter, Policy
from outrider.core.data import StepRecord
from outrider.costs import CallCosts
from outrider.drafters.model import ModelDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine import PreferredTokenization
from outrider.engine.tokenization import PreferredConstraint
from outrider.lab.replay import ForcedDrafter, Recording, hindsight_bound, replay
from outrider.lab.rows import CaseOutcome
from outrider.lab.settings import Setting
from outrider.policy.pretrained import PretrainedCalibration

DRAFT = ModelDrafter.name

_TIMED_CASES = 3


@dataclass(frozen=True, slots=True)
class Scored:
    """A recorded answer with the offers of at most one draft model (by the name "draft"), and what makes its
    constraint, if it has one."""

    recording: Recording
    constrain: Callable[[], Constraint] | None = None


@dataclass(frozen=True, slots=True)
class OwnTimes:
    """The engine's own seconds in a step: `step_s` by the kind of setting, and `token_s` for each drafted
    token that is checked. Kinds are "plain", "lookup" and "auto"; one that is missing takes plain's."""

    step_s: Mapping[str, float] = field(default_factory=dict)
    token_s: float = 0.0

    def of(self, setting: Setting) -> float:
        """The seconds of a step under this setting."""
        kind = "auto" if setting.is_auto else "lookup" if setting.uses_lookup else "plain"
        return self.step_s.get(kind, self.step_s.get("plain", 0.0))


@dataclass(frozen=True, slots=True)
class Prices:
    """What everything costs: the target's calls, the draft model's if there is one, the engine itself."""

    target: CallCosts
    draft: CallCosts | None = None
    own: OwnTimes = field(default_factory=OwnTimes)
    prior: PretrainedCalibration | None = None
    """what the draft's file says of its acceptance"""

    def drafts(self, setting: Setting) -> dict[str, CallCosts]:
        """The draft models that a setting may ask."""
        return {DRAFT: self.draft} if setting.uses_model and self.draft is not None else {}


def predict(cases: Sequence[Scored], setting: Setting, prices: Prices) -> list[CaseOutcome]:
    """The outcome of each case, one after the other under one policy, as in a block of real runs.

    An automatic policy begins with these prices and no knowledge of the texts, and learns from case to case.
    """
    policy = setting.policy(prices.target, prices.drafts(setting), prices.prior)
    spelling = PreferredTokenization()
    return [_run(case, setting, policy, prices, spelling) for case in cases]


def _run(
    case: Scored, setting: Setting, policy: Policy, prices: Prices, spelling: PreferredTokenization
) -> CaseOutcome:
    constraint = None if case.constrain is None else PreferredConstraint(case.constrain(), spelling)
    played = replay(
        case.recording,
        policy,
        prices.target,
        prices.drafts(setting),
        free=_free(setting),
        constraint=constraint,
        own_s=prices.own.of(setting),
        own_token_s=prices.own.token_s,
    )
    return outcome_of(case.recording.id, played.records, _plain_s(case.recording, prices))


def _free(setting: Setting) -> list[Drafter]:
    return [SuffixDrafter()] if setting.uses_lookup else []


def _plain_s(recording: Recording, prices: Prices) -> float:
    """Plain decoding's seconds, with its own time in each step."""
    start, size = len(recording.prompt), len(recording.tokens)
    own_s = prices.own.step_s.get("plain", 0.0)
    return sum(prices.target.call_s(1, context=start + i) + own_s for i in range(size))


def outcome_of(case: str, records: Sequence[StepRecord], plain_s: float) -> CaseOutcome:
    """What step records say, real ones or those of a replay."""
    decode = [record for record in records if record.kind == "decode"]
    read_s = sum(record.work.prefill_s for record in records)
    drafted, accepted = positions(decode)
    return CaseOutcome(
        case=case,
        tokens=sum(len(record.tokens) for record in decode),
        seconds=sum(record.total_s - record.work.prefill_s for record in decode) + read_s,
        plain_s=plain_s,
        target_calls=len(decode),
        draft_calls=sum(record.work.calls for record in decode),
        drafted=drafted,
        accepted=accepted,
        draft_s=sum(record.work.model_s for record in decode) + read_s,
        verify_s=sum(record.verify_s for record in decode),
    )


def positions(decode: Sequence[StepRecord]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens drafted and accepted by their place in the draft."""
    longest = max((len(record.draft) for record in decode), default=0)
    drafted = tuple(sum(len(record.draft) > i for record in decode) for i in range(longest))
    accepted = tuple(sum(record.num_accepted > i for record in decode) for i in range(longest))
    return drafted, accepted


def bounds_s(cases: Sequence[Scored], prices: Prices) -> Iterator[float]:
    """Of each case the least seconds that these drafters allowed, known afterwards."""
    for case in cases:
        free: list[Drafter] = [SuffixDrafter()]
        if case.constrain is not None:
            free.append(ForcedDrafter(case.constrain()))
        drafts = {} if prices.draft is None else {DRAFT: prices.draft}
        own_s = prices.own.step_s.get("plain", 0.0)
        yield hindsight_bound(case.recording, prices.target, drafts, free=free, own_s=own_s)


def policy_times(
    cases: Sequence[Scored], prices: Prices, settings: Mapping[str, Setting]
) -> dict[str, float]:
    """Seconds that the choosing and looking up of these settings take in a step: timed while replaying, where
    no model call is made."""
    found = {}
    for kind, setting in settings.items():
        per_step = []
        for case in cases[:_TIMED_CASES]:
            before = perf_counter()
            [outcome] = predict([case], setting, prices)
            per_step.append((perf_counter() - before) / max(outcome.target_calls, 1))
        found[kind] = median(per_step) if per_step else 0.0
    return found
