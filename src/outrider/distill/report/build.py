"""The report of a distillation: put together, and written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from outrider.distill.learning_curve import LearningCurve
from outrider.distill.plan import DistillPlan
from outrider.distill.questions import asked
from outrider.distill.report.measure import measure
from outrider.distill.report.pictures import pictures
from outrider.distill.report.schema import (
    Curve,
    CurvePoint,
    Data,
    Draft,
    Evaluated,
    Figure,
    Kind,
    Measured,
    Report,
    Training,
)
from outrider.distill.run import Distilled, Progress
from outrider.files import write_whole
from outrider.lab.models import ModelFile

__all__ = ["measure_held_out", "report_of", "write_report"]


def measure_held_out(
    file: ModelFile,
    plan: DistillPlan,
    distilled: Distilled,
    progress: Progress,
    notices: list[str],
    *,
    seconds: float = 120.0,
) -> Measured | None:
    """The draft before and after training on held-out prompts, and the one that it was continued from, beside
    no draft and lookup alone. See `measure`."""
    drafts: list[tuple[Kind, Path]] = [("trained", distilled.written.path), ("first", distilled.first)]
    base = plan.draft.base
    if plan.draft.start == "continue" and base is not None and base.suffix == ".gguf":
        drafts.append(("continued", base))
    held_out = asked(plan.data).held_out
    return measure(file, drafts, held_out, plan, seconds=seconds, progress=progress, notices=notices)


def report_of(
    file: ModelFile,
    plan: DistillPlan,
    distilled: Distilled,
    measured: Measured | None,
    curve: LearningCurve | None,
    notices: Sequence[str],
) -> Report:
    """Everything that a run found."""
    return Report(
        outrider=version("outrider"),
        target=str(file.path),
        target_name=file.name,
        draft=_draft(plan, distilled),
        data=Data(
            prompts=list(plan.data.prompts),
            temperatures=list(plan.data.temperatures),
            training_answers=distilled.training_answers,
            training_tokens=distilled.training_tokens,
            held_out_answers=distilled.held_out_answers,
            coverage=distilled.coverage,
            folder=str(plan.answers_folder),
        ),
        training=_training(plan, distilled),
        measured=measured,
        learning_curve=None if curve is None else _curve(curve),
        notices=list(dict.fromkeys(notices)),
    )


def _draft(plan: DistillPlan, distilled: Distilled) -> Draft:
    shape, subset = distilled.material.draft.shape, distilled.material.subset
    written = distilled.written
    return Draft(
        path=str(written.path),
        file_bytes=written.file_bytes,
        parameters=distilled.parameters,
        layers=shape.layers,
        feed_forward=shape.feed_forward,
        known_tokens=subset.size - subset.has_other,
        target_tokens=len(subset.to_draft),
        tensor_types=dict(written.tensor_types),
        safetensors=str(plan.out / plan.name) if plan.draft.safetensors else None,
    )


def _training(plan: DistillPlan, distilled: Distilled) -> Training:
    settings = distilled.settings
    history = []
    for found in distilled.history:
        known = asdict(found)
        if math.isnan(found.train_loss):
            known["train_loss"] = None
        history.append(Evaluated(**known))
    return Training(
        steps=distilled.history[-1].step,
        best_step=distilled.best_step,
        trained_tokens=distilled.trained_tokens,
        loss=settings.loss,
        learning_rate=settings.learning_rate,
        batch_tokens=settings.batch_tokens,
        on_policy=settings.on_policy,
        seed=settings.seed,
        start=plan.draft.start,
        seconds=distilled.seconds,
        history=history,
    )


def _curve(curve: LearningCurve) -> Curve:
    return Curve(
        steps=curve.steps,
        points=[CurvePoint(**asdict(point)) for point in curve.points],
        per_doubling=None if curve.per_doubling is None else Figure.of(curve.per_doubling),
    )


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write report.json and the pictures, report-*.svg; all their paths. Raises SettingError."""
    path = folder / "report.json"
    write_whole(path, report.model_dump_json(by_alias=True, indent=1) + "\n", "report")
    written = [path]
    for name, svg in pictures(report).items():
        written.append(folder / f"report-{name}.svg")
        write_whole(written[-1], svg, "picture")
    return written
