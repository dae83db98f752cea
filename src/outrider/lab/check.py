"""Would a draft pay? A small sweep in memory: the target answers for some seconds, and what the automatic
choice would have made of its answers with each draft, and without one, is replayed at measured costs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Literal

from pydantic_core import to_jsonable_python

from outrider.backends.gguf.libraries import device_names
from outrider.backends.gguf.model import GgufModel
from outrider.backends.machine import physical_cores
from outrider.core.contracts import RewindKind
from outrider.core.errors import BackendCrash, ModelFileError, OutOfMemory
from outrider.core.notices import collect_notices, notify
from outrider.core.numbers import Interval
from outrider.costs.calibrate import DEFAULT_SECONDS
from outrider.costs.expected_speed import StepCosts
from outrider.lab.loaded import Loader
from outrider.lab.models import ModelFacts, ModelFile
from outrider.lab.prompts import Workload
from outrider.lab.record import MAX_ANSWERS, questions_of, record_answers
from outrider.lab.recording import Recording
from outrider.lab.replay import DRAFT, expect
from outrider.lab.rows import AnswerRow, PairRow, Row
from outrider.lab.settings import AUTO, AUTO_LOOKUP, AUTO_MODEL, PLAIN
from outrider.lab.subject import Subject
from outrider.models.finding import FoundFile, check_tokenizers
from outrider.models.gguf import ModelKind
from outrider.session.loading import for_heads
from outrider.session.options import Progress, no_progress

SCHEMA = "outrider.check/1"
SHOWN_CALLS = 17
SIZES = (1, 2, 4, 8, 16)
"""of calls whose times are reported"""

# From numbers to a verdict and to what else could be tried

Outcome = Literal["pays", "undecided", "does not pay", "cannot work"]

PAYS_FROM = 1.02
"""A gain below this is none: it is within what a busy machine makes of plain decoding."""

_EXPENSIVE_STEP = 0.2
"""A draft step that costs more, in target steps, leaves room for a smaller draft."""
_STEEP_CALLS = 2.2
"""Calls over 4 tokens that cost more, in calls of one, waste most of what drafts save."""
_POOR_ACCEPTANCE = 0.5
_LARGE_OUTPUT = 0.2
"""of the bytes that a draft step reads"""

_LOOK_UP = "more to look up: `outrider run` takes --corpus FILES and --prediction FILE"
_TELL_MORE = (
    "`outrider bench` runs the candidates for real and tells",
    "a firmer answer: more of your own prompts (--prompts FILE), more time (--seconds)",
)
_OTHERS = (
    "another draft: of the target's own model family, with attention alone",
    "lookup, which needs no second model",
)
_NO_REWIND = "the target cannot take rejected drafts back (recurrent or hybrid state)"
_TOO_LONG = "none of the answers fits the draft's context"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`advice`: what else to try; `pays`: the outcome, an undecided one by its middle."""

    outcome: Outcome
    pays: bool
    sentence: str
    advice: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LookupReport:
    """Lookup alone: tokens looked up by the automatic choice, those that were right, and the gain."""

    drafted: int
    accepted: int
    over_plain: Interval
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class DraftReport:
    """One draft model, or a head. What could not be found out, since the pair cannot work, is None.

    Args:
        pair: How its tokenizer lines up.
        bytes_ratio: Of a token's weights, those that it reads against the target's; `output_ratio` is the
            output layer's part of the former.
        step_s: Of one of its calls; `step_ratio` in target steps.
        agreement: How often its most likely token is the target's, over so many `positions`.
        needed: The least acceptance at which some draft length breaks even; None: at none.
        answers: So many it was replayed on.
        over_plain: What the automatic choice gains with it over plain decoding, `over_lookup` over lookup
            alone; `lookup` is what that gains over plain decoding, `alone` the draft without lookup.
    """

    model: ModelFacts
    kind: ModelKind
    pair: PairRow | None
    bytes_ratio: float
    output_ratio: float
    verdict: Verdict
    step_s: float | None = None
    step_ratio: float | None = None
    agreement: float | None = None
    positions: int = 0
    needed: float | None = None
    answers: int = 0
    over_plain: Interval | None = None
    over_lookup: Interval | None = None
    lookup: Interval | None = None
    alone: Interval | None = None


def as_text(interval: Interval) -> str:
    """A speed-up for people: "1.20x (1.05 to 1.36)"; of a single answer no interval is known."""
    if not math.isfinite(interval.high):
        return f"{interval.value:.2f}x (one answer: it may be anything)"
    return f"{interval.value:.2f}x ({interval.low:.2f} to {interval.high:.2f})"


