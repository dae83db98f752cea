"""A distillation from end to end: answers, first weights, costs, training, the file.

Every stage leaves what it made in the plan's folder and takes it up again from there, so that a run that was
stopped goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Protocol

from outrider.drafters.model import ModelDrafter
from outrider.lab.distill.corpus import Corpus
from outrider.lab.distill.evaluation import StepCosts, measure_costs
from outrider.lab.distill.export import Provenance, Written, read_provenance, write_gguf, write_head
from outrider.lab.distill.generate import Teacher, generate, open_teacher, options_of
from outrider.lab.distill.head import HeadCheckpoint
from outrider.lab.distill.hugging_face import write_safetensors
from outrider.lab.distill.material import Material, check_draft, read_material
from outrider.lab.distill.network import keep_freed_memory
from outrider.lab.distill.on_policy import OnPolicy
from outrider.lab.distill.plan import DistillPlan, claim, claim_answers, kept, make_folder
from outrider.lab.distill.questions import Asked, asked
from outrider.lab.distill.report import Data, Draft, Report, Training
from outrider.lab.distill.states import write_states
from outrider.lab.distill.train import Trainer, TrainingSettings
from outrider.lab.models import ModelFile
from outrider.models.hub import file_sha256
from outrider.models.vocab.subset import coverage
from outrider.policy.pretrained import PretrainedCalibration, pretrained_calibration

_OWN_TEXTS = 32
"""of the draft in a step on its own text"""
_TRIALS = (2, 6)
"""steps of a first trial, and of a second where the first did not take long"""
_TRIAL_RATIO = 0.03
"""of the minutes: what takes longer is not tried again"""
_SPENT_RATIO = 0.9
"""of the minutes go to steps, the others to evaluations and checkpoints"""
_REPORTED = ("batch_tokens", "learning_rate", "loss", "on_policy", "seed")
"""settings of a training that the plan gives and the report repeats"""


class Progress(Protocol):
    """Called with a stage, how far it is (0-1; None: unknown) and a line about it. What it raises ends the
    run; between steps of training nothing is lost by it."""

    def __call__(self, stage: str, part: float | None, line: str = "") -> None: ...


# The run


@dataclass(frozen=True, slots=True)
class Distilled:
    """What a distillation made: its report as far as it is known, the draft `first` before training, what it
    was made of, and the `settings` of the training, its number of steps among them."""

    report: Report
    first: Path
    material: Material
    settings: TrainingSettings
    costs: StepCosts


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
        vocabulary = teacher.target.model.vocabulary
        check_draft(file, teacher.native, plan)
        _answer(teacher, questions, plan, notices, progress)
        material = read_material(file, vocabulary, questions, plan, notices)
        if isinstance(material.draft, HeadCheckpoint):
            _record_states(teacher, material, material.draft, plan, progress)
        if not plan.training.on_policy:
            teacher.model.close()  # its vocabulary is still read
        provenance = _provenance(file, plan, material)
        write = _writer(file, plan, material)
        first = write(material.draft, plan.out / "first.gguf", provenance=provenance).path
        progress("measuring what calls cost", None)
        costs = measure_costs(file, first, plan.out / "prices.json", options_of(plan))
        trainer = _train(teacher, material, costs, plan, progress)
        state = trainer.state
        provenance = replace(
            provenance,
            tokens=provenance.tokens + state.trained_tokens,
            steps=provenance.steps + state.best_step,
        )
        path = plan.out / f"{plan.name}.gguf"
        written = write(trainer.best(), path, provenance=provenance, prior=_prior(trainer))
        notices += written.notes
        if plan.draft.safetensors:
            notices += write_safetensors(trainer.best(), plan.out / plan.name)
    training = Training(
        steps=state.history[-1].step,
        best_step=state.best_step,
        trained_tokens=state.trained_tokens,
        history=state.history,
        start=plan.draft.start,
        seconds=perf_counter() - started,
        **{name: getattr(trainer.settings, name) for name in _REPORTED},
    )
    report = Report(
        outrider=version("outrider"),
        target=str(file.path),
        target_name=file.name,
        draft=_draft(plan, material, written),
        data=_data(plan, material),
        training=training,
        notices=notices,
    )
    return Distilled(report, first, material, trainer.settings, costs)


def record(file: ModelFile, plan: DistillPlan, progress: Progress) -> list[str]:
    """Let the target answer the prompts, and train nothing; lines for the user. Raises as `distill` does."""
    claim_answers(plan)
    keep_freed_memory()
    notices: list[str] = []
    with open_teacher(file, plan, notices) as teacher:
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

    def on_done(why: str, count: int) -> None:
        nonlocal done, tokens
        done, tokens = done + 1, tokens + count
        if why:
            passed_over.append(why)
        speed = tokens / (perf_counter() - started)
        progress("the target answers", done / total, f"{done} of {total} answers, {speed:.0f} tokens/s")

    generate(
        teacher.target, everything, plan.answers_folder, model=teacher.model,
        max_tokens=plan.data.max_tokens, top=plan.data.top, seed=plan.training.seed, on_done=on_done,
    )  # fmt: skip
    if passed_over:
        notices.append(f"prompts that were passed over: {len(passed_over)}, the first since {passed_over[0]}")


def _record_states(
    teacher: Teacher, material: Material, head: HeadCheckpoint, plan: DistillPlan, progress: Progress
) -> None:
    assert material.states is not None
    examples = [*material.held_out, *material.training]
    make_folder(material.states)

    def on_done(count: int) -> None:
        progress("the target's states", count / len(examples), f"{count} of {len(examples)} answers")

    teacher.model.close()  # its KV takes room; what it runs on stays
    write_states(teacher.native.weights, head.layers, examples, material.states, plan.context, on_done)


def _writer(file: ModelFile, plan: DistillPlan, material: Material) -> Callable[..., Written]:
    """Writes a draft of this material, given its weights, path and provenance."""
    draft = plan.draft
    types: dict[str, Any] = {
        "quantization": draft.quantization,
        "embedding_quantization": draft.embedding_quantization,
    }
    if isinstance(material.draft, HeadCheckpoint):
        return partial(write_head, target=file.path, **types)
    return partial(
        write_gguf, subset=material.subset, target=material.vocabulary, window=material.window, **types
    )


def _provenance(file: ModelFile, plan: DistillPlan, material: Material) -> Provenance:
    files = ", ".join(Path(name).name for name in plan.data.prompts)
    temperatures = ", ".join(f"{t:g}" for t in plan.data.temperatures)
    data = f"{len(material.training)} answers of the teacher to "
    data += f"{files or 'the prompts that come with Outrider'}, temperatures {temperatures}"
    data += "; some recorded by other runs" if plan.data.more else ""
    base = plan.continued_gguf
    earlier = None if base is None else read_provenance(base)
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


def _prior(trainer: Trainer) -> PretrainedCalibration:
    """What to expect of the draft's acceptance, by its predictions along the held-out answers. Where it
    predicts a token that it does not know, it offers nothing."""
    answers = trainer.predictions()
    return pretrained_calibration(
        ModelDrafter.name,
        (
            [
                (float(c), bool(correct))
                for c, correct in zip(a.confidences[0], a.matches[0], strict=True)
                if c
            ]
            for a in answers
        ),
    )


def _draft(plan: DistillPlan, material: Material, written: Written) -> Draft:
    shape, subset = material.draft.shape, material.subset
    return Draft(
        path=str(written.path),
        file_bytes=written.file_bytes,
        kind=plan.draft.kind,
        parameters=material.draft.parameters,
        layers=shape.layers,
        feed_forward=shape.feed_forward,
        known_tokens=subset.size - subset.has_other,
        target_tokens=len(subset.to_draft),
        tensor_types=dict(written.tensor_types),
        safetensors=str(plan.out / plan.name) if plan.draft.safetensors else None,
    )


def _data(plan: DistillPlan, material: Material) -> Data:
    return Data(
        prompts=list(plan.data.prompts),
        temperatures=list(plan.data.temperatures),
        training_answers=len(material.training),
        training_tokens=sum(len(example.answer) for example in material.training),
        held_out_answers=len(material.held_out),
        coverage=coverage(material.subset, (example.answer for example in material.held_out)),
        folder=str(plan.answers_folder),
    )


# The training


def _train(
    teacher: Teacher, material: Material, costs: StepCosts, plan: DistillPlan, progress: Progress
) -> Trainer:
    wanted = plan.training
    corpus = Corpus(
        material.texts(material.training, plan.context), batch_tokens=wanted.batch_tokens, seed=wanted.seed
    )
    own = None
    if wanted.on_policy:
        own = OnPolicy(
            material.training, teacher.model, material.subset, _OWN_TEXTS, plan.context, wanted.seed
        ).texts
    held_out = material.texts(material.held_out, plan.context)
    trainer_of = partial(Trainer, material.draft, corpus, costs=costs, folder=plan.out, own_texts=own)
    steps = wanted.steps
    if steps is None:

        def trial(count: int) -> Trainer:
            # Its whole second half is on the draft's own text.
            settings = replace(_settings(plan, count), on_policy=1.0)
            return trainer_of(held_out=held_out[:1], settings=settings)

        steps = _steps(plan, trial)
    trainer = trainer_of(held_out=held_out, settings=_settings(plan, steps))

    def on_step(trainer: Trainer) -> None:
        done = trainer.state.step
        best = max(trainer.state.history, key=lambda found: found.rank)
        line = f"step {done} of {steps}, loss {trainer.state.last_loss:.3f}; best: "
        line += f"agrees {best.agreement:.1%}, expected {best.speedup:.2f}x plain"
        try:
            progress("training", done / steps, line)
        except KeyboardInterrupt:  # between two steps, so that none of them is lost
            trainer.save()
            raise

    trainer.run(on_step)
    return trainer


def _settings(plan: DistillPlan, steps: int) -> TrainingSettings:
    wanted = plan.training
    return TrainingSettings(
        steps=steps,
        warmup_steps=max(1, min(50, steps // 20)),
        quantization=plan.draft.quantization,
        embedding_quantization=plan.draft.embedding_quantization,
        evaluate_every=max(1, steps // wanted.evaluations),
        patience=wanted.patience,
        **{name: getattr(wanted, name) for name in _REPORTED},
    )


def _steps(plan: DistillPlan, trial: Callable[[int], Trainer]) -> int:
    """As many steps as fit the plan's minutes, by the time of the first ones; stored, since the learning rate
    depends on their number."""
    wanted_s = plan.training.minutes * 60

    def timed() -> int:
        for count in _TRIALS:
            times = trial(count).time_steps(count)
            if sum(times) > _TRIAL_RATIO * wanted_s:
                break
        early_s, late_s = median(times[1 : count // 2] or times[:1]), median(times[count // 2 :])
        own_ratio = plan.training.on_policy / 2
        step_s = (1 - own_ratio) * early_s + own_ratio * late_s
        return max(_TRIALS[-1], round(_SPENT_RATIO * wanted_s / step_s))

    return kept(plan.out / "steps.json", timed, int, "number of steps", "Remove it and checkpoint.pt.")
