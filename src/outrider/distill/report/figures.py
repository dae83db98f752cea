"""What ways to draft make of recorded answers: replayed at measured costs, over all and by category."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from outrider.costs import CallCosts
from outrider.distill.report.schema import Category, Contender, Figure, Kind
from outrider.lab.acceptance import acceptance_of
from outrider.lab.answers import Answer
from outrider.lab.expectation import BOUND, Expectation, expect, with_policy_times
from outrider.lab.intervals import share_of, speedup_of
from outrider.lab.predict import DRAFT, OwnTimes, Prices
from outrider.lab.settings import AUTO, AUTO_LOOKUP, AUTO_MODEL, PLAIN, Setting
from outrider.lab.subject import Subject

__all__ = ["own_times", "with_draft", "without_draft"]

_THREE = Setting("model", 3)
_ALONE = (PLAIN, AUTO_LOOKUP)
_BESIDE = (PLAIN, AUTO_LOOKUP, AUTO_MODEL, AUTO, _THREE)


def without_draft(subject: Subject, answers: Sequence[Answer]) -> list[Contender]:
    """Plain decoding, and lookup alone."""
    found = expect(answers, with_policy_times(answers, subject.prices()), _ALONE)
    plain = Contender(
        kind="none",
        answers=len(answers),
        tokens_per_s=_speed(answers, found, PLAIN),
        over_plain=Figure.of(found.over(PLAIN.name, PLAIN.name)),
    )
    lookup = Contender(
        kind="lookup",
        answers=len(answers),
        tokens_per_s=_speed(answers, found, AUTO_LOOKUP),
        over_plain=Figure.of(found.over(AUTO_LOOKUP.name, PLAIN.name)),
        bound=Figure.of(found.over(BOUND, PLAIN.name)),
        of_bound=_of_bound(found, AUTO_LOOKUP),
        categories=_categories(answers, found, AUTO_LOOKUP, None),
    )
    return [plain, lookup]


def own_times(subject: Subject, costs: CallCosts, answers: Sequence[Answer]) -> OwnTimes:
    """What choosing among a draft and lookup takes in a step. Timed once: drafts are compared by what they
    say and cost, not by how busy the machine was."""
    return with_policy_times(answers, subject.prices(costs)).own


def with_draft(kind: Kind, file: Path, prices: Prices, answers: Sequence[Answer]) -> Contender:
    """A draft model, whose offers the answers hold, beside lookup; `prices` with the time that `own_times`
    found."""
    assert prices.draft is not None
    found = expect(answers, prices, _BESIDE)
    agreement = acceptance_of([answer.scored.recording for answer in answers], DRAFT)
    return Contender(
        kind=kind,
        file=str(file),
        answers=len(answers),
        tokens_per_s=_speed(answers, found, AUTO),
        over_plain=Figure.of(found.over(AUTO.name, PLAIN.name)),
        over_lookup=Figure.of(found.over(AUTO.name, AUTO_LOOKUP.name)),
        bound=Figure.of(found.over(BOUND, PLAIN.name)),
        of_bound=_of_bound(found, AUTO),
        step_ratio=prices.draft.call_s(1, context=0) / prices.target.call_s(1, context=0),
        agreement=Figure.of(agreement.rate),
        agreement_by_position=list(agreement.by_position),
        accepted_of_three=_accepted(found, _THREE),
        accepted_by_choice=_accepted(found, AUTO_MODEL),
        categories=_categories(answers, found, AUTO, _agreement),
    )


def _speed(answers: Sequence[Answer], found: Expectation, setting: Setting) -> float:
    return sum(len(answer.row.tokens) for answer in answers) / sum(found.seconds[setting.name])


def _of_bound(found: Expectation, setting: Setting) -> Figure:
    """Both at the same costs, whose errors are in both."""
    return Figure.of(speedup_of(found.seconds[BOUND], found.seconds[setting.name]))


def _accepted(found: Expectation, setting: Setting) -> Figure | None:
    counts = found.counts[setting.name]
    if not sum(drafted for drafted, _ in counts):
        return None
    return Figure.of(share_of([right for _, right in counts], [drafted for drafted, _ in counts]))


def _agreement(answers: Sequence[Answer]) -> Figure:
    return Figure.of(acceptance_of([answer.scored.recording for answer in answers], DRAFT).rate)


def _categories(
    answers: Sequence[Answer],
    found: Expectation,
    setting: Setting,
    agreement: Callable[[Sequence[Answer]], Figure] | None,
) -> list[Category]:
    names = [answer.row.workload for answer in answers]
    rows = []
    for name in sorted(set(names)):
        mine = [i for i, other in enumerate(names) if other == name]
        part = found.of(mine)
        rows.append(
            Category(
                category=name,
                answers=len(mine),
                agreement=agreement([answers[i] for i in mine]) if agreement else None,
                over_plain=Figure.of(part.over(setting.name, PLAIN.name)),
                over_lookup=Figure.of(part.over(setting.name, AUTO_LOOKUP.name)) if agreement else None,
            )
        )
    return rows
