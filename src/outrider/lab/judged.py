"""What a draft makes of a target's answers: numbers and a verdict, or why it cannot work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.core.contracts import RewindKind
from outrider.costs.break_even import least_needed
from outrider.lab.facts import (
    Acceptance,
    BreakEven,
    Calls,
    Tokenizers,
    acceptance_of,
    break_evens,
    calls_of,
    tokenizers_of,
)
from outrider.lab.models import ModelFacts
from outrider.lab.predict import DRAFT, Expectation, Speedups, expect, with_policy_times
from outrider.lab.settings import AUTO, AUTO_LOOKUP, PLAIN, Setting
from outrider.lab.statistics import Interval
from outrider.lab.subject import DraftOffers, Subject
from outrider.lab.verdict import DraftNumbers, DraftVerdict, cannot_work, judge_draft
from outrider.models.gguf import ModelKind

SHOWN_CALLS = 17


@dataclass(frozen=True, slots=True)
class DraftReport:
    """One draft model, or a head. What could not be found out, since the pair cannot work, is None.

    `bytes_ratio` and `step_ratio` are a draft step's bytes and time against the target's; `over_plain` and
    `over_lookup` what the automatic choice gains with the draft over doing without it.
    """

    model: ModelFacts
    tokenizers: Tokenizers
    rewind: RewindKind
    bytes_ratio: float
    verdict: DraftVerdict
    calls: Calls | None = None
    step_ratio: float | None = None
    break_even: tuple[BreakEven, ...] = ()
    acceptance: Acceptance | None = None
    answers: int = 0
    speedups: Speedups | None = None
    over_plain: Interval | None = None
    over_lookup: Interval | None = None
    seconds: float = 0.0
    kind: ModelKind = "model"


def replayed(
    subject: Subject, draft: DraftOffers, settings: Sequence[Setting] | None = None
) -> Expectation | None:
    """What settings (None: all) make of those answers that have a draft's offers; None where it cannot work
    with this target."""
    if draft.refusal is not None or draft.costs is None:
        return None
    prices = subject.prices(draft.costs, draft.prior)
    recordings = [answer.recording for answer in draft.answers]
    return expect(draft.answers, with_policy_times(recordings, prices), settings)


def judge(subject: Subject, draft: DraftOffers, found: Expectation | None) -> DraftReport:
    """What a draft is good for, or why it cannot work with this target. `found` is what was `replayed`:
    plain decoding, auto and auto lookup among others."""
    report = DraftReport(
        model=draft.facts,
        tokenizers=tokenizers_of(draft.alignment, subject.target.model.vocabulary, subject.answers),
        rewind=draft.rewind,
        bytes_ratio=draft.facts.bytes_per_token / subject.facts.bytes_per_token,
        verdict=cannot_work(*(draft.refusal or ("", ()))),
        kind=draft.kind,
    )
    if found is None or draft.costs is None:
        return report
    acceptance = acceptance_of([answer.recording for answer in draft.answers], DRAFT)
    call_s = subject.costs.call_s(1, context=0)
    numbers = DraftNumbers(
        calls=[call / call_s for call in subject.costs.calls_s(SHOWN_CALLS, context=0)],
        step=draft.costs.call_s(1, context=0) / call_s,
        acceptance=acceptance.rate,
        needed=least_needed(subject.costs, draft.costs),
        lookup=found.over(AUTO_LOOKUP.name, PLAIN.name),
        over_plain=found.over(AUTO.name, PLAIN.name),
        over_lookup=found.over(AUTO.name, AUTO_LOOKUP.name),
        output_ratio=draft.output_ratio,
        is_head=draft.kind != "model",
    )
    return replace(
        report,
        verdict=judge_draft(numbers),
        calls=calls_of(draft.costs),
        step_ratio=numbers.step,
        break_even=break_evens(subject.costs, draft.costs),
        acceptance=acceptance,
        answers=len(draft.answers),
        speedups=found.speedups(AUTO),
        over_plain=numbers.over_plain,
        over_lookup=numbers.over_lookup,
    )
