"""A distillation from end to end: answers, first weights, prices, training, the file.

Every stage leaves what it made in the plan's folder and takes it up again from there, so that a run that was
stopped goes on where it was.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Protocol

from outrider.core.errors import InputError
from outrider.distill.checkpoint import Checkpoint
from outrider.distill.corpus import Corpus, Text
from outrider.distill.device import keep_freed_memory
from outrider.distill.export import Written, write_gguf
from outrider.distill.generate import generate
from outrider.distill.hugging_face import write_safetensors
from outrider.distill.material import Material, check_draft, read_material
from outrider.distill.on_policy import OnPolicy
from outrider.distill.plan import DistillPlan, claim, claim_answers
from outrider.distill.pricing import measure_prices
from outrider.distill.provenance import Provenance, read_provenance
from outrider.distill.questions import Asked, asked
from outrider.distill.subset import coverage
from outrider.distill.teacher import Teacher, open_teacher
from outrider.distill.train import Evaluation, OwnTexts, Trainer, TrainingSettings
from outrider.distill.worth import Prices
from outrider.drafters.model import ModelDrafter
from outrider.files import write_whole
from outrider.lab.models import ModelFile
from outrider.models.hashing import file_sha256
from outrider.policy.pretrained import PretrainedCalibration, pretrained_calibration

__all__ = ["Distilled", "Progress", "distill", "record"]

_OWN_TEXTS = 32
"""of the draft in a step on its own text"""
_TRIED_STEPS = 6
_SPENT_RATIO = 0.9
"""of the minutes go to steps, the rest to evaluations and checkpoints"""


class Progress(Protocol):
    """Told what is going on: a stage, how far it is (0-1; None: unknown) and a line about it. What it raises
    ends the run; between steps of training nothing is lost by it."""

    def __call__(self, stage: str, part: float | None, line: str = "") -> None: ...


@dataclass(frozen=True, slots=True)
class Distilled:
    """What a distillation made. `history`: evaluations on held-out answers, the first before training;
    `settings`: of the training, its number of steps among them; `material`: what it was made of;
    `trained_tokens`: labelled positions, each as often as it was trained on; `coverage`: share of the
    held-out answers' tokens that the draft knows; `notices`: lines for the user."""

    written: Written
    first: Path
    """the draft before training"""
    material: Material
    settings: TrainingSettings
    history: tuple[Evaluation, ...]
    best_step: int
    prices: Prices
    training_answers: int
    held_out_answers: int
    training_tokens: int
    trained_tokens: int
    coverage: float
    parameters: int
    seconds: float
    notices: tuple[str, ...]


def distill(file: ModelFile, plan: DistillPlan, progress: Progress) -> Distilled:
    """Train a draft for a target on its own answers, and write it to `plan.out`.

    Raises InputError and its kinds for what cannot be used, BackendError when a call fails.
    """
    started = perf_counter()
    claim(plan)
    keep_freed_memory()
    questions = asked(plan.data)
    notices: list[str] = []
    with open_teacher(file, plan, notices) as teacher:
        notices.append(teacher.told)
        check_draft(file, teacher.target.model.vocabulary, plan)
        _answer(teacher, questions, plan, notices, progress)
        material = read_material(file, teacher.target.model.vocabulary, questions, plan)
        if not plan.training.on_policy:
            teacher.rest()
        provenance = _provenance(file, plan, material)
        first = _write(material.draft, plan.out / "first.gguf", plan, material, provenance)
        progress("measuring what calls cost", None)
        prices = measure_prices(file, first.path, plan.out / "prices.json", plan.threads)
        trainer = _train(teacher, material, prices, plan, progress)
        trained = trainer.trained_tokens
        provenance = replace(
            provenance,
            tokens=provenance.tokens + trained,
            steps=provenance.steps + trainer.state.best_step,
        )
        written = _write(
            trainer.best(), plan.out / f"{plan.name}.gguf", plan, material, provenance, _prior(trainer)
        )
        notices += written.notes
        if plan.draft.safetensors:
            notices += write_safetensors(trainer.best(), plan.out / plan.name)
    return Distilled(
        written=written,
        first=first.path,
        material=material,
        settings=trainer.settings,
        history=tuple(trainer.state.history),
        best_step=trainer.state.best_step,
        prices=prices,
        training_answers=len(material.training),
        held_out_answers=len(material.held_out),
        training_tokens=sum(len(example.answer) for example in material.training),
        trained_tokens=trained,
        coverage=coverage(material.subset, (example.answer for example in material.held_out)),
        parameters=material.draft.shape.parameters,
        seconds=perf_counter() - started,
        notices=tuple(notices),
    )


def record(file: ModelFile, plan: DistillPlan, progress: Progress) -> list[str]:
    """Let the target answer the prompts, and train nothing; lines for the user. Raises as `distill` does."""
    claim_answers(plan)
    keep_freed_memory()
    notices: list[str] = []
    with open_teacher(file, plan, notices) as teacher:
        notices.append(teacher.told)
        _answer(teacher, asked(plan.data), plan, notices, progress)
    return notices


def _answer(
    teacher: Teacher, questions: Asked, plan: DistillPlan, notices: list[str], progress: Progress
) -> None:
    everything = [*questions.held_out, *questions.training]
    total = sum(1 + len(question.prompt.follow_ups) for question in everything)
    done, tokens = 0, 0
    passed_over: list[str] = []
    started = perf_counter()

    def told(why: str, count: int) -> None:
        nonlocal done, tokens
        done, tokens = done + 1, tokens + count
        if why:
            passed_over.append(why)
        speed = tokens / (perf_counter() - started)
        progress("the target answers", done / total, f"{done} of {total} answers, {speed:.0f} tokens/s")

    generate(
        teacher.target, everything, plan.answers_folder, model=teacher.model,
        max_tokens=plan.data.max_tokens, top=plan.data.top, seed=plan.training.seed, told=told,
    )  # fmt: skip
    if passed_over:
        notices.append(f"prompts that were passed over: {len(passed_over)}, the first since {passed_over[0]}")