def outcome_of(gain: Interval) -> Outcome:
    """What a gain alone amounts to."""
    if gain.low >= PAYS_FROM:
        return "pays"
    return "does not pay" if gain.high < PAYS_FROM else "undecided"


def cannot_work(why: str) -> Verdict:
    """Of a pair, or a target, that cannot speculate at all."""
    return Verdict("cannot work", False, f"cannot work: {why}", _OTHERS)


def judge_lookup(gain: Interval, calls_s: Sequence[float]) -> Verdict:
    """Whether lookup alone pays; `calls_s` are the times of target calls over 1, 2, … tokens."""
    outcome, number = outcome_of(gain), f"{as_text(gain)} plain decoding"
    if outcome == "pays":
        return Verdict(outcome, True, f"lookup alone pays: {number}")
    if outcome == "undecided":
        sentence = f"undecided: lookup alone gives {number}, where {PAYS_FROM:.2f}x pays"
        return Verdict(outcome, gain.value >= PAYS_FROM, sentence, (*_TELL_MORE, *_flatter(calls_s)))
    sentence = f"lookup alone does not pay on these prompts: {number}"
    return Verdict(outcome, False, sentence, (_LOOK_UP, *_flatter(calls_s)))


def judge_draft(draft: DraftReport, calls_s: Sequence[float]) -> Verdict:
    """Whether a draft pays: over plain decoding and over lookup alone, which needs no draft."""
    assert draft.over_plain is not None and draft.over_lookup is not None and draft.lookup is not None
    gains = {"plain decoding": draft.over_plain, "lookup alone": draft.over_lookup}
    outcomes = {outcome_of(gain) for gain in gains.values()}
    if outcomes == {"pays"}:
        sentence = f"pays: {', '.join(f'{as_text(gain)} {rival}' for rival, gain in gains.items())}"
        return Verdict("pays", True, sentence, _cheaper(draft, calls_s))
    if "does not pay" not in outcomes:
        rival, gain = min(gains.items(), key=lambda item: item[1].value)
        sentence = f"undecided: the draft gives {as_text(gain)} {rival}, where {PAYS_FROM:.2f}x pays"
        advice = (*_TELL_MORE, *_cheaper(draft, calls_s))
        return Verdict("undecided", gain.value >= PAYS_FROM, sentence, advice)
    lookup_pays = outcome_of(draft.lookup) != "does not pay"
    without = f"{'lookup alone gives' if lookup_pays else 'nor does lookup alone:'} {as_text(draft.lookup)}"
    instead = f"lookup alone ({'leave the draft out' if draft.kind == 'model' else '--no-mtp'})"
    advice = (*_cheaper(draft, calls_s), instead if lookup_pays else _LOOK_UP)
    return Verdict("does not pay", False, f"will not pay here: {_reason(draft)}; {without}", advice)


def _reason(draft: DraftReport) -> str:
    assert draft.agreement is not None and draft.over_plain is not None
    cost = f"a draft step costs {draft.step_ratio:.2f} of a target step"
    right = f"{draft.agreement:.0%}"
    if draft.needed is None:
        return f"{cost}, so that even drafts that are always right are slower"
    if draft.agreement < draft.needed and right != f"{draft.needed:.0%}":
        return f"{cost}, so {draft.needed:.0%} of its tokens must be right, and {right} are"
    if outcome_of(draft.over_plain) != "does not pay":
        return f"{cost}, and it adds nothing to lookup"
    return f"{cost} and {right} of its tokens are right, which saves too little"


def _cheaper(draft: DraftReport, calls_s: Sequence[float]) -> tuple[str, ...]:
    assert draft.agreement is not None and draft.step_ratio is not None
    found = []
    if draft.output_ratio > _LARGE_OUTPUT:
        found.append(f"`outrider trim`: {draft.output_ratio:.0%} of what a step reads is the output layer")
    if draft.step_ratio > _EXPENSIVE_STEP:
        found.append("a smaller draft")
    elif draft.agreement < _POOR_ACCEPTANCE:
        found.append("a draft closer to the target: of its own family and tuning, larger or less quantized")
    return (*found, *_flatter(calls_s))


def _flatter(calls_s: Sequence[float]) -> tuple[str, ...]:
    if len(calls_s) < 4 or calls_s[3] <= _STEEP_CALLS * calls_s[0]:
        return ()
    return (
        f"another quantization of the target: its calls over 4 tokens cost {calls_s[3] / calls_s[0]:.1f} "
        "steps; IQ4_NL, Q4_0 and (of small models) BF16 files are often flatter (`outrider quantize` makes "
        "them)",
    )


