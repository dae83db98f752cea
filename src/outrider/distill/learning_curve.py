"""What more data would bring: short trainings on parts of the answers, and how the agreement grows with them.

All trainings start from the same weights, take the same number of steps and are judged on the same held-out
answers, so that the amount of data is all that differs. They are shorter than a real training, where a small
part of the data would be seen far more often: the curve says which way it goes, not what a draft will reach.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from shutil import rmtree

import numpy as np

from outrider.core.errors import InputError
from outrider.core.files import write_whole
from outrider.distill.corpus import Corpus
from outrider.distill.examples import Example
from outrider.distill.plan import DistillPlan, make_folder
from outrider.distill.report import Curve, CurvePoint, Figure
from outrider.distill.run import Distilled, Progress
from outrider.distill.train import Trainer
from outrider.lab.statistics import Interval, t_quantile

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
        stored = folder / "point.json"
        if not stored.exists():
            make_folder(folder / "training", "Check its permissions.")
            point = _train(distilled, plan, part, steps, folder / "training", progress)
            write_whole(stored, json.dumps(point.model_dump()) + "\n", "point of the learning curve")
            rmtree(folder / "training", ignore_errors=True)
        try:
            points.append(CurvePoint.model_validate(json.loads(stored.read_text(encoding="utf-8"))))
        except (OSError, ValueError) as error:
            way_out = "Remove it: it is made again."
            raise InputError(str(stored), f"it is damaged ({error})", way_out) from error
    slope = slope_of([point.tokens for point in points], [point.agreement for point in points])
    return Curve(steps=steps, points=points, per_doubling=None if slope is None else Figure.of(slope))


def _train(
    distilled: Distilled, plan: DistillPlan, part: float, steps: int, folder: Path, progress: Progress
) -> CurvePoint:
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
    return CurvePoint(
        answers=len(examples),
        tokens=sum(len(example.answer) for example in examples),
        loss=last.loss,
        acceptance=last.acceptance,
        agreement=last.agreement,
        speedup=last.speedup,
    )