def _provenance(file: ModelFile, plan: DistillPlan, material: Material) -> Provenance:
    prompts = (
        ", ".join(Path(name).name for name in plan.data.prompts) or "the prompts that come with Outrider"
    )
    warmth = ", ".join(f"{t:g}" for t in plan.data.temperatures)
    data = f"{len(material.training)} answers of the teacher to {prompts}, temperatures {warmth}"
    data += "; some recorded by other runs" if plan.data.more else ""
    earlier = _earlier(plan)
    if earlier is not None:
        data += f"; before that: {earlier.data}"
    return Provenance(
        teacher=file.card.name,
        teacher_sha256=file_sha256(file.path),
        data=data,
        tokens=earlier.tokens if earlier else 0,
        steps=earlier.steps if earlier else 0,
        seed=plan.training.seed,
        licence=material.draft.licence,
        version=version("outrider"),
    )


def _earlier(plan: DistillPlan) -> Provenance | None:
    """How the draft that is continued was made, where its file says so."""
    base = plan.draft.base
    if plan.draft.start != "continue" or base is None or base.suffix != ".gguf":
        return None
    return read_provenance(base)


def _prior(trainer: Trainer) -> PretrainedCalibration:
    """What to expect of the draft's acceptance, by its predictions along the held-out answers. Where it saw
    a token that it does not know ahead, it offers nothing."""
    answers = trainer.predictions()
    return pretrained_calibration(
        ModelDrafter.name,
        (
            [(float(sure), bool(right)) for sure, right in zip(a.confidences, a.matches, strict=True) if sure]
            for a in answers
        ),
    )


def _write(
    draft: Checkpoint,
    path: Path,
    plan: DistillPlan,
    material: Material,
    provenance: Provenance,
    prior: PretrainedCalibration | None = None,
) -> Written:
    return write_gguf(
        draft, path, subset=material.subset, target=material.vocabulary, provenance=provenance,
        window=material.window, prior=prior,
        quantization=plan.draft.quantization, embedding_quantization=plan.draft.embedding_quantization,
    )  # fmt: skip


def _train(
    teacher: Teacher, material: Material, prices: Prices, plan: DistillPlan, progress: Progress
) -> Trainer:
    training = material.texts(material.training, plan.context)
    held_out = material.texts(material.held_out, plan.context)
    corpus = Corpus(training, batch_tokens=plan.training.batch_tokens, seed=plan.training.seed)
    own = None
    if plan.training.on_policy:
        own = OnPolicy(
            material.training, teacher.model, material.subset,
            texts=_OWN_TEXTS, max_tokens=plan.context, seed=plan.training.seed,
        ).texts  # fmt: skip
    steps = plan.training.steps or _steps(material, corpus, held_out, prices, plan, own)
    settings = _settings(plan, steps)
    trainer = Trainer(material.draft, corpus, held_out, prices, settings, plan.out, own_texts=own)

    def told(trainer: Trainer) -> None:
        done = trainer.state.step
        best = max(trainer.state.history, key=lambda found: found.rank)
        line = f"step {done} of {steps}, loss {trainer.state.last_loss:.3f}; best: "
        line += f"agrees {best.agreement:.1%}, expected {best.speedup:.2f}x plain"
        try:
            progress("training", done / steps, line)
        except KeyboardInterrupt:  # between two steps, so that none of them is lost
            trainer.save()
            raise

    trainer.run(told)
    return trainer


def _settings(plan: DistillPlan, steps: int) -> TrainingSettings:
    asked_for = plan.training
    return TrainingSettings(
        steps=steps,
        batch_tokens=asked_for.batch_tokens,
        learning_rate=asked_for.learning_rate,
        warmup_steps=max(1, min(50, steps // 20)),
        loss=asked_for.loss,
        on_policy=asked_for.on_policy,
        quantization=plan.draft.quantization,
        embedding_quantization=plan.draft.embedding_quantization,
        evaluate_every=max(1, steps // asked_for.evaluations),
        patience=asked_for.patience,
        seed=asked_for.seed,
    )


def _steps(
    material: Material,
    corpus: Corpus,
    held_out: Sequence[Text],
    prices: Prices,
    plan: DistillPlan,
    own: OwnTexts | None,
) -> int:
    """As many steps as fit the plan's minutes, by what the first ones take; kept, since the rate of learning
    depends on their number."""
    path = plan.out / "steps.json"
    if path.exists():
        try:
            return int(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise InputError(str(path), f"it is damaged ({error})", "Remove it and checkpoint.pt.") from error
    # In the trial the whole second half is on the draft's own text.
    settings = replace(_settings(plan, _TRIED_STEPS), on_policy=1.0)
    trial = Trainer(material.draft, corpus, held_out[:1], prices, settings, plan.out, own_texts=own)
    times = trial.time_steps(_TRIED_STEPS)
    early_s, late_s = median(times[1 : _TRIED_STEPS // 2]), median(times[_TRIED_STEPS // 2 :])
    own_ratio = plan.training.on_policy / 2
    step_s = (1 - own_ratio) * early_s + own_ratio * late_s
    steps = max(_TRIED_STEPS, round(_SPENT_RATIO * plan.training.minutes * 60 / step_s))
    write_whole(path, f"{steps}\n", "number of steps")
    return steps