def overall(lookup: LookupReport | None, drafts: Sequence[DraftReport]) -> tuple[str, bool]:
    """One sentence over all drafts, and whether anything pays.

    Where none of the drafts can work the answer is no, even if lookup pays: the drafts were asked about.
    """
    said = [lookup.verdict.sentence] if lookup is not None else []
    pays = lookup is not None and lookup.verdict.pays
    able = [draft for draft in drafts if draft.verdict.outcome != "cannot work"]
    paying = [draft for draft in able if draft.verdict.pays]
    if not drafts:
        return "".join(said) or f"nothing can be drafted for this target: {_NO_REWIND}", pays
    if paying:
        best = max(paying, key=lambda draft: draft.over_plain.value if draft.over_plain else 0.0)
        sentence = best.verdict.sentence
        return sentence if len(drafts) == 1 else f"best with {best.model.name}: {sentence}", True
    if len(drafts) == 1:
        said.insert(0, drafts[0].verdict.sentence)
    elif able:
        is_open = any(draft.verdict.outcome == "undecided" for draft in able)
        said.insert(0, f"none of the drafts {'is likely to pay' if is_open else 'pays'}")
    else:
        said.insert(0, "none of the drafts can work with this target")
    return "; ".join(said), pays and bool(able)


# What decides about it, on recorded answers


def agreement_of(recordings: Sequence[Recording]) -> tuple[float, int]:
    """How often the draft model's most likely token is the answer's, over how many positions."""
    pairs = [(r.offers[DRAFT].tokens, r.tokens) for r in recordings]
    same = [a == b for offered, tokens in pairs for a, b in zip(offered, tokens, strict=True)]
    return sum(same) / len(same), len(same)


def judge(subject: Subject, file: ModelFile) -> DraftReport:
    """What a draft that was scored is good for, or why it cannot work with this target: plain decoding and
    the automatic choices are replayed over those answers that have its offers."""
    card, target_card = file.card, subject.file.card
    pair = next(iter(subject.of(PairRow, draft=file.name)), None)
    is_whole = not (file.is_head or (pair is not None and pair.reduced_from is not None))
    cases = subject.recordings(file.name)
    why_not = pair.why_not if pair is not None else _NO_REWIND
    report = DraftReport(
        model=ModelFacts.of(file),
        kind=card.kind,
        pair=pair,
        bytes_ratio=card.bytes_per_token / target_card.bytes_per_token,
        output_ratio=card.output_bytes / card.bytes_per_token if is_whole else 0.0,
        verdict=cannot_work(why_not or _TOO_LONG),
    )
    prices = subject.prices(file.name)
    if why_not is not None or not cases or prices.draft is None:
        return report
    found = expect(cases, prices, (PLAIN, AUTO_LOOKUP, AUTO, AUTO_MODEL))
    agreement, positions = agreement_of(cases)
    needed = StepCosts.of(prices.target, prices.draft).least_needed()
    step_s = prices.draft.call_s(1, context=0)
    report = replace(
        report,
        step_s=step_s,
        step_ratio=step_s / prices.target.call_s(1, context=0),
        agreement=agreement,
        positions=positions,
        needed=needed and needed[0],
        answers=len(cases),
        over_plain=found.over(AUTO, PLAIN),
        over_lookup=found.over(AUTO, AUTO_LOOKUP),
        lookup=found.over(AUTO_LOOKUP, PLAIN),
        alone=found.over(AUTO_MODEL, PLAIN),
    )
    calls_s = prices.target.calls_s(SHOWN_CALLS, context=0).tolist()
    return replace(report, verdict=judge_draft(report, calls_s))


def judge_lookup_alone(subject: Subject) -> LookupReport:
    """What lookup makes of the answers."""
    prices = subject.prices(None)
    found = expect(subject.recordings(None), prices, (PLAIN, AUTO_LOOKUP))
    outcomes, gain = found.outcomes[AUTO_LOOKUP], found.over(AUTO_LOOKUP, PLAIN)
    drafted, accepted = (sum(sum(getattr(o, name)) for o in outcomes) for name in ("drafted", "accepted"))
    verdict = judge_lookup(gain, prices.target.calls_s(SHOWN_CALLS, context=0).tolist())
    return LookupReport(drafted, accepted, gain, verdict)


