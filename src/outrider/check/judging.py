"""One target with its answers, and what is found out about lookup and about each draft on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from outrider.bench.curves import draft_costs, own_times, target_costs
from outrider.bench.loaded import LoadedDraft, LoadedTarget
from outrider.bench.predict import DRAFT, OwnTimes, Prices
from outrider.bench.score import offers_of, probe_draft, score_case
from outrider.bench.settings import AUTO, AUTO_LOOKUP, PLAIN
from outrider.check.acceptance import acceptance_of
from outrider.check.answers import Answer
from outrider.check.expectation import Expectation, expect, with_policy_times
from outrider.check.facts import break_evens, calls_of, least_needed, tokenizers_of
from outrider.check.intervals import Interval
from outrider.check.report import DraftReport, LookupReport, ModelFacts
from outrider.check.verdict import DraftNumbers, cannot_work, judge_draft, judge_lookup
from outrider.core.contracts import RewindKind
from outrider.costs import CallCosts
from outrider.policy.prior import Prior
from outrider.vocab import Alignment

__all__ = ["Subject", "judge", "judge_lookup_alone", "offered", "probed", "why_unusable"]

_MIN_ANSWERS = 4
_PROBED_ANSWERS = 2
_SHOWN_CALLS = 17
_OTHER_FAMILY = "a draft of the target's own model family, whose tokenizer is the same"
_LOOKUP = "lookup, which needs no second model"


@dataclass(frozen=True, slots=True)
class Subject:
    """A target that was measured: what its calls cost, and its own answers (at least one)."""

    target: LoadedTarget
    facts: ModelFacts
    costs: CallCosts
    answers: tuple[Answer, ...]

    def corrected(self, answers: Sequence[Answer]) -> Subject:
        """With answers, and what their calls say about the costs."""
        rows = [answer.row for answer in answers]
        return replace(self, costs=target_costs(self.costs, rows), answers=tuple(answers))

    def prices(self, draft: CallCosts | None = None, prior: Prior | None = None) -> Prices:
        """What calls cost, and the engine's own time beside them; `prior`: the draft's."""
        plain_s, token_s = own_times([answer.row for answer in self.answers])
        return Prices(self.costs, draft, OwnTimes({"plain": plain_s}, token_s), prior)


def judge_lookup_alone(subject: Subject) -> LookupReport:
    """What lookup makes of the answers."""
    found = expect(subject.answers, with_policy_times(subject.answers, subject.prices()))
    speedups = found.speedups(AUTO_LOOKUP)
    drafted, accepted = found.looked_up
    calls = subject.costs.calls_s(_SHOWN_CALLS, context=0).tolist()
    verdict = judge_lookup(speedups.auto, calls)
    return LookupReport(break_evens(subject.costs), drafted, accepted, speedups, verdict)


def why_unusable(
    subject: Subject, rewind: RewindKind, facts: ModelFacts, alignment: Alignment
) -> DraftReport | None:
    """The report of a draft that cannot work with this target; None for one that can. `rewind` is the
    draft's."""
    tokenizers = tokenizers_of(alignment, subject.target.model.vocabulary, subject.answers)
    if subject.target.model.rewind == "none":
        why = "the target cannot take rejected drafts back (recurrent or hybrid state)"
        verdict = cannot_work(why, ("a target of another architecture, with attention alone",))
    elif tokenizers.why_not is not None:
        verdict = cannot_work(tokenizers.why_not, (_OTHER_FAMILY, _LOOKUP))
    elif rewind == "none":
        why = "the draft cannot forget tokens (recurrent or hybrid state), so rejected ones would stay"
        verdict = cannot_work(why, ("a draft of another architecture, with attention alone", _LOOKUP))
    else:
        return None
    return DraftReport(facts, tokenizers, rewind, _bytes_ratio(subject, facts), verdict)


def does_not_fit(
    subject: Subject, rewind: RewindKind, facts: ModelFacts, alignment: Alignment
) -> DraftReport:
    """The report of a draft whose context holds none of the answers with their prompts."""
    tokenizers = tokenizers_of(alignment, subject.target.model.vocabulary, subject.answers)
    why = "none of the prompts fits the draft's context"
    verdict = cannot_work(why, ("shorter prompts (--prompts FILE)", "a draft with a longer context", _LOOKUP))
    return DraftReport(facts, tokenizers, rewind, _bytes_ratio(subject, facts), verdict)


def _bytes_ratio(subject: Subject, facts: ModelFacts) -> float:
    return facts.bytes_per_token / subject.facts.bytes_per_token


def offered(
    subject: Subject,
    draft: LoadedDraft,
    *,
    seconds: float,
    clock: Callable[[], float] = perf_counter,
    progress: Callable[[float], None] = lambda _part: None,
) -> tuple[list[Answer], int]:
    """As many of the answers as the time allows (a few at least; none where none fits its context) with the
    draft model's offers, and how many did not fit. Raises BackendError when a call fails."""
    started = clock()
    found: list[Answer] = []
    skipped = 0
    for done, answer in enumerate(subject.answers):
        if clock() - started > seconds and len(found) >= _MIN_ANSWERS:
            break
        recording = answer.scored.recording
        if len(recording.prompt) + 2 * len(recording.tokens) > draft.model.context_length:
            skipped += 1
            continue
        offers = offers_of(score_case(subject.target, draft, answer.question.case, answer.row))
        recording = replace(recording, offers={DRAFT: offers})
        found.append(replace(answer, scored=replace(answer.scored, recording=recording)))
        progress((done + 1) / len(subject.answers))
    return found, skipped


def probed(subject: Subject, draft: LoadedDraft, costs: CallCosts, answers: Sequence[Answer]) -> CallCosts:
    """The draft model's costs, corrected by drafting for real behind the first of these answers' prompts.
    Raises BackendError when a call fails."""
    few = [(answer.question.case, answer.row) for answer in answers[:_PROBED_ANSWERS]]
    records = list(probe_draft(subject.target, draft, few))
    return draft_costs(costs, records, subject.costs)


def judge(
    subject: Subject,
    rewind: RewindKind,
    facts: ModelFacts,
    alignment: Alignment,
    costs: CallCosts,
    answers: Sequence[Answer],
    prior: Prior | None = None,
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
