"""What the files are worth in use: the target answers held-out prompts through llama.cpp, every draft offers
along these answers, and ways to draft are replayed over them at measured costs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

from outrider.backends.gguf import LoadOptions, device_names, physical_cores
from outrider.core.errors import PromptError
from outrider.core.params import SamplingParams
from outrider.costs import CallCosts
from outrider.costs.calibrate import DEFAULT_SECONDS
from outrider.distill.plan import DistillPlan
from outrider.distill.questions import asked
from outrider.distill.report import Category, Contender, Figure, Kind, Measured
from outrider.distill.run import Distilled, Progress
from outrider.lab.acceptance import acceptance_of
from outrider.lab.curves import BOUND, Expectation, expect, with_policy_times
from outrider.lab.facts import calls_of
from outrider.lab.loaded import LoadedDraft, LoadedTarget
from outrider.lab.models import ModelFile, find_models
from outrider.lab.opened import Loaded
from outrider.lab.predict import DRAFT, OwnTimes, Prices
from outrider.lab.prompts import Prompt, Workload
from outrider.lab.record import ANSWER_TOKENS, Answer, Question, questions_of, record_answers
from outrider.lab.settings import AUTO, AUTO_LOOKUP, AUTO_MODEL, PLAIN, Setting
from outrider.lab.statistics import share_of, speedup_of
from outrider.lab.subject import Subject, offered, probed, why_unusable
from outrider.models.hub import HubOptions
from outrider.models.vocab import compare
from outrider.policy.pretrained import PretrainedCalibration
from outrider.session.learned import prior_in

_BATCH_QUESTIONS = 24
"""Questions that are handed over together: an answer may be so long as suits the time left for them."""
_MIN_LEFT_SHARE = 0.1
"""of the time, for more questions to be begun"""
_THREE = Setting("model", 3)
_WITHOUT_DRAFT = (PLAIN, AUTO_LOOKUP)
_WITH_DRAFT = (PLAIN, AUTO_LOOKUP, AUTO_MODEL, AUTO, _THREE)


def measure_held_out(
    file: ModelFile,
    plan: DistillPlan,
    distilled: Distilled,
    progress: Progress,
    notices: list[str],
    *,
    seconds: float = 120.0,
) -> Measured | None:
    """The draft before and after training on held-out prompts, and the one that it was continued from,
    against no draft and lookup alone.

    `seconds` are for the target's greedy answers, and again for each draft's offers. None where too little
    could be recorded, and why in `notices`. Raises ModelFileError, OutOfMemory or BackendError.
    """
    drafts: list[tuple[Kind, Path]] = [("trained", Path(distilled.draft.path)), ("first", distilled.first)]
    base = plan.draft.base
    if plan.draft.start == "continue" and base is not None and base.suffix == ".gguf":
        drafts.append(("continued", base))
    options = LoadOptions(threads=plan.threads)
    with Loaded(file, options, notices, progress) as target:
        model = target.open(min(plan.context + 2 * ANSWER_TOKENS, target.weights.trained_context))
        loaded = LoadedTarget(file.name, model, target.template)
        subject = Subject(loaded, target.facts(), target.costs("all", DEFAULT_SECONDS), ())
        answers = _Recording(subject, plan, seconds, progress, notices).answers()
        if not answers:
            notices.append("no report: the target's answers to the held-out prompts are too short to tell")
            return None
        subject = subject.corrected(answers)
        scored: list[_Scored] = []
        for kind, path in drafts:
            known = next((s.costs for s in scored if kind == "first" and s.kind == "trained"), None)
            found = _score(subject, kind, path, options, known, seconds, progress, notices)
            scored += [] if found is None else [found]
        answers = [answer for answer in answers if all(_name(answer) in s.answers for s in scored)]
        subject = replace(subject, answers=tuple(answers))
        progress("replaying", None)
        contenders = [*without_draft(subject, answers), *_with_drafts(subject, scored)]
    calls = calls_of(subject.costs)
    return Measured(
        machine=f"{', '.join(device_names())}, {physical_cores()} cores",
        answers=len(answers),
        tokens=sum(len(answer.row.tokens) for answer in answers),
        categories=dict(Counter(answer.row.workload for answer in answers)),
        call_s=calls.call_s,
        call_ratios=dict(calls.ratios),
        contenders=contenders,
    )


# Recording


@dataclass(frozen=True, slots=True)
class _Recording:
    """Plain answers to held-out prompts."""

    subject: Subject
    plan: DistillPlan
    seconds: float
    progress: Progress
    notices: list[str]

    def answers(self) -> list[Answer]:
        """To a few prompts of every category in turn, until the time is up."""
        questions, seconds = self._questions(), self.seconds
        found: list[Answer] = []
        started = perf_counter()
        for at in range(0, len(questions), _BATCH_QUESTIONS):
            left = seconds - (perf_counter() - started)
            if found and left < _MIN_LEFT_SHARE * seconds:
                break

            def report(part: float, left: float = left) -> None:
                self.progress("the target answers held-out prompts", 1 - left / seconds * (1 - part))

            some, _ = record_answers(
                self.subject.target,
                questions[at : at + _BATCH_QUESTIONS],
                self.subject.costs,
                seconds=max(left, _MIN_LEFT_SHARE * seconds),
                progress=report,
                left_out=self.notices.append,
            )
            found += some
        return found

    def _questions(self) -> list[Question]:
        prompts: dict[str, list[Prompt]] = defaultdict(list)
        for question in asked(self.plan.data).held_out:
            prompts[question.category].append(question.prompt)
        greedy = SamplingParams(temperature=0.0, seed=self.plan.training.seed)
        workloads = [
            Workload(category, tuple(some), greedy, self.plan.data.max_tokens, "held out")
            for category, some in prompts.items()
        ]
        try:
            found, lines = questions_of(workloads, self.subject.target)
        except PromptError as error:
            self.notices.append(str(error))
            return []
        self.notices.extend(lines)
        limit = self.subject.target.model.context_length - 2 * ANSWER_TOKENS
        fitting = [question for question in found if len(question.tokens) <= limit]
        if count := len(found) - len(fitting):
            self.notices.append(
                f"{count} of {len(found)} held-out prompts are left out: they do not fit the context"
            )
        return fitting


@dataclass(frozen=True, slots=True)
class _Scored:
    """A draft with its costs, and the answers, by name, with its offers."""

    kind: Kind
    path: Path
    costs: CallCosts
    prior: PretrainedCalibration | None
    answers: dict[tuple[str, str], Answer]


def _name(answer: Answer) -> tuple[str, str]:
    return answer.row.workload, answer.row.case


def _score(
    subject: Subject,
    kind: Kind,
    path: Path,
    options: LoadOptions,
    known: CallCosts | None,
    seconds: float,
    progress: Progress,
    notices: list[str],
) -> _Scored | None:
    """A draft's offers along the answers, and its costs; nothing but a notice where it cannot take part.

    `known`: the costs of a draft of the same shape and types. That before training takes the trained one's:
    the two differ in nothing but what they predict.
    """
    [file] = find_models([str(path)], hub=HubOptions(offline=True))
    with Loaded(file, options, notices, progress, beside=subject.target.model) as draft:
        alignment = compare(subject.target.model.vocabulary, draft.weights.vocabulary)
        if refusal := why_unusable(subject, draft.weights.rewind, alignment):
            notices.append(f"{path.name} is left out: cannot work: {refusal[0]}")
            return None
        model = draft.open(min(subject.target.model.context_length, draft.weights.trained_context))
        costs = known or draft.costs("last", DEFAULT_SECONDS)
        loaded = LoadedDraft(file.name, model, alignment, prior_in(model, notices))
        stage = f"{path.name} drafts along"
        answers, _ = offered(subject, loaded, seconds=seconds, progress=lambda part: progress(stage, part))
        if not answers:
            notices.append(f"{path.name} is left out: none of the answers fits its context")
            return None
        if known is None:
            costs = probed(subject, loaded, costs, answers)
    return _Scored(kind, path, costs, loaded.prior, {_name(answer): answer for answer in answers})


# Replay


def without_draft(subject: Subject, answers: Sequence[Answer]) -> list[Contender]:
    """Plain decoding, and lookup alone."""
    found = expect(answers, with_policy_times(answers, subject.prices()), _WITHOUT_DRAFT)
    plain = Contender(
        kind="none",
        answers=len(answers),
        tokens_per_s=_tokens_per_s(answers, found, PLAIN),
        over_plain=_speedup(found, PLAIN, PLAIN),
    )
    return [plain, _contender("lookup", answers, found, AUTO_LOOKUP)]


def _with_drafts(subject: Subject, scored: Sequence[_Scored]) -> list[Contender]:
    contenders = []
    own = None
    for draft in scored:
        answers = [draft.answers[_name(answer)] for answer in subject.answers]
        own = own or own_times(subject, draft.costs, answers)
        prices = replace(subject.prices(draft.costs, draft.prior), own=own)
        contenders.append(with_draft(draft.kind, draft.path, prices, answers))
    return contenders


def own_times(subject: Subject, costs: CallCosts, answers: Sequence[Answer]) -> OwnTimes:
    """What choosing among a draft and lookup takes in a step. Timed once: drafts are compared by their
    predictions and costs, not by how busy the machine was."""
    return with_policy_times(answers, subject.prices(costs)).own


def with_draft(kind: Kind, file: Path, prices: Prices, answers: Sequence[Answer]) -> Contender:
    """A draft model, whose offers the answers hold, with lookup; `prices` with the time that `own_times`
    found."""
    assert prices.draft is not None
    found = expect(answers, prices, _WITH_DRAFT)
    agreement = acceptance_of([answer.scored.recording for answer in answers], DRAFT)
    return _contender(kind, answers, found, AUTO).model_copy(
        update={
            "file": str(file),
            "over_lookup": _speedup(found, AUTO, AUTO_LOOKUP),
            "step_ratio": prices.draft.call_s(1, context=0) / prices.target.call_s(1, context=0),
            "agreement": Figure.of(agreement.rate),
            "agreement_by_position": list(agreement.by_position),
            "accepted_of_three": _accepted(found, _THREE),
            "accepted_by_choice": _accepted(found, AUTO_MODEL),
        }
    )


def _contender(kind: Kind, answers: Sequence[Answer], found: Expectation, setting: Setting) -> Contender:
    """What can be said with a draft and without one."""
    return Contender(
        kind=kind,
        answers=len(answers),
        tokens_per_s=_tokens_per_s(answers, found, setting),
        over_plain=_speedup(found, setting, PLAIN),
        bound=Figure.of(found.over(BOUND, PLAIN.name)),
        # Both at the same costs, whose errors are in both.
        of_bound=Figure.of(speedup_of(found.seconds[BOUND], found.seconds[setting.name])),
        categories=_categories(answers, found, setting, has_draft=kind != "lookup"),
    )


def _tokens_per_s(answers: Sequence[Answer], found: Expectation, setting: Setting) -> float:
    return sum(len(answer.row.tokens) for answer in answers) / sum(found.seconds[setting.name])


def _speedup(found: Expectation, setting: Setting, other: Setting) -> Figure:
    return Figure.of(found.over(setting.name, other.name))


def _accepted(found: Expectation, setting: Setting) -> Figure | None:
    counts = found.counts[setting.name]
    if not sum(drafted for drafted, _ in counts):
        return None
    return Figure.of(share_of([correct for _, correct in counts], [drafted for drafted, _ in counts]))


def _categories(
    answers: Sequence[Answer], found: Expectation, setting: Setting, *, has_draft: bool
) -> list[Category]:
    numbers: dict[str, list[int]] = defaultdict(list)
    for i, answer in enumerate(answers):
        numbers[answer.row.workload].append(i)
    rows = []
    for name, mine in sorted(numbers.items()):
        part = found.of(mine)
        agreement = over_lookup = None
        if has_draft:
            recordings = [answers[i].scored.recording for i in mine]
            agreement = Figure.of(acceptance_of(recordings, DRAFT).rate)
            over_lookup = _speedup(part, setting, AUTO_LOOKUP)
        rows.append(
            Category(
                category=name,
                answers=len(mine),
                agreement=agreement,
                over_plain=_speedup(part, setting, PLAIN),
                over_lookup=over_lookup,
            )
        )
    return rows
