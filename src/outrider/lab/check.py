"""A target, then one draft after the other: loaded, measured, judged on the target's own answers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, Literal

import numpy as np
from pydantic_core import to_jsonable_python

from outrider.backends.gguf.libraries import device_names
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.machine import physical_cores
from outrider.core.contracts import RewindKind, Vocabulary
from outrider.core.errors import BackendCrash, ModelFileError, OutOfMemory, SettingError
from outrider.core.notices import collect_notices, notify
from outrider.core.numbers import Interval
from outrider.costs import CallCosts
from outrider.costs.calibrate import DEFAULT_SECONDS
from outrider.costs.expected_speed import StepCosts
from outrider.lab.loaded import Loaded, LoadedTarget, Progress
from outrider.lab.models import ModelFacts, ModelFile
from outrider.lab.predict import DRAFT, Speedups, expect, with_policy_times
from outrider.lab.prompts import Workload
from outrider.lab.record import MAX_ANSWERS, Answer, questions_of
from outrider.lab.recording import Recording
from outrider.lab.settings import AUTO, AUTO_LOOKUP, AUTO_MODEL, PLAIN, Setting
from outrider.lab.statistics import share_of
from outrider.lab.subject import DraftOffers, Subject, offers_along, tokenizer_fault
from outrider.models.gguf import ModelKind
from outrider.models.tokenizers import check_tokenizers
from outrider.models.vocab import Alignment, AlignmentReport
from outrider.session.drafts import FoundFile, for_heads

SCHEMA = "outrider.check/1"

# From numbers to a verdict and to what else could be tried: nothing is measured or shown here.

Outcome = Literal["pays", "undecided", "does not pay", "cannot work"]

PAYS_FROM = 1.02
"""A gain below this is none: it is within what a busy machine makes of plain decoding."""

_EXPENSIVE_STEP = 0.2
"""A draft step that costs more, in target steps, leaves room for a smaller draft."""
_CHEAP_STEP = 0.1
_WORTH_SAYING = 1.1
_STEEP_CALLS = 2.2
"""Calls over 4 tokens that cost more, in calls of one, waste most of what drafts save."""
_POOR_ACCEPTANCE = 0.5
_LARGE_OUTPUT = 0.2
"""of the bytes that a draft step reads"""
_TRIMMED_PART = 0.75
"""of an output layer that a trim takes away, about"""

_LOOK_UP = "more to look up: `outrider run` takes --corpus FILES and --prediction FILE"
_BENCH = "`outrider bench` runs the candidates for real and tells"
_WANTED = f", where {PAYS_FROM:.2f}x pays"
_TELL_MORE = "a firmer answer: more of your own prompts (--prompts FILE), more time (--seconds)"


@dataclass(frozen=True, slots=True)
class DraftVerdict:
    """`sentence` says it, `advice` what else to try; `pays` is the outcome, an undecided one by its
    middle."""

    outcome: Outcome
    pays: bool
    sentence: str
    advice: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftNumbers:
    """What decides about a draft. `calls` are the costs of target calls over 1, 2, … tokens and `step` that
    of a draft step, in target steps; `needed` the least acceptance at which some draft length breaks even
    (None: at none). `lookup` is what lookup alone gives over plain decoding, `over_plain` and `over_lookup`
    what the automatic choice with the draft gives over either. `output_ratio`: the output layer's part of
    the bytes that a draft step reads."""

    calls: Sequence[float]
    step: float
    acceptance: Interval
    needed: float | None
    lookup: Interval
    over_plain: Interval
    over_lookup: Interval
    output_ratio: float = 0.0
    is_head: bool = False


def judge_lookup(speedup: Interval, calls: Sequence[float]) -> DraftVerdict:
    """Whether lookup alone pays; `calls` as in DraftNumbers."""
    outcome, number = _outcome(speedup), f"{as_text(speedup)} plain decoding"
    if outcome == "pays":
        return DraftVerdict(outcome, True, f"lookup alone pays: {number}")
    if outcome == "undecided":
        sentence = f"undecided: lookup alone gives {number}{_WANTED}"
        return DraftVerdict(
            outcome, speedup.value >= PAYS_FROM, sentence, (_TELL_MORE, _BENCH, *_flatter(calls))
        )
    sentence = f"lookup alone does not pay on these prompts: {number}"
    return DraftVerdict(outcome, False, sentence, (_LOOK_UP, *_flatter(calls)))


def judge_draft(numbers: DraftNumbers) -> DraftVerdict:
    """Whether the draft pays: over plain decoding and over lookup alone, which needs no draft."""
    gains = {"plain decoding": numbers.over_plain, "lookup alone": numbers.over_lookup}
    outcomes = {_outcome(gain) for gain in gains.values()}
    if outcomes == {"pays"}:
        sentence = f"pays: {', '.join(f'{as_text(gain)} {rival}' for rival, gain in gains.items())}"
        return DraftVerdict("pays", True, sentence, _cheaper(numbers))
    if "does not pay" not in outcomes:
        rival, gain = min(gains.items(), key=lambda item: item[1].value)
        sentence = f"undecided: the draft gives {as_text(gain)} {rival}{_WANTED}"
        advice = (_BENCH, _TELL_MORE, *_cheaper(numbers))
        return DraftVerdict("undecided", gain.value >= PAYS_FROM, sentence, advice)
    without = f"lookup alone gives {as_text(numbers.lookup)} on these prompts"
    if _outcome(numbers.lookup) == "does not pay":
        without = f"nor does lookup alone: {as_text(numbers.lookup)}"
    sentence = f"will not pay here: {_reason(numbers)}; {without}"
    return DraftVerdict("does not pay", False, sentence, _instead(numbers))


def cannot_work(why: str, advice: Sequence[str]) -> DraftVerdict:
    """A pair, or a target, that cannot speculate at all."""
    return DraftVerdict("cannot work", False, f"cannot work: {why}", tuple(advice))


def overall(
    lookup: DraftVerdict | None, drafts: Sequence[tuple[str, DraftVerdict, Interval | None]]
) -> tuple[str, bool]:
    """One sentence over all drafts (name, verdict, expected speed-up), and whether anything pays.

    Where none of the drafts can work the answer is no, even if lookup pays: the drafts were asked about.
    """
    said = [lookup.sentence] if lookup is not None else []
    pays = lookup is not None and lookup.pays
    able = [draft for draft in drafts if draft[1].outcome != "cannot work"]
    paying = [draft for draft in able if draft[1].pays and draft[2] is not None]
    if not drafts:
        return "".join(said) or "nothing can be drafted for this target", pays
    if paying:
        name, verdict, _ = max(paying, key=lambda draft: draft[2].value if draft[2] else 0.0)
        return (verdict.sentence if len(drafts) == 1 else f"best with {name}: {verdict.sentence}"), True
    if len(drafts) == 1 or len(able) == 1:
        name, verdict, _ = (able or drafts)[0]
        sentence = verdict.sentence if len(drafts) == 1 else f"{name}: {verdict.sentence}"
        # A draft that does not pay says by itself what lookup does.
        more = [] if verdict.outcome == "does not pay" else said
        return "; ".join([sentence, *more]), pays and bool(able)
    if not able:
        return "; ".join(["none of the drafts can work with this target", *said]), False
    is_open = any(verdict.outcome == "undecided" for _, verdict, _ in able)
    return "; ".join([f"none of the drafts {'is likely to pay' if is_open else 'pays'}", *said]), pays


def as_text(interval: Interval) -> str:
    """A speed-up for people: "1.20x (1.05 to 1.36)"; of a single answer no interval is known."""
    if not math.isfinite(interval.high):
        return f"{interval.value:.2f}x (one answer: it may be anything)"
    return f"{interval.value:.2f}x ({interval.low:.2f} to {interval.high:.2f})"


def _outcome(gain: Interval) -> Outcome:
    if gain.low >= PAYS_FROM:
        return "pays"
    return "does not pay" if gain.high < PAYS_FROM else "undecided"


def _reason(numbers: DraftNumbers) -> str:
    cost = f"a draft step costs {numbers.step:.2f} of a target step"
    right = f"{numbers.acceptance.value:.0%}"
    if numbers.needed is None:
        return f"{cost}, so that even drafts that are always right are slower"
    if numbers.acceptance.value < numbers.needed and right != f"{numbers.needed:.0%}":
        return f"{cost}, so {numbers.needed:.0%} of its tokens must be right, and {right} are"
    if _outcome(numbers.over_plain) != "does not pay":
        return f"{cost}, and it adds nothing to lookup"
    return f"{cost} and {right} of its tokens are right, which saves too little"


def _instead(numbers: DraftNumbers) -> tuple[str, ...]:
    found = [*_cheaper(numbers)]
    if numbers.step <= _EXPENSIVE_STEP and numbers.acceptance.value < _POOR_ACCEPTANCE:
        found.append(
            "a draft that is closer to the target: of its own family and tuning, larger or less quantized"
        )
    alone = f"lookup alone ({'--no-mtp' if numbers.is_head else 'leave the draft out'})"
    return (*found, alone if _outcome(numbers.lookup) != "does not pay" else _LOOK_UP)


def _cheaper(numbers: DraftNumbers) -> tuple[str, ...]:
    right = numbers.acceptance.value

    def reach(step: float) -> float:
        return max(1.0, StepCosts(numbers.calls, step).best_speedup(right))

    now, cheap = reach(numbers.step), reach(_CHEAP_STEP)
    found = []
    if numbers.step > _EXPENSIVE_STEP and cheap > _WORTH_SAYING * now:
        found.append(
            f"a smaller draft: one whose step costs {_CHEAP_STEP} of the target's could reach {cheap:.1f}x "
            f"if it were right as often ({right:.0%})"
        )
    if numbers.output_ratio > _LARGE_OUTPUT:
        step = numbers.step * (1 - _TRIMMED_PART * numbers.output_ratio)
        found.append(
            f"`outrider trim`: {numbers.output_ratio:.0%} of what a draft step reads is the output layer; "
            f"with fewer tokens it costs about {step:.2f} of the target's, which could reach "
            f"{reach(step):.2f}x by the draft alone, not {now:.2f}x"
        )
    return (*found, *_flatter(numbers.calls))


def _flatter(calls: Sequence[float]) -> tuple[str, ...]:
    if len(calls) < 4 or calls[3] <= _STEEP_CALLS * calls[0]:
        return ()
    return (
        f"another quantization of the target: its calls over 4 tokens cost {calls[3] / calls[0]:.1f} steps; "
        "IQ4_NL, Q4_0 and (of small models) BF16 files are often flatter (`outrider quantize` makes them)",
    )


# What decides about it, on recorded answers

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


def _calls_of(costs: CallCosts) -> Calls:
    calls_s = costs.calls_s(max(_SIZES), context=0)
    return Calls(float(calls_s[0]), {n: float(calls_s[n - 1] / calls_s[0]) for n in _SIZES})


def _break_even(costs: CallCosts, draft: CallCosts | None = None) -> dict[int, float | None]:
    """By draft length the acceptance from which drafts, looked-up ones or a draft model's, are no slower than
    plain decoding; None: never."""
    step = StepCosts.of(costs, draft)
    return {n: step.break_even(n) for n in _DRAFTED}


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
    break_even: Mapping[int, float | None] = field(default_factory=dict)
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
        calls=_calls_of(draft.costs),
        step_ratio=numbers.step,
        break_even=_break_even(subject.costs, draft.costs),
        acceptance=acceptance,
        answers=len(draft.answers),
        speedups=found.speedups(AUTO),
        over_plain=numbers.over_plain,
        over_lookup=numbers.over_lookup,
        alone=found.over(AUTO_MODEL.name, PLAIN.name),
    )


# A whole check


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """What is to be checked: files, prompts, and `seconds` for the target's answers and again for each draft.
    `context_length` None is the usual one, 0 what the target was trained with."""

    target: ModelFile
    drafts: tuple[ModelFile, ...]
    workloads: tuple[Workload, ...]
    seconds: float = 45.0
    max_answers: int = MAX_ANSWERS
    context_length: int | None = None
    options: LoadOptions = field(default_factory=LoadOptions)
    draft_options: LoadOptions | None = None
    found: tuple[FoundFile, ...] | None = None
    """what a search for drafts came to, where none was named: of those one that cannot be loaded is passed
    over"""

    @property
    def costs_s(self) -> float:
        """The time for a model's cost curve, where none is known."""
        return min(DEFAULT_SECONDS, self.seconds / 4)

    def __post_init__(self) -> None:
        if not 1 <= self.seconds <= 3600:
            reason = "not a time to measure for"
            raise SettingError(f"--seconds {self.seconds:g}", reason, "Give 1 to 3600.")


