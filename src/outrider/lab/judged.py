"""What a draft makes of a target's answers: numbers and a verdict, or why it cannot work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from outrider.core.contracts import RewindKind, Vocabulary
from outrider.core.numbers import Interval
from outrider.costs import CallCosts
from outrider.costs.expected_speed import StepCosts
from outrider.lab.models import ModelFacts
from outrider.lab.predict import DRAFT, Speedups, expect, with_policy_times
from outrider.lab.record import Answer
from outrider.lab.recording import Recording
from outrider.lab.settings import AUTO, AUTO_LOOKUP, AUTO_MODEL, PLAIN, Setting
from outrider.lab.statistics import share_of
from outrider.lab.subject import DraftOffers, Subject, tokenizer_fault
from outrider.lab.verdict import DraftNumbers, DraftVerdict, cannot_work, judge_draft
from outrider.models.gguf import ModelKind
from outrider.models.vocab import Alignment, AlignmentReport

_SIZES = (1, 2, 4, 8, 16)
_DRAFTED = (1, 3, 8)
POSITIONS = 8
"""Places of a draft that are counted separately."""
SHOWN_CALLS = 17


@dataclass(frozen=True, slots=True)
class Calls:
    """What calls cost: `call_s` over one token, `ratios` by number of tokens against that."""

    call_s: float
    ratios: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class BreakEven:
    """The acceptance from which drafts of this length are no slower than plain decoding; None: never."""

    drafted_tokens: int
    acceptance: float | None


def calls_of(costs: CallCosts) -> Calls:
    """What calls over a few tokens cost at an empty context."""
    calls_s = costs.calls_s(max(_SIZES), context=0)
    return Calls(float(calls_s[0]), {n: float(calls_s[n - 1] / calls_s[0]) for n in _SIZES})


def break_evens(costs: CallCosts, draft: CallCosts | None = None) -> tuple[BreakEven, ...]:
    """By draft length, the acceptance from which drafts pay: looked-up ones, or a draft model's."""
    step = StepCosts.of(costs, draft)
    return tuple(BreakEven(n, step.break_even(n)) for n in _DRAFTED)


@dataclass(frozen=True, slots=True)
class Tokenizers:
    """How two vocabularies line up; `why_not`: why the draft cannot work with the target. The draft cannot
    offer `lost_tokens` of the target's text tokens, which are `lost_ratio` of those in the recorded answers.
    """

    report: AlignmentReport
    identical: bool
    lost_tokens: int
    lost_ratio: float | None
    why_not: str | None


def tokenizers_of(alignment: Alignment, target: Vocabulary, answers: Sequence[Answer]) -> Tokenizers:
    """How a pair lines up, and how much of these answers the draft cannot offer."""
    missing = np.flatnonzero(alignment.to_draft < 0).tolist()
    lost = {token for token in missing if not target.is_control(token)}
    tokens = [token for answer in answers for token in answer.row.tokens]
    ratio = sum(token in lost for token in tokens) / len(tokens) if tokens else None
    why_not = tokenizer_fault(alignment.report)
    return Tokenizers(alignment.report, alignment.identical, len(lost), ratio, why_not)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How often the draft's most likely token is the answer's: over all positions, and at the first,
    second, … place of a draft, those before it being right (None: never met). A head is less often right at
    later places, which it reads with states of its own."""

    rate: Interval
    positions: int
    by_position: tuple[float | None, ...]


def acceptance_of(recordings: Sequence[Recording], name: str) -> Acceptance:
    """The acceptance of the draft model's offers on at least one answer that is not empty."""
    runs = [recording.offers[name].num_right(recording.tokens) for recording in recordings]
    met, right = np.zeros(POSITIONS, dtype=int), np.zeros(POSITIONS, dtype=int)
    for answer in runs:
        for start, accepted in enumerate(answer):
            right[:accepted] += 1
            met[: min(accepted + 1, len(answer) - start)] += 1
    return Acceptance(
        rate=share_of([sum(map(bool, answer)) for answer in runs], list(map(len, runs))),
        positions=sum(map(len, runs)),
        by_position=tuple(float(r / m) if m else None for r, m in zip(right, met, strict=True)),
    )


@dataclass(frozen=True, slots=True)
class DraftReport:
    """One draft model, or a head. What could not be found out, since the pair cannot work, is None.

    `bytes_ratio` and `step_ratio` are a draft step's bytes and time against the target's; `over_plain` and
    `over_lookup` what the automatic choice gains with the draft over doing without it, `alone` what it does
    over plain decoding with the draft but without lookup.
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
    alone: Interval | None = None
    seconds: float = 0.0
    kind: ModelKind = "model"


def judge(subject: Subject, draft: DraftOffers, settings: Sequence[Setting] | None = None) -> DraftReport:
    """What a draft is good for, or why it cannot work with this target: settings (None: all) replayed over
    those answers that have its offers, plain decoding and the automatic choices among them."""
    report = DraftReport(
        model=draft.facts,
        tokenizers=tokenizers_of(draft.alignment, subject.target.model.vocabulary, subject.answers),
        rewind=draft.rewind,
        bytes_ratio=draft.facts.bytes_per_token / subject.facts.bytes_per_token,
        verdict=cannot_work(*(draft.refusal or ("", ()))),
        kind=draft.kind,
    )
    if draft.refusal is not None or draft.costs is None:
        return report
    prices = subject.prices(draft.costs, draft.prior)
    found = expect(draft.answers, with_policy_times([a.recording for a in draft.answers], prices), settings)
    acceptance = acceptance_of([answer.recording for answer in draft.answers], DRAFT)
    call_s = subject.costs.call_s(1, context=0)
    needed = StepCosts.of(subject.costs, draft.costs).least_needed()
    numbers = DraftNumbers(
        calls=[call / call_s for call in subject.costs.calls_s(SHOWN_CALLS, context=0)],
        step=draft.costs.call_s(1, context=0) / call_s,
        acceptance=acceptance.rate,
        needed=needed and needed[0],
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
        alone=found.over(AUTO_MODEL.name, PLAIN.name),
    )
