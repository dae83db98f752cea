"""One target with its answers, and what is found out about lookup and about each draft on them."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.check.report import DraftReport, LookupReport
from outrider.check.verdict import DraftNumbers, cannot_work, judge_draft, judge_lookup
from outrider.core.contracts import RewindKind
from outrider.costs import CallCosts
from outrider.lab.acceptance import acceptance_of
from outrider.lab.answers import Answer
from outrider.lab.expectation import Expectation, expect, with_policy_times
from outrider.lab.facts import ModelFacts, break_evens, calls_of, least_needed, tokenizers_of
from outrider.lab.predict import DRAFT
from outrider.lab.settings import AUTO, AUTO_LOOKUP, PLAIN
from outrider.lab.statistics import Interval
from outrider.lab.subject import LOOKUP, Subject, why_unusable
from outrider.models.vocab import Alignment
from outrider.policy.pretrained import PretrainedCalibration

_SHOWN_CALLS = 17


def judge_lookup_alone(subject: Subject) -> LookupReport:
    """What lookup makes of the answers."""
    found = expect(subject.answers, with_policy_times(subject.answers, subject.prices()))
    speedups = found.speedups(AUTO_LOOKUP)
    drafted, accepted = found.looked_up
    calls = subject.costs.calls_s(_SHOWN_CALLS, context=0).tolist()
    verdict = judge_lookup(speedups.auto, calls)
    return LookupReport(break_evens(subject.costs), drafted, accepted, speedups, verdict)


def unusable(
    subject: Subject, rewind: RewindKind, facts: ModelFacts, alignment: Alignment
) -> DraftReport | None:
    """The report of a draft that cannot work with this target; None for one that can. `rewind` is the
    draft's."""
    if (found := why_unusable(subject, rewind, alignment)) is None:
        return None
    tokenizers = tokenizers_of(alignment, subject.target.model.vocabulary, subject.answers)
    return DraftReport(facts, tokenizers, rewind, _bytes_ratio(subject, facts), cannot_work(*found))


def does_not_fit(
    subject: Subject, rewind: RewindKind, facts: ModelFacts, alignment: Alignment
) -> DraftReport:
    """The report of a draft whose context holds none of the answers with their prompts."""
    tokenizers = tokenizers_of(alignment, subject.target.model.vocabulary, subject.answers)
    why = "none of the prompts fits the draft's context"
    verdict = cannot_work(why, ("shorter prompts (--prompts FILE)", "a draft with a longer context", LOOKUP))
    return DraftReport(facts, tokenizers, rewind, _bytes_ratio(subject, facts), verdict)


def _bytes_ratio(subject: Subject, facts: ModelFacts) -> float:
    return facts.bytes_per_token / subject.facts.bytes_per_token


def judge(
    subject: Subject,
    rewind: RewindKind,
    facts: ModelFacts,
    alignment: Alignment,
    costs: CallCosts,
    answers: Sequence[Answer],
    prior: PretrainedCalibration | None = None,
) -> DraftReport:
    """What a draft makes of those answers that have its offers; `prior`: what its file says of them."""
    found = expect(answers, with_policy_times(answers, subject.prices(costs, prior)))
    acceptance = acceptance_of([answer.scored.recording for answer in answers], DRAFT)
    numbers = _numbers(subject, costs, found, acceptance.rate)
    return DraftReport(
        model=facts,
        tokenizers=tokenizers_of(alignment, subject.target.model.vocabulary, subject.answers),
        rewind=rewind,
        bytes_ratio=_bytes_ratio(subject, facts),
        verdict=judge_draft(numbers),
        calls=calls_of(costs),
        step_ratio=numbers.step,
        break_even=break_evens(subject.costs, costs),
        acceptance=acceptance,
        answers=len(answers),
        speedups=found.speedups(AUTO),
        over_plain=numbers.over_plain,
        over_lookup=numbers.over_lookup,
    )


def _numbers(subject: Subject, costs: CallCosts, found: Expectation, rate: Interval) -> DraftNumbers:
    return DraftNumbers(
        calls=[
            c / subject.costs.call_s(1, context=0) for c in subject.costs.calls_s(_SHOWN_CALLS, context=0)
        ],
        step=costs.call_s(1, context=0) / subject.costs.call_s(1, context=0),
        acceptance=rate,
        needed=least_needed(subject.costs, costs),
        lookup=found.over(AUTO_LOOKUP.name, PLAIN.name),
        over_plain=found.over(AUTO.name, PLAIN.name),
        over_lookup=found.over(AUTO.name, AUTO_LOOKUP.name),
    )
