"""A target whose calls were measured and whose answers were recorded, and drafts beside it: how they line
up, what they would have offered all along the answers, and what their calls cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from time import perf_counter

import numpy as np

from outrider.backends.gguf.options import LoadOptions
from outrider.core.contracts import Rewinding, RewindKind
from outrider.core.data import StepRecord
from outrider.core.errors import PromptError
from outrider.core.notices import collect_notices, notify
from outrider.costs import CallCosts, CallPoint
from outrider.costs.calibrate import DEFAULT_SECONDS
from outrider.drafters.model import ModelDrafter
from outrider.lab.loaded import Loaded, LoadedDraft, LoadedTarget, Progress
from outrider.lab.models import ModelFacts, ModelFile
from outrider.lab.predict import DRAFT, Prices, prices_of
from outrider.lab.record import MAX_ANSWERS, Answer, Case, record_answers, recording_of, request_of
from outrider.lab.rows import AnswerRow, OffersRow, PairRow
from outrider.models.gguf import ModelKind
from outrider.models.vocab import Alignment, AlignmentReport, compare
from outrider.policy.fixed import FixedPolicy
from outrider.policy.state import PretrainedCalibration

_MIN_ANSWERS = 4
_MIN_CALLS = 3
"""of a size that make its ratio known"""
_MAX_RATIO = 4.0
"""A larger ratio is a disturbance of the machine."""
_PROBED_ANSWERS = 2
_PROBED_LENGTH = 4
_PROBED_TOKENS = 24
_OTHER_FAMILY = "a draft of the target's own model family, whose tokenizer is the same"
LOOKUP = "lookup, which needs no second model"
TOO_LONG = (
    "none of the prompts fits the draft's context",
    ("shorter prompts (--prompts FILE)", "a draft with a longer context", LOOKUP),
)


def tokenizer_fault(report: AlignmentReport) -> str | None:
    """Why the draft's tokenizer does not do for the target; None where it does."""
    if report.usable:
        return None
    if report.map_fault is not None:
        return report.map_fault
    kinds = f"the tokenizers do not line up ({report.target_kind}; {report.draft_kind})"
    if report.common_text_tokens < report.text_tokens:
        kinds += f": {report.common_text_tokens:,} of {report.text_tokens:,} text tokens agree"
    return f"{kinds}, and {report.cuts.ratio:.0%} of sample text is cut alike"


def pair_row(
    target: str,
    draft: str,
    report: AlignmentReport,
    *,
    identical: bool = False,
    why_not: str | None = None,
    prior: PretrainedCalibration | None = None,
) -> PairRow:
    """How two tokenizers line up, and why the draft takes no part if it does not; `prior`: the draft's."""
    why_not = why_not or tokenizer_fault(report)
    return PairRow(
        target=target,
        draft=draft,
        usable=why_not is None,
        identical=identical,
        common_tokens=report.common_tokens,
        text_ratio=report.text_ratio,
        cut_ratio=report.cuts.ratio,
        reduced_from=report.target_tokens if report.is_reduced else None,
        why_not=why_not,
        prior=dict(prior) if prior is not None else None,
    )


def score_case(target: LoadedTarget, draft: LoadedDraft, case: Case, answer: AnswerRow) -> OffersRow:
    """A draft's offers along one answer. Raises BackendError when a call fails or the text does not fit."""
    before = perf_counter()
    offers = draft.offers(recording_of(target, case, answer))
    return OffersRow(
        target=target.name,
        draft=draft.name,
        workload=answer.workload,
        case=answer.case,
        seconds=perf_counter() - before,
        **asdict(offers),
    )


def probe_draft(
    target: LoadedTarget, draft: LoadedDraft, cases: Sequence[tuple[Case, AnswerRow]]
) -> list[StepRecord]:
    """Steps in which the draft model drafts a few tokens each time, on the first tokens of these cases.
    Raises BackendError when a call fails."""
    found: list[StepRecord] = []
    for case, answer in cases:
        drafter, engine = ModelDrafter(draft.model, draft.alignment), (draft.feeder or target).engine
        engine.equip((drafter,), FixedPolicy(_PROBED_LENGTH, 0, 0.0))
        engine.reset()
        request = request_of(case, answer.prompt, answer.seed)
        most = min(request.max_tokens or _PROBED_TOKENS, _PROBED_TOKENS)
        completion = engine.generate(replace(request, max_tokens=most, ignore_end=False))
        found += completion.records
        drafter.reset()
    return found


