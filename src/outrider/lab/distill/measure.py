"""What the files bring in use: the target answers held-out prompts through llama.cpp, every draft offers
along these answers, and ways to draft are replayed over them at measured costs."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from shutil import rmtree
from time import perf_counter
from typing import Any

import numpy as np

from outrider.backends.gguf import LoadOptions, device_names, physical_cores
from outrider.core.errors import PromptError
from outrider.core.params import SamplingParams
from outrider.costs import CallCosts
from outrider.costs.calibrate import DEFAULT_SECONDS
from outrider.lab.distill.corpus import Corpus
from outrider.lab.distill.examples import Example
from outrider.lab.distill.generate import options_of
from outrider.lab.distill.plan import DistillPlan, kept, make_folder
from outrider.lab.distill.questions import asked
from outrider.lab.distill.report import Category, Contender, Curve, CurvePoint, Figure, Kind, Measured
from outrider.lab.distill.run import Distilled, Progress
from outrider.lab.distill.train import Trainer
from outrider.lab.judged import acceptance_of, calls_of
from outrider.lab.loaded import Loaded, LoadedTarget
from outrider.lab.models import ModelFile, find_models, own_head
from outrider.lab.predict import BOUND, DRAFT, Expectation, Prices, expect, with_policy_times
from outrider.lab.prompts import Prompt, Workload
from outrider.lab.record import ANSWER_TOKENS, Answer, questions_of, record_answers
from outrider.lab.settings import AUTO, AUTO_LOOKUP, AUTO_MODEL, PLAIN, Setting
from outrider.lab.statistics import Interval, share_of, speedup_of, t_quantile
from outrider.lab.subject import DraftOffers, Subject, offers_along
from outrider.models.hub import HubOptions

_BATCH_QUESTIONS = 24
"""Questions that are asked together: an answer may be so long as suits the time left for them."""
_MIN_LEFT_SHARE = 0.1
"""of the time, for more questions to be begun"""
_THREE = Setting("model", 3)


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
    drafts: list[tuple[Kind, Path]] = [
        ("trained", Path(distilled.report.draft.path)),
        ("first", distilled.first),
    ]
    if plan.continued_gguf is not None:
        drafts.append(("continued", plan.continued_gguf))
    options = options_of(plan)
    with Loaded(file, options, notices, progress) as target:
        model = target.open(min(plan.context + 2 * ANSWER_TOKENS, target.weights.trained_context))
        loaded = LoadedTarget(file.name, model, target.template)
        if own_head(file) is not None:
            notices.append(f"{file.name} has an MTP head of its own: `outrider check` measures that")
        subject = Subject(loaded, target.facts(), target.costs("all", DEFAULT_SECONDS), ())
        answers = _record(subject, plan, seconds, progress, notices)
        if not answers:
            notices.append("no report: the target's answers to the held-out prompts are too short to tell")
            return None
        subject = subject.corrected(answers)
        contenders, answers = _contenders(subject, drafts, options, notices, progress, seconds)
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


def _contenders(
    subject: Subject,
    drafts: Sequence[tuple[Kind, Path]],
    options: LoadOptions,
    notices: list[str],
    progress: Progress,
    seconds: float,
) -> tuple[list[Contender], list[Answer]]:
    """No draft, lookup and every draft that can take part, and the answers that all have offers to."""
    found: dict[Kind, DraftOffers] = {}
    for kind, path in drafts:
        # Before training and after it a draft differs in nothing but what it predicts.
        known = found["trained"].costs if kind == "first" and "trained" in found else None
        [draft] = find_models([str(path)], hub=HubOptions(offline=True))
        offers = offers_along(subject, draft, options, notices, progress, seconds=seconds, known=known)
        if offers.refusal is None:
            found[kind] = offers
        else:
            notices.append(f"{path.name} is left out: cannot work: {offers.refusal[0]}")

    def name(answer: Answer) -> tuple[str, str]:
        return answer.row.workload, answer.row.case

    scored = {kind: {name(answer): answer for answer in offers.answers} for kind, offers in found.items()}
    answers = [answer for answer in subject.answers if all(name(answer) in s for s in scored.values())]
    subject = replace(subject, answers=tuple(answers))
    progress("replaying", None)
    contenders = without_draft(subject, answers)
    own_s: Mapping[str, float] = {}
    for kind, path in drafts:
        if kind in found:
            costs, mine = found[kind].costs, [scored[kind][name(answer)] for answer in answers]
            assert costs is not None
            own_s = own_s or own_times(subject, costs, mine)
            prices = replace(subject.prices(costs, found[kind].prior), own_s=own_s)
            contenders.append(with_draft(kind, path, prices, mine))
    return contenders, answers


def _record(
    subject: Subject, plan: DistillPlan, seconds: float, progress: Progress, notices: list[str]
) -> list[Answer]:
    """Plain answers to a few held-out prompts of every category in turn, until the time is up."""
    prompts: dict[str, list[Prompt]] = defaultdict(list)
    for question in asked(plan.data).held_out:
        prompts[question.category].append(question.prompt)
    greedy = SamplingParams(temperature=0.0, seed=plan.training.seed)
    workloads = [
        Workload(category, tuple(some), greedy, plan.data.max_tokens, "held out")
        for category, some in prompts.items()
    ]
    try:
        questions, lines = questions_of(workloads, subject.target)
    except PromptError as error:
        notices.append(str(error))
        return []
    notices.extend(lines)
    found: list[Answer] = []
    started = perf_counter()
    for at in range(0, len(questions), _BATCH_QUESTIONS):
        left = seconds - (perf_counter() - started)
        if found and left < _MIN_LEFT_SHARE * seconds:
            break

        def report(part: float, left: float = left) -> None:
            progress("the target answers held-out prompts", 1 - left / seconds * (1 - part))

        some, _ = record_answers(
            subject.target,
            questions[at : at + _BATCH_QUESTIONS],
            subject.costs,
            seconds=max(left, _MIN_LEFT_SHARE * seconds),
            progress=report,
            left_out=notices.append,
        )
        found += some
    return found


# Replay


def without_draft(subject: Subject, answers: Sequence[Answer]) -> list[Contender]:
    """Plain decoding, and lookup alone."""
    found = expect(answers, _timed(answers, subject.prices()), (PLAIN, AUTO_LOOKUP))
    plain = Contender(
        kind="none",
        answers=len(answers),
        tokens_per_s=_tokens_per_s(answers, found, PLAIN),
        over_plain=_speedup(found, PLAIN, PLAIN),
    )
    return [plain, _contender("lookup", answers, found, AUTO_LOOKUP)]


def own_times(subject: Subject, costs: CallCosts, answers: Sequence[Answer]) -> Mapping[str, float]:
    """What choosing among a draft and lookup takes in a step. Timed once: drafts are compared by their
    predictions and costs, not by how busy the machine was."""
    return _timed(answers, subject.prices(costs)).own_s


def _timed(answers: Sequence[Answer], prices: Prices) -> Prices:
    return with_policy_times([answer.recording for answer in answers], prices)


def with_draft(kind: Kind, file: Path, prices: Prices, answers: Sequence[Answer]) -> Contender:
    """A draft model, whose offers the answers hold, with lookup; `prices` with the time that `own_times`
    found."""
    assert prices.draft is not None
    found = expect(answers, prices, (PLAIN, AUTO_LOOKUP, AUTO_MODEL, AUTO, _THREE))
    agreement = acceptance_of([answer.recording for answer in answers], DRAFT)
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
    numbers: dict[str, list[int]] = defaultdict(list)
    for i, answer in enumerate(answers):
        numbers[answer.row.workload].append(i)
    rows, has_draft = [], kind != "lookup"
    for name, mine in sorted(numbers.items()):
        part = found.of(mine)
        rate = acceptance_of([answers[i].recording for i in mine], DRAFT).rate if has_draft else None
        rows.append(
            Category(
                category=name,
                answers=len(mine),
                agreement=Figure.of(rate) if rate is not None else None,
                over_plain=_speedup(part, setting, PLAIN),
                over_lookup=_speedup(part, setting, AUTO_LOOKUP) if has_draft else None,
            )
        )
    return Contender(
        kind=kind,
        answers=len(answers),
        tokens_per_s=_tokens_per_s(answers, found, setting),
        over_plain=_speedup(found, setting, PLAIN),
        bound=Figure.of(found.over(BOUND, PLAIN.name)),
        # Both at the same costs, whose errors are in both.
        of_bound=Figure.of(speedup_of(found.seconds[BOUND], found.seconds[setting.name])),
        categories=rows,
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


# The learning curve: what more data would bring. Short trainings on parts of the answers start from the same
# weights, take the same number of steps and are judged on the same held-out answers, so that the amount of
# data is all that differs. They are shorter than a real training, where a small part of the data would be
# seen far more often: the curve says which way it goes, not what a draft will reach.

PARTS = (0.125, 0.25, 0.5, 1.0)
"""of the training answers"""
STEPS_SHARE = 0.25
"""of the steps of the real training, for each of the short ones"""


def nested(examples: Sequence[Example], part: float) -> list[Example]:
    """So large a part of the answers, chosen by hash: a smaller part lies within a larger one."""

    def place(example: Example) -> bytes:
        return blake2b(example.id.encode(), digest_size=16, person=b"curve").digest()

    ordered = sorted(examples, key=place)
    return ordered[: max(1, round(part * len(ordered)))]


def slope_of(tokens: Sequence[int], agreement: Sequence[float]) -> Interval | None:
    """The slope of the least-squares line of agreement over log2(tokens), and the 95 % interval that the
    points' residuals allow (Student's t). None for fewer than three different amounts."""
    x = np.log2(np.asarray(tokens, dtype=float))
    if len(np.unique(x)) < 3:
        return None
    line, covariance = np.polyfit(x, agreement, 1, cov=True)
    half_width = t_quantile(len(x) - 2) * math.sqrt(max(covariance[0, 0], 0))
    slope = float(line[0])
    return Interval(slope, slope - half_width, slope + half_width, len(x))


def learning_curve(distilled: Distilled, plan: DistillPlan, progress: Progress) -> Curve:
    """Train on each part, in `plan.out`/curve, where points that were made before are taken from.

    Raises SettingError when that folder cannot be written, InputError when what lies there is damaged.
    """
    steps = max(1, round(STEPS_SHARE * distilled.settings.steps))
    points: list[CurvePoint] = []
    for part in PARTS:
        folder = plan.out / "curve" / f"{part:g}"
        trained = partial(_train, distilled, plan, part, steps, folder / "training", progress)
        points.append(
            kept(
                folder / "point.json",
                trained,
                CurvePoint.model_validate,
                "point of the learning curve",
                "Remove it: it is made again.",
            )
        )
        rmtree(folder / "training", ignore_errors=True)
    slope = slope_of([point.tokens for point in points], [point.agreement for point in points])
    return Curve(steps=steps, points=points, per_doubling=None if slope is None else Figure.of(slope))


def _train(
    distilled: Distilled, plan: DistillPlan, part: float, steps: int, folder: Path, progress: Progress
) -> dict[str, Any]:
    make_folder(folder, "Check its permissions.")
    material = distilled.material
    examples = nested(material.training, part)
    settings = replace(
        distilled.settings, steps=steps, evaluate_every=steps, on_policy=0.0, warmup_steps=max(1, steps // 20)
    )
    texts = material.texts(examples, plan.context)
    corpus = Corpus(texts, batch_tokens=settings.batch_tokens, seed=settings.seed)
    held_out = material.texts(material.held_out, plan.context)
    trainer = Trainer(material.draft, corpus, held_out, distilled.costs, settings, folder)

    def on_step(trainer: Trainer) -> None:
        done = trainer.state.step / steps
        line = f"{len(examples)} of {len(material.training)} answers, step {trainer.state.step} of {steps}"
        progress("the learning curve", (PARTS.index(part) + done) / len(PARTS), line)

    trainer.run(on_step)
    last = trainer.state.history[-1]
    found = last.model_dump(include={"loss", "acceptance", "agreement", "speedup"})
    tokens = sum(len(example.answer) for example in examples)
    return {"answers": len(examples), "tokens": tokens, **found}
