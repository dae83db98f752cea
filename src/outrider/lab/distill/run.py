"""A distillation from end to end: answers, first weights, costs, training, the file.

Every stage leaves what it made in the plan's folder and takes it up again from there, so that a run that was
stopped goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Protocol

import torch

from outrider.backends.gguf.options import LoadOptions
from outrider.backends.machine import physical_cores
from outrider.core.notices import notify
from outrider.core.schema import values_for
from outrider.costs.expected_speed import StepCosts
from outrider.drafters.model import ModelDrafter
from outrider.lab.distill.calibration import pretrained_calibration
from outrider.lab.distill.evaluation import measure_costs
from outrider.lab.distill.export import Provenance, Written, read_provenance, write_gguf
from outrider.lab.distill.generate import generate, open_target
from outrider.lab.distill.material import Material, read_material
from outrider.lab.distill.network import keep_freed_memory
from outrider.lab.distill.on_policy import OnPolicy
from outrider.lab.distill.plan import USUAL_MINUTES, DistillPlan, claim, claim_answers, kept
from outrider.lab.distill.questions import Asked, asked
from outrider.lab.distill.report import Data, Draft, Report, Training
from outrider.lab.distill.starting import first_draft
from outrider.lab.distill.train import Trainer, TrainingSettings
from outrider.lab.loaded import LoadedTarget
from outrider.lab.models import ModelFile
from outrider.models.hub import file_sha256
from outrider.models.vocab.subset import coverage
from outrider.policy.state import PretrainedCalibration

_OWN_TEXTS = 32
"""of the draft in a step on its own text"""
_TRIALS = (2, 6)
"""steps of a first trial, and of a second where the first did not take long"""
_TRIAL_RATIO = 0.03
"""of the minutes: what takes longer is not tried again"""
_SPENT_RATIO = 0.9
"""of the minutes go to steps, the others to evaluations and checkpoints"""
_EVALUATIONS = 12
"""of a training that is not ended early"""


class Progress(Protocol):
    """Called with a stage, how far it is (0-1; None: unknown) and a line about it. What it raises ends the
    run; between steps of training nothing is lost by it."""

    def __call__(self, stage: str, part: float | None, line: str = "") -> None: ...


# The run


@dataclass(frozen=True, slots=True)
class Distilled:
    """What a distillation made: its report as far as it is known, and the draft `first` before training."""

    report: Report
    first: Path


def distill(file: ModelFile, plan: DistillPlan, progress: Progress) -> Distilled:
    """Train a draft for a target on its own answers, and write it to `plan.out`.

    Raises InputError and its kinds for what cannot be used, BackendError when a call fails.
    """
    started = perf_counter()
    claim(plan)
    keep_freed_memory()
    torch.set_num_threads(plan.threads or physical_cores())
    questions = asked(plan.data)
    with open_target(file, plan) as target:
        vocabulary = target.model.vocabulary
        first_draft(plan, [], vocabulary)  # one that cannot be made is refused before hours of answers
        _answer(target, questions, plan, progress)
        material = read_material(plan, questions, vocabulary)
        if not plan.training.on_policy:
            target.model.close()  # its vocabulary is still read
        provenance = _provenance(file, plan, material)
        write = partial(
            write_gguf, subset=material.subset, target=vocabulary, window=material.window,
            quantization=plan.draft.quant, embedding_quantization=plan.draft.embedding_quant,
        )  # fmt: skip
        first = write(material.draft, plan.out / "first.gguf", provenance=provenance).path
        progress("measuring what calls cost", None)
        options = LoadOptions(threads=plan.threads)
        costs = measure_costs(file.path, first, plan.out / "prices.json", options)
        trainer = _train(target, material, costs, plan, progress)
        state = trainer.state
        provenance = replace(
            provenance,
            tokens=provenance.tokens + state.trained_tokens,
            steps=provenance.steps + state.best_step,
        )
        path = plan.out / f"{plan.name}.gguf"
        written = write(trainer.best(), path, provenance=provenance, prior=_prior(trainer))
        notify(*written.notes)
    training = Training(
        **values_for(Training, plan.training) | {"steps": state.history[-1].step},
        best_step=state.best_step,
        trained_tokens=state.trained_tokens,
        history=state.history,
        start=plan.draft.start,
        seconds=perf_counter() - started,
    )
    report = Report(
        outrider=version("outrider"),
        target=str(file.path),
        target_name=file.name,
        draft=_draft(material, written),
        data=_data(plan, material),
        training=training,
    )
    return Distilled(report, first)


def record(file: ModelFile, plan: DistillPlan, progress: Progress) -> None:
    """Let the target answer the prompts, and train nothing. Raises as `distill` does."""
    claim_answers(plan)
    with open_target(file, plan) as target:
        _answer(target, asked(plan.data), plan, progress)


def _answer(target: LoadedTarget, questions: Asked, plan: DistillPlan, progress: Progress) -> None:
    everything = [*questions.held_out, *questions.training]
    total = sum(1 + len(question.prompt.follow_ups) for question in everything)
    done, tokens = 0, 0
    reasons: list[str] = []
    started = perf_counter()

    def on_done(why: str, count: int) -> None:
        nonlocal done, tokens
        done, tokens = done + 1, tokens + count
        if why:
            reasons.append(why)
        speed = tokens / (perf_counter() - started)
        progress("the target answers", done / total, f"{done} of {total} answers, {speed:.0f} tokens/s")

    generate(
        target, everything, plan.answers_folder, max_tokens=plan.data.max_tokens, seed=plan.training.seed,
        on_done=on_done,
    )  # fmt: skip
    passed_over(reasons)


def passed_over(reasons: Sequence[str]) -> None:
    """Say why prompts have no answer."""
    if reasons:
        notify(f"prompts that were skipped: {len(reasons)}, the first because {reasons[0]}")


def _provenance(file: ModelFile, plan: DistillPlan, material: Material) -> Provenance:
    files = ", ".join(Path(name).name for name in plan.data.prompts)
    temperatures = ", ".join(f"{t:g}" for t in plan.data.temperatures)
    data = f"{len(material.training)} answers of the teacher to "
    data += f"{files or 'the prompts that come with Outrider'}, temperatures {temperatures}"
    earlier = None if plan.continued is None else read_provenance(plan.continued)
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
    answers = (zip(a.confidences, a.matches, strict=True) for a in trainer.predictions())
    offered = ([(float(sure), bool(correct)) for sure, correct in answer if sure] for answer in answers)
    return pretrained_calibration(ModelDrafter.name, offered)


def _draft(material: Material, written: Written) -> Draft:
    shape, subset = material.draft.shape, material.subset
    return Draft(
        path=str(written.path),
        file_bytes=written.file_bytes,
        parameters=shape.parameters,
        layers=shape.layers,
        feed_forward=shape.feed_forward,
        known_tokens=subset.size - subset.has_other,
        target_tokens=len(subset.to_draft),
        tensor_types=dict(written.tensor_types),
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
    target: LoadedTarget, material: Material, costs: StepCosts, plan: DistillPlan, progress: Progress
) -> Trainer:
    wanted, own = plan.training, None
    if wanted.on_policy:
        own = OnPolicy(
            material.training, target.model, material.subset, _OWN_TEXTS, plan.context, wanted.seed
        ).texts
    training, held_out = (material.texts(s, plan.context) for s in (material.training, material.held_out))
    trainer_of = partial(Trainer, material.draft, training, costs=costs, folder=plan.out, own_texts=own)

    def trial(count: int) -> Trainer:
        # Its whole second half is on the draft's own text.
        settings = replace(_settings(plan, count), on_policy=1.0)
        return trainer_of(held_out=held_out[:1], settings=settings)

    steps = wanted.steps or _steps(plan, trial)
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
    given = values_for(TrainingSettings, plan.draft) | values_for(TrainingSettings, plan.training)
    return TrainingSettings(**given | {"steps": steps, "evaluate_every": max(1, steps // _EVALUATIONS)})


def _steps(plan: DistillPlan, trial: Callable[[int], Trainer]) -> int:
    """As many steps as fit the plan's minutes, by the time of the first ones; stored, since the learning rate
    depends on their number."""
    wanted_s = (plan.training.minutes or USUAL_MINUTES) * 60

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
