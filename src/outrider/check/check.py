"""A target, then one draft after the other: loaded, measured, judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

from outrider.backends.gguf import LoadOptions, device_names, physical_cores
from outrider.check.judging import does_not_fit, judge, judge_lookup_alone, unusable
from outrider.check.libraries import library_to_take
from outrider.check.report import DraftReport, LookupReport, Report, Sample
from outrider.check.rewind import measure_rewind
from outrider.check.verdict import overall
from outrider.core.errors import PromptError, SettingError
from outrider.costs.calibrate import DEFAULT_SECONDS
from outrider.lab.answers import ANSWER_TOKENS, Question, questions_of, record_answers
from outrider.lab.facts import calls_of
from outrider.lab.loaded import LoadedDraft, LoadedTarget
from outrider.lab.models import ModelFile
from outrider.lab.opened import Loaded, Progress
from outrider.lab.prompts import Workload
from outrider.lab.subject import Subject, offered, probed
from outrider.models.vocab import compare
from outrider.session import DEFAULT_CONTEXT_TOKENS
from outrider.session.learned import prior_in

_ROOM_TOKENS = 2 * ANSWER_TOKENS


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """What is to be checked: files, prompts, and `seconds` for the target's answers and again for each draft.
    `context_length` None is the usual one, 0 what the target was trained with."""

    target: ModelFile
    drafts: tuple[ModelFile, ...]
    workloads: tuple[Workload, ...]
    seconds: float = 45.0
    context_length: int | None = None
    options: LoadOptions = field(default_factory=LoadOptions)
    draft_options: LoadOptions | None = None

    @property
    def costs_s(self) -> float:
        """The time for a model's cost curve, where none is known."""
        return min(DEFAULT_SECONDS, self.seconds / 4)

    def __post_init__(self) -> None:
        if not 1 <= self.seconds <= 3600:
            raise SettingError(
                f"--seconds {self.seconds:g}", "it is no time to measure for", "Give 1 to 3600."
            )


def check(request: CheckRequest, progress: Progress = lambda _what, _part: None) -> Report:
    """Judge lookup and every draft on the target's own answers.

    Costs of calls are taken from earlier measurements on this machine where there are any. A draft whose
    tokenizer does not line up, or a target that cannot rewind, is a verdict. Raises ModelFileError,
    PromptError, OutOfMemory or BackendError.
    """
    started = perf_counter()
    notices: list[str] = []
    with Loaded(request.target, request.options, notices, progress) as target:
        usual = min(DEFAULT_CONTEXT_TOKENS, target.weights.trained_context)
        model = target.open(usual if request.context_length is None else request.context_length)
        asked = LoadedTarget(request.target.name, model, target.template)
        questions = _questions(request, asked, notices)
        rewind = measure_rewind(model, max((question.tokens for question in questions), key=len))
        subject = Subject(asked, target.facts(), target.costs("all", request.costs_s), ())
        sample: Sample | None = None
        lookup: LookupReport | None = None
        if rewind.kind != "none":
            subject, sample = _answered(request, subject, questions, notices, progress)
            progress("replaying lookup", None)
            lookup = judge_lookup_alone(subject)
        subject = replace(subject, facts=target.facts())
        drafts = [_draft(request, subject, file, notices, progress) for file in request.drafts]
    verdicts = [(d.model.name, d.verdict, d.speedups.auto if d.speedups else None) for d in drafts]
    sentence, pays = overall(lookup.verdict if lookup else None, verdicts)
    library = target.weights.library
    return Report(
        machine=f"{', '.join(device_names())}, {physical_cores()} cores",
        target=subject.facts,
        rewind=rewind,
        calls=calls_of(subject.costs),
        sample=sample,
        lookup=lookup,
        drafts=tuple(drafts),
        verdict=f"{sentence} (measured with {library.title})",
        pays=pays,
        notices=tuple(dict.fromkeys(notices)),
        seconds=perf_counter() - started,
        backend=library.backend,
        library_to_take=library_to_take(request.target.path, request.options, library.backend),
    )


def _questions(request: CheckRequest, target: LoadedTarget, notices: list[str]) -> list[Question]:
    """The prompts that the target can hold. Raises PromptError where it can hold none."""
    found, lines = questions_of(request.workloads, target)
    notices += lines
    most = target.model.context_length - _ROOM_TOKENS
    fitting = [question for question in found if len(question.tokens) <= most]
    if not fitting:
        why = f"each of them needs more than the target's context of {target.model.context_length} tokens"
        raise PromptError("prompts", why, "Give shorter ones (--prompts), or a larger context (-c).")
    if len(fitting) < len(found):
        notices.append(f"{len(found) - len(fitting)} of {len(found)} prompts do not fit the target's context")
    return fitting


def _answered(
    request: CheckRequest,
    subject: Subject,
    questions: Sequence[Question],
    notices: list[str],
    progress: Progress,
) -> tuple[Subject, Sample]:
    """The target's own answers."""
    started = perf_counter()
    answers, short = record_answers(
        subject.target,
        questions,
        subject.costs,
        seconds=request.seconds,
        progress=lambda part: progress("the target answers", part),
        left_out=notices.append,
    )
    if short:
        notices.append(
            f"left out for ending within a few tokens, where drafts save nothing: {short} of the answers"
        )
    if not answers:
        why = "the target says next to nothing to them" if short else notices[-1]
        raise PromptError("prompts", why, "Give others (--prompts).")
    tokens = sum(len(answer.row.tokens) for answer in answers)
    sample = Sample(
        answers=len(answers),
        tokens=tokens,
        workloads=dict(Counter(answer.row.workload for answer in answers)),
        plain_tokens_per_s=tokens / sum(answer.row.decode_s for answer in answers),
        seconds=perf_counter() - started,
    )
    return subject.corrected(answers), sample


def _draft(
    request: CheckRequest, subject: Subject, file: ModelFile, notices: list[str], progress: Progress
) -> DraftReport:
    started = perf_counter()
    options = request.draft_options or request.options
    with Loaded(file, options, notices, progress, beside=subject.target.model) as draft:
        alignment = compare(subject.target.model.vocabulary, draft.weights.vocabulary)
        if refusal := unusable(subject, draft.weights.rewind, draft.facts(), alignment):
            return refusal
        model = draft.open(min(subject.target.model.context_length, draft.weights.trained_context))
        costs = draft.costs("last", request.costs_s)
        loaded = LoadedDraft(file.name, model, alignment, prior_in(model, notices))
        spent = perf_counter() - started
        answers, skipped = offered(
            subject,
            loaded,
            seconds=max(request.seconds - spent, 1.0),
            progress=lambda part: progress(f"{file.name} scores the answers", part),
        )
        if not answers:
            return does_not_fit(subject, draft.weights.rewind, draft.facts(), alignment)
        if skipped:
            notices.append(f"{file.name}: {skipped} of the answers do not fit its context")
        progress(f"{file.name} drafts", None)
        costs = probed(subject, loaded, costs, answers)
        progress(f"replaying {file.name}", None)
        report = judge(subject, draft.weights.rewind, draft.facts(), alignment, costs, answers, loaded.prior)
    return replace(report, seconds=perf_counter() - started)
