"""A target, then one draft after the other: loaded, measured, judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from pydantic_core import to_jsonable_python

from outrider.backends.gguf.libraries import device_names
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.machine import physical_cores
from outrider.backends.tuning.options import tuned_options
from outrider.core.contracts import RewindKind
from outrider.core.errors import BackendCrash, ModelFileError, OutOfMemory, SettingError
from outrider.core.notices import collect_notices, notify
from outrider.costs import CallCosts
from outrider.costs.calibrate import DEFAULT_SECONDS
from outrider.lab.judged import SHOWN_CALLS, BreakEven, Calls, DraftReport, break_evens, calls_of, judge
from outrider.lab.loaded import Loaded, LoadedTarget, Progress
from outrider.lab.models import ModelFacts, ModelFile
from outrider.lab.predict import Speedups, expect, with_policy_times
from outrider.lab.prompts import Workload
from outrider.lab.record import MAX_ANSWERS, questions_of
from outrider.lab.settings import AUTO_LOOKUP
from outrider.lab.subject import Subject, offers_along
from outrider.lab.verdict import DraftVerdict, judge_lookup, overall
from outrider.models.tokenizers import check_tokenizers
from outrider.session.drafts import FoundFile, for_heads

SCHEMA = "outrider.check/1"


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

    break_even: tuple[BreakEven, ...]
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
    library_to_take: str = ""
    """which one to take, in a sentence; empty where they were not compared"""
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
        calls=calls_of(subject.costs),
        sample=sample,
        lookup=lookup,
        drafts=drafts,
        verdict=f"{sentence} (measured with {library.title})",
        pays=pays,
        notices=tuple(notices),
        seconds=perf_counter() - started,
        backend=library.backend,
        library_to_take=library_to_take(request.target.path, request.options, library.backend),
        found=request.found or (),
    )


def _measured(request: CheckRequest, loaded: Loaded, progress: Progress) -> tuple[Subject, Sample | None]:
    """The target with its costs and, where it can take drafts back, its answers."""
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


# Which native library to take for a file: what a trial found here before, or when the file was loaded.


def library_to_take(path: Path, options: LoadOptions, measured: str) -> str:
    """A sentence that names the faster library for the file, where several were tried side by side under
    these options; empty where that never happened, or where a library of one's own was asked for. `measured`
    is the backend that all else was measured with. Nothing is measured here."""
    if options.library:
        return ""
    kept = tuned_options(path, replace(options, backend="auto"))
    if kept is None or not kept.compared:
        return ""
    take = kept.options.backend
    other = "" if take == measured else f", not {measured}, which was asked for"
    return f"take --backend {take}{other} ({kept.compared})"


def judge_lookup_alone(subject: Subject) -> LookupReport:
    """What lookup makes of the answers."""
    found = expect(
        subject.answers, with_policy_times([a.recording for a in subject.answers], subject.prices())
    )
    speedups = found.speedups(AUTO_LOOKUP)
    drafted, accepted = found.looked_up
    calls = subject.costs.calls_s(SHOWN_CALLS, context=0).tolist()
    verdict = judge_lookup(speedups.auto, calls)
    return LookupReport(break_evens(subject.costs), drafted, accepted, speedups, verdict)