# A whole check


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a check found, in seconds, bytes and tokens. `pays` is the exit status as a question.

    Args:
        library: What runs the target here, and why; `backend` is its name.
        calls_s: Times of target calls by their tokens.
        answers: The number of recorded answers by workload.
        plain_tokens_per_s: How fast plain decoding made them.
        found: What could draft, where no draft was named.
    """

    machine: str
    target: ModelFacts
    library: str
    backend: str
    rewind: RewindKind
    calls_s: Mapping[int, float]
    answers: Mapping[str, int]
    plain_tokens_per_s: float | None
    lookup: LookupReport | None
    drafts: tuple[DraftReport, ...]
    verdict: str
    pays: bool
    notices: tuple[str, ...] = ()
    seconds: float = 0.0
    found: tuple[FoundFile, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **to_jsonable_python(self, inf_nan_mode="null")}


@contextmanager
def opened(
    target: ModelFile, loader: Loader, workloads: Sequence[Workload], progress: Progress
) -> Iterator[Subject]:
    """A target, loaded, of which nothing is known yet."""
    file, rows = replace(target, backend=loader.options.backend), list[Row]()
    progress(f"loading {file.name}", None)
    with closing(loader.target(file)[0]) as loaded:
        yield Subject(
            file, loaded, workloads, loader, rows, rows.append, lambda what, _part: progress(what, None)
        )


def check(
    target: ModelFile,
    drafts: Sequence[ModelFile],
    workloads: Sequence[Workload],
    loader: Loader,
    progress: Progress = no_progress,
    *,
    seconds: float,
    max_answers: int = MAX_ANSWERS,
    found: tuple[FoundFile, ...] | None = None,
) -> Report:
    """Judge lookup and every draft on the target's own answers.

    Costs of calls are taken from earlier measurements on this machine where there are any. A target or draft
    that cannot rewind is a verdict. Raises VocabularyMismatch for a draft that was named and has other
    tokens, ModelFileError, PromptError, OutOfMemory or BackendError.

    It takes `seconds` for the target's answers and again for each draft. `found` is what a search for drafts
    came to, where none was named: one that cannot be loaded is passed over then.
    """
    started, options = perf_counter(), loader.options
    if found is None:
        for file in [file for file in drafts if not file.is_head]:
            check_tokenizers(target.card, file.card)
    with collect_notices() as notices:
        heads = [file.card for file in drafts if file.is_head and file.path != target.path]
        if heads and found is None:  # those that were found may be passed over
            options = for_heads(options, heads[0])
        loader = replace(loader, options=options, costs_s=min(DEFAULT_SECONDS, seconds / 4))
        with opened(target, loader, workloads, progress) as subject:
            lookup = None
            if subject.can_draft:
                record_within(subject, seconds, max_answers, progress)
                lookup = judge_lookup_alone(subject)
            else:
                subject.measure_target()
            judged = _judged(subject, drafts, seconds, are_found=found is not None)
            report = _report(subject, lookup, judged)
    return replace(report, notices=tuple(notices), found=found or (), seconds=perf_counter() - started)


def _report(subject: Subject, lookup: LookupReport | None, drafts: tuple[DraftReport, ...]) -> Report:
    model, calls, answers = subject.target.model, subject.prices(None).target, subject.of(AnswerRow)
    assert isinstance(model, GgufModel), "it was loaded from a file"
    sentence, pays = overall(lookup, drafts)
    decode_s = sum(row.decode_s for row in answers)
    return Report(
        machine=f"{', '.join(device_names())}, {physical_cores()} cores",
        target=ModelFacts.of(subject.file),
        library=model.weights.library_line,
        backend=model.weights.library.backend,
        rewind=model.rewinding.kind,
        calls_s={size: calls.call_s(size, context=0) for size in SIZES},
        answers=dict(Counter(row.workload for row in answers)),
        plain_tokens_per_s=sum(len(row.tokens) for row in answers) / decode_s if decode_s else None,
        lookup=lookup,
        drafts=drafts,
        verdict=f"{sentence} (measured with {model.weights.library.title})",
        pays=pays,
    )


def record_within(subject: Subject, seconds: float, most: int, progress: Progress) -> None:
    """Let the target answer prompts of its workloads for so many seconds, and say what its calls cost. Raises
    PromptError where it answers none, BackendError when a call fails."""
    questions = questions_of(subject.workloads, subject.target)
    subject.say("measuring calls")
    measured = subject.loader.costs(subject.target, "target")
    answers = record_answers(
        subject.target,
        questions,
        measured,
        seconds=seconds,
        most=most,
        progress=lambda part: progress("the target answers", part),
    )
    for row in answers:
        subject.append(row)
    subject.measure_target(measured)


def _judged(
    subject: Subject, drafts: Sequence[ModelFile], seconds: float, *, are_found: bool
) -> tuple[DraftReport, ...]:
    judged = []
    for file in drafts:
        if subject.can_draft:
            try:
                subject.score(file, seconds)
            except (BackendCrash, ModelFileError, OutOfMemory) as error:
                if not are_found:
                    raise
                notify(f"{file.name} is skipped: {error.why}")
                continue
        judged.append(judge(subject, file))
    return tuple(judged)