@dataclass(frozen=True, slots=True)
class Sample:
    """The recorded answers: how many of each workload, and how fast plain decoding made them."""

    answers: int
    tokens: int
    workloads: Mapping[str, int]
    plain_tokens_per_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class LookupReport:
    """Lookup alone. `drafted` tokens were looked up by the automatic choice, `accepted` of them were
    right."""

    break_even: Mapping[int, float | None]
    drafted: int
    accepted: int
    speedups: Speedups
    verdict: DraftVerdict


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a check found, in seconds, bytes and tokens; ratios are of target steps or of plain
    decoding. `pays` is the exit status as a question."""

    machine: str
    target: ModelFacts
    rewind: RewindKind
    calls: Calls
    sample: Sample | None
    lookup: LookupReport | None
    drafts: tuple[DraftReport, ...]
    verdict: str
    pays: bool
    notices: tuple[str, ...]
    seconds: float
    backend: str = ""
    """the native library that all of it was measured with"""
    found: tuple[FoundFile, ...] = ()
    """what could draft, where no draft was named"""

    def as_json(self) -> dict[str, Any]:
        """Plain data, for JSON: an unknown end of an interval is None."""
        return {"schema": SCHEMA, **to_jsonable_python(self, inf_nan_mode="null")}


def check(request: CheckRequest, progress: Progress = lambda _what, _part: None) -> Report:
    """Judge lookup and every draft on the target's own answers.

    Costs of calls are taken from earlier measurements on this machine where there are any. A draft whose
    tokenizer cuts text otherwise, or a target that cannot rewind, is a verdict. Raises VocabularyMismatch for
    a draft that was named and has other tokens, ModelFileError, PromptError, OutOfMemory or BackendError.
    """
    started = perf_counter()
    for file in [file for file in request.drafts if request.found is None and not file.is_head]:
        check_tokenizers(request.target.card, file.card)
    heads = [file.card for file in request.drafts if file.is_head and file.path != request.target.path]
    with collect_notices() as notices:
        if heads and request.found is None:  # those that were found may be passed over
            request = replace(request, options=for_heads(request.options, heads[0]))
        with Loaded(request.target, request.options, progress) as target:
            subject, sample = _measured(request, target, progress)
            lookup: LookupReport | None = None
            if sample is not None:
                progress("replaying lookup", None)
                lookup = judge_lookup_alone(subject)
            drafts = _judged(request, subject, progress)
            library = target.weights.library
    verdicts = [(d.model.name, d.verdict, d.speedups.auto if d.speedups else None) for d in drafts]
    sentence, pays = overall(lookup.verdict if lookup else None, verdicts)
    return Report(
        machine=f"{', '.join(device_names())}, {physical_cores()} cores",
        target=subject.facts,
        rewind=subject.target.model.rewinding.kind,
        calls=_calls_of(subject.costs),
        sample=sample,
        lookup=lookup,
        drafts=drafts,
        verdict=f"{sentence} (measured with {library.title})",
        pays=pays,
        notices=tuple(notices),
        seconds=perf_counter() - started,
        backend=library.backend,
        found=request.found or (),
    )


def _measured(request: CheckRequest, loaded: Loaded, progress: Progress) -> tuple[Subject, Sample | None]:
    target = LoadedTarget(request.target.name, loaded.open(request.context_length), loaded.template)
    questions = questions_of(request.workloads, target)
    subject = Subject(target, loaded.facts(), loaded.costs("all", request.costs_s))
    if not target.model.rewinding.is_possible:
        return subject, None
    started = perf_counter()
    report = partial(progress, "the target answers")
    subject = subject.answering(questions, seconds=request.seconds, most=request.max_answers, progress=report)
    tokens = sum(len(answer.row.tokens) for answer in subject.answers)
    sample = Sample(
        answers=len(subject.answers),
        tokens=tokens,
        workloads=dict(Counter(answer.row.workload for answer in subject.answers)),
        plain_tokens_per_s=tokens / sum(answer.row.decode_s for answer in subject.answers),
        seconds=perf_counter() - started,
    )
    return replace(subject, facts=loaded.facts()), sample


def _judged(request: CheckRequest, subject: Subject, progress: Progress) -> tuple[DraftReport, ...]:
    """Every draft on the target's answers. Raises ModelFileError, OutOfMemory or BackendError."""
    found: list[DraftReport] = []
    costs: dict[object, CallCosts | None] = {}
    """by shape and types: what differs in its weights alone costs the same"""
    for file in request.drafts:
        begun, card = perf_counter(), file.card
        alike = card.architecture, card.block_count, card.quantization, card.bytes_per_token, card.kind
        try:
            offers = offers_along(
                subject,
                file,
                request.draft_options or request.options,
                progress,
                seconds=request.seconds,
                costs_s=request.costs_s,
                known=costs.get(alike),
            )
        except (BackendCrash, ModelFileError, OutOfMemory) as error:
            if request.found is None:
                raise
            notify(f"{file.name} is skipped: {error.why}")
            continue
        costs[alike] = offers.costs
        progress(f"replaying {file.name}", None)
        found.append(replace(judge(subject, offers), seconds=perf_counter() - begun))
    return tuple(found)


def judge_lookup_alone(subject: Subject) -> LookupReport:
    """What lookup makes of the answers."""
    prices = with_policy_times([answer.recording for answer in subject.answers], subject.prices())
    found = expect(subject.answers, prices)
    speedups = found.speedups(AUTO_LOOKUP)
    drafted, accepted = found.looked_up
    calls = subject.costs.calls_s(SHOWN_CALLS, context=0).tolist()
    verdict = judge_lookup(speedups.auto, calls)
    return LookupReport(_break_even(subject.costs), drafted, accepted, speedups, verdict)