# Measured curves corrected by real answers: calls of a generation are not quite those of a measurement.


def corrected(measured: CallCosts, calls: Iterable[tuple[int, int, float]]) -> CallCosts:
    """The curve as real calls show it, each given by its tokens, its context and its seconds.

    Every size takes the median ratio of its real calls to the curve, other sizes their neighbours'.
    """
    ratios: dict[int, list[float]] = {}
    for num_tokens, context, seconds in calls:
        ratio = seconds / measured.call_s(num_tokens, context=context)
        ratios.setdefault(num_tokens, []).append(ratio)
    known = {n: _bounded(median(found)) for n, found in sorted(ratios.items()) if len(found) >= _MIN_CALLS}
    if not known:
        return measured
    sizes, values = np.log(list(known)), list(known.values())
    spread = next((point.spread_ratio for point in measured.points), 0.05)
    there = {point.num_tokens for point in measured.points if point.num_sequences == 1}
    added = [
        CallPoint(n, measured.call_s(n, context=0), spread_ratio=spread) for n in known if n not in there
    ]
    points = [
        replace(p, seconds=p.seconds * float(np.interp(np.log(p.num_tokens), sizes, values)))
        for p in (*measured.points, *added)
    ]
    return CallCosts(points, prefill_token_s=measured.prefill_token_s, window=measured.window)


def corrected_by_drafts(measured: CallCosts, records: Sequence[StepRecord], target: CallCosts) -> CallCosts:
    """A draft model's curve as the steps show it in which it drafted, with the engine's own time for each of
    its tokens made part of its calls.

    All times are those of a machine on which the `target`'s calls take what its curve says: a slow moment
    shows in the target's calls of the same steps, and is taken out. Steps that read a prompt do not count.
    """
    steps = [record for record in records if record.work.calls and not record.read_tokens]
    if not steps:
        return measured
    slowness = median(r.verify_s / target.call_s(r.num_evaluated, context=r.position) for r in steps)
    expected_s = [sum(measured.call_s(n, context=r.position) for n in r.work.call_tokens) for r in steps]
    ratio = _bounded(median(r.work.model_s / s for r, s in zip(steps, expected_s, strict=True)) / slowness)
    own_s = median(max(r.draft_s - r.work.model_s, 0.0) / r.work.calls for r in steps) / slowness
    read_s = sum(record.work.prefill_s for record in records) / slowness
    read_tokens = sum(record.work.prefill_tokens for record in records)
    return CallCosts(
        [replace(point, seconds=point.seconds * ratio + own_s) for point in measured.points],
        prefill_token_s=read_s / read_tokens if read_s and read_tokens else measured.prefill_token_s,
        window=measured.window,
    )


def _bounded(ratio: float) -> float:
    return min(max(ratio, 1 / _MAX_RATIO), _MAX_RATIO)


def target_costs(measured: CallCosts, answers: Sequence[AnswerRow]) -> CallCosts:
    """The target's curve, corrected by all calls of its answers: one that is measured by itself is not quite
    the one in a generation, where other memory was used in between and all rows of logits are read."""
    return corrected(measured, (call[:3] for answer in answers for call in answer.calls))


@dataclass(frozen=True, slots=True)
class Subject:
    """A target that was measured: what its calls cost, and its own answers."""

    target: LoadedTarget
    facts: ModelFacts
    costs: CallCosts
    answers: tuple[Answer, ...] = ()

    def answering(
        self,
        questions: Sequence[Case],
        *,
        seconds: float,
        most: int = MAX_ANSWERS,
        progress: Callable[[float], None] = lambda _part: None,
    ) -> Subject:
        """With its answers to these questions, and what their calls say about the costs. Raises PromptError
        where it has none, BackendError when a call fails."""
        with collect_notices() as notices:
            answers = record_answers(
                self.target, questions, self.costs, seconds=seconds, most=most, progress=progress
            )
        notify(*notices)
        if not answers:
            why = notices[-1] if notices else "the target answers none of them"
            raise PromptError("prompts", why, "Give others (--prompts).")
        costs = target_costs(self.costs, [answer.row for answer in answers])
        return replace(self, costs=costs, answers=tuple(answers))

    def prices(self, draft: CallCosts | None = None, prior: PretrainedCalibration | None = None) -> Prices:
        """What calls cost, and the engine's own time beside them; `prior`: the draft's."""
        prices = prices_of(self.costs, [answer.row for answer in self.answers], draft, prior)
        return replace(prices, rewinding=self.target.model.rewinding)


