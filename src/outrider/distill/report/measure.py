"""The files in use: the target answers held-out prompts through llama.cpp, and every draft offers along."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from outrider.backends.gguf import LoadOptions, device_names, physical_cores
from outrider.core.errors import PromptError
from outrider.core.params import SamplingParams
from outrider.costs import CallCosts
from outrider.costs.calibrate import DEFAULT_SECONDS
from outrider.distill.generate import Question as Asked
from outrider.distill.plan import DistillPlan
from outrider.distill.report.figures import own_times, with_draft, without_draft
from outrider.distill.report.schema import Contender, Kind, Measured
from outrider.distill.run import Progress
from outrider.lab.answers import ANSWER_TOKENS, Answer, Question, questions_of, record_answers
from outrider.lab.facts import calls_of
from outrider.lab.loaded import LoadedDraft, LoadedTarget
from outrider.lab.models import ModelFile, find_models
from outrider.lab.opened import Loaded
from outrider.lab.prompts import Prompt, Workload
from outrider.lab.subject import Subject, offered, probed, why_unusable
from outrider.models.hub import HubOptions
from outrider.policy.pretrained import PretrainedCalibration
from outrider.session.learned import prior_in
from outrider.vocab import compare

__all__ = ["measure"]

_AT_ONCE = 24
"""Questions that are handed over together: an answer may be so long as suits the time left for them."""
_MIN_LEFT = 0.1
"""of the time, for more questions to be begun"""

_Scored = tuple[Kind, Path, CallCosts, PretrainedCalibration | None, list[Answer]]


def measure(
    file: ModelFile,
    drafts: Sequence[tuple[Kind, Path]],
    questions: Sequence[Asked],
    plan: DistillPlan,
    *,
    seconds: float,
    progress: Progress,
    notices: list[str],
) -> Measured | None:
    """What each draft, the trained one first, makes of the target's greedy answers to held-out questions.

    `seconds` are for the answers, and again for each draft's offers. None where too little could be recorded,
    and why in `notices`. Raises ModelFileError, OutOfMemory or BackendError.
    """
    options = LoadOptions(threads=plan.threads)
    with Loaded(file, options, notices, progress) as target:
        model = target.open(min(plan.context + 2 * ANSWER_TOKENS, target.weights.trained_context))
        asked = LoadedTarget(file.name, model, target.template)
        subject = Subject(asked, target.facts(), target.costs("all", DEFAULT_SECONDS), ())
        answers = _answers(subject, questions, plan, seconds, progress, notices)
        if not answers:
            notices.append("no report: the target's answers to the held-out prompts are too short to tell")
            return None
        subject = subject.corrected(answers)
        scored: list[_Scored] = []
        for kind, path in drafts:
            scored += _scored(subject, kind, path, options, scored, seconds, progress, notices)
        subject = _common(subject, scored)
        progress("replaying", None)
        contenders = without_draft(subject, subject.answers)
        contenders += _beside_lookup(subject, scored)
    calls = calls_of(subject.costs)
    return Measured(
        machine=f"{', '.join(device_names())}, {physical_cores()} cores",
        answers=len(subject.answers),
        tokens=sum(len(answer.row.tokens) for answer in subject.answers),
        categories=dict(Counter(answer.row.workload for answer in subject.answers)),
        call_s=calls.call_s,
        call_ratios=dict(calls.ratios),
        contenders=contenders,
    )


def _beside_lookup(subject: Subject, scored: Sequence[_Scored]) -> Iterator[Contender]:
    own = None
    for kind, path, costs, prior, offers in scored:
        mine = _named(offers, subject.answers)
        own = own or own_times(subject, costs, mine)
        prices = replace(subject.prices(costs, prior), own=own)
        yield with_draft(kind, path, prices, mine)


def _named(answers: Sequence[Answer], among: Sequence[Answer]) -> list[Answer]:
    names = {_name(answer) for answer in among}
    return [answer for answer in answers if _name(answer) in names]


def _name(answer: Answer) -> tuple[str, str]:
    return answer.row.workload, answer.row.case


def _common(subject: Subject, scored: Sequence[_Scored]) -> Subject:
    """With those answers alone that every draft has offers for: all figures are of the same ones."""
    kept: Sequence[Answer] = subject.answers
    for *_, answers in scored:
        kept = _named(kept, answers)
    return replace(subject, answers=tuple(kept))


def _answers(
    subject: Subject,
    asked: Sequence[Asked],
    plan: DistillPlan,
    seconds: float,
    progress: Progress,
    notices: list[str],
) -> list[Answer]:
    """Recorded plainly, a few prompts of every category in turn, until the time is up."""
    questions = _questions(subject, asked, plan, notices)
    found: list[Answer] = []
    started = perf_counter()
    for at in range(0, len(questions), _AT_ONCE):
        left = seconds - (perf_counter() - started)
        if found and left < _MIN_LEFT * seconds:
            break

        def told(part: float, left: float = left) -> None:
            progress("the target answers held-out prompts", 1 - left / seconds * (1 - part))

        some, _ = record_answers(
            subject.target,
            questions[at : at + _AT_ONCE],
            subject.costs,
            seconds=max(left, _MIN_LEFT * seconds),
            progress=told,
            left_out=notices.append,
        )
        found += some
    return found


def _questions(
    subject: Subject, asked: Sequence[Asked], plan: DistillPlan, notices: list[str]
) -> list[Question]:
    prompts: dict[str, list[Prompt]] = defaultdict(list)
    for question in asked:
        prompts[question.category].append(question.prompt)
    greedy = SamplingParams(temperature=0.0, seed=plan.training.seed)
    workloads = [
        Workload(category, tuple(some), greedy, plan.data.max_tokens, "held out")
        for category, some in prompts.items()
    ]
    try:
        found, lines = questions_of(workloads, subject.target)
    except PromptError as error:
        notices.append(str(error))
        return []
    notices += lines
    most = subject.target.model.context_length - 2 * ANSWER_TOKENS
    fitting = [question for question in found if len(question.tokens) <= most]
    if len(fitting) < len(found):
        count = len(found) - len(fitting)
        notices.append(f"{count} of {len(found)} held-out prompts are left out: they do not fit the context")
    return fitting


def _scored(
    subject: Subject,
    kind: Kind,
    path: Path,
    options: LoadOptions,
    earlier: Sequence[_Scored],
    seconds: float,
    progress: Progress,
    notices: list[str],
) -> list[_Scored]:
    """A draft's offers along the answers, and its costs; nothing but a notice where it cannot take part."""
    [file] = find_models([str(path)], hub=HubOptions(offline=True))
    with Loaded(file, options, notices, progress, beside=subject.target.model) as draft:
        alignment = compare(subject.target.model.vocabulary, draft.weights.vocabulary)
        if refusal := why_unusable(subject, draft.weights.rewind, alignment):
            notices.append(f"{path.name} is left out: cannot work: {refusal[0]}")
            return []
        model = draft.open(min(subject.target.model.context_length, draft.weights.trained_context))
        costs = _known_costs(kind, earlier) or draft.costs("last", DEFAULT_SECONDS)
        beside = LoadedDraft(file.name, model, alignment, prior_in(model, notices))
        stage = f"{path.name} drafts along"
        answers, _ = offered(subject, beside, seconds=seconds, progress=lambda part: progress(stage, part))
        if not answers:
            notices.append(f"{path.name} is left out: none of the answers fits its context")
            return []
        if _known_costs(kind, earlier) is None:
            costs = probed(subject, beside, costs, answers)
    return [(kind, path, costs, beside.prior, answers)]


def _known_costs(kind: Kind, earlier: Sequence[_Scored]) -> CallCosts | None:
    """The draft before training is of the trained one's shape and types: measured once, the two differ in
    nothing but what they say."""
    return next((costs for other, _, costs, *_ in earlier if kind == "first" and other == "trained"), None)