def why_unusable(
    subject: Subject, rewinding: Rewinding, alignment: Alignment, why_not: str = ""
) -> tuple[str, tuple[str, ...]] | None:
    """Why a draft, whose own contexts go back so, cannot work with this target, and what to try instead;
    None for one that can. `why_not`: why it could not with any."""
    if not subject.target.model.rewinding.is_possible:
        why = "the target cannot take rejected drafts back (recurrent or hybrid state)"
        return why, ("a target of another architecture, with attention alone",)
    if (fault := tokenizer_fault(alignment.report)) is not None:
        return fault, (_OTHER_FAMILY, LOOKUP)
    if why_not:
        return why_not, ("another library (--backend llama.cpp)", LOOKUP)
    if not rewinding.is_possible:
        why = "the draft cannot forget tokens (recurrent or hybrid state), so rejected ones would stay"
        return why, ("a draft of another architecture, with attention alone", LOOKUP)
    return None


@dataclass(frozen=True, slots=True)
class DraftOffers:
    """A draft beside a subject: how its tokens line up, what its calls cost, and the answers that fit its
    context, with its offers. `refusal`: why it takes no part, and what to try instead; there is no more then.
    """

    facts: ModelFacts
    rewind: RewindKind
    alignment: Alignment
    refusal: tuple[str, tuple[str, ...]] | None = None
    costs: CallCosts | None = None
    answers: tuple[Answer, ...] = ()
    prior: PretrainedCalibration | None = None
    output_ratio: float = 0.0
    """of what a step reads, the part that is the output layer; 0 for a reduced vocabulary, and for a head"""
    kind: ModelKind = "model"


def offers_along(
    subject: Subject,
    file: ModelFile,
    options: LoadOptions,
    progress: Progress,
    *,
    seconds: float,
    costs_s: float = DEFAULT_SECONDS,
    known: CallCosts | None = None,
) -> DraftOffers:
    """Load a draft, and let it draft along the subject's answers, for `seconds` in all.

    Its calls are measured for up to `costs_s` where they are not known here; `known`: the costs of a draft of
    the same shape and types. Raises ModelFileError, OutOfMemory or BackendError.
    """
    started = perf_counter()
    with Loaded(file, options, progress, beside=subject.target.model) as draft:
        alignment = compare(subject.target.model.vocabulary, draft.weights.vocabulary)
        is_whole = not (alignment.report.is_reduced or file.is_head)
        ratio = file.card.output_bytes / file.card.bytes_per_token if is_whole else 0.0
        kind = file.card.kind
        found = DraftOffers(draft.facts(), draft.rewinding.kind, alignment, output_ratio=ratio, kind=kind)
        if refusal := why_unusable(subject, draft.rewinding, alignment, draft.why_not):
            return replace(found, refusal=refusal)
        length = subject.target.model.context_length
        draft.open(length if file.is_head else min(length, draft.weights.trained_context))
        costs = known or draft.costs("last", costs_s)
        loaded = draft.draft(alignment)
        answers, skipped = offered(
            subject,
            loaded,
            seconds=max(seconds - (perf_counter() - started), 1.0),
            progress=lambda part: progress(f"{file.name} scores the answers", part),
        )
        if not answers:
            return replace(found, facts=draft.facts(), refusal=TOO_LONG)
        if skipped:
            notify(f"{file.name}: {skipped} of the answers do not fit its context")
        if known is None:
            progress(f"{file.name} drafts", None)
            few = [(answer.case, answer.row) for answer in answers[:_PROBED_ANSWERS]]
            costs = corrected_by_drafts(costs, probe_draft(subject.target, loaded, few), subject.costs)
        prior = loaded.prior
        return replace(found, facts=draft.facts(), costs=costs, answers=tuple(answers), prior=prior)


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
        recording = answer.recording
        length = len(draft.alignment.read(recording.prompt)) + 2 * len(draft.alignment.read(recording.tokens))
        if length > draft.model.context_length:
            skipped += 1
            continue
        offers = draft.offers(recording)
        found.append(replace(answer, recording=replace(recording, offers={DRAFT: offers})))
        progress((done + 1) / len(subject.answers))
    return found, skipped
