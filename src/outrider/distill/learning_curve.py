"""What more data would bring: short trainings on parts of the answers, and how the agreement grows with them.

All trainings start from the same weights, take the same number of steps and are judged on the same held-out
answers, so that the amount of data is all that differs. They are shorter than a real training, where a small
part of the data would be seen far more often: the curve says which way it goes, not what a draft will reach.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from shutil import rmtree

import numpy as np

from outrider.core.errors import InputError, SettingError
from outrider.distill.corpus import Corpus
from outrider.distill.examples import Example
from outrider.distill.plan import DistillPlan
from outrider.distill.run import Distilled, Progress
from outrider.distill.train import Trainer
from outrider.files import write_whole
from outrider.lab.statistics import LEVEL, Interval, t_tail

__all__ = ["PARTS", "STEPS_SHARE", "LearningCurve", "Point", "learning_curve", "nested", "slope_of"]

PARTS = (0.125, 0.25, 0.5, 1.0)
"""of the training answers"""
STEPS_SHARE = 0.25
"""of the steps of the real training, for each of the short ones"""
_STAGE = "the learning curve"


@dataclass(frozen=True, slots=True)
class Point:
    """A short training on some answers of `tokens` tokens together, and what its draft does on held-out
    ones."""

    answers: int
    tokens: int
    loss: float
    acceptance: float
    agreement: float
    speedup: float


@dataclass(frozen=True, slots=True)
class LearningCurve:
    """`steps` of each training; `per_doubling`: what doubling the data added to the agreement, with the 95 %
    interval of the straight line through the points (None: too few of them)."""

    steps: int
    points: tuple[Point, ...]
    per_doubling: Interval | None


def nested(examples: Sequence[Example], part: float) -> list[Example]:
    """So large a part of the answers, chosen by hash: a smaller part lies within a larger one."""

    def place(example: Example) -> bytes:
        return blake2b(example.id.encode(), digest_size=16, person=b"curve").digest()

    ordered = sorted(examples, key=place)
    return ordered[: max(1, round(part * len(ordered)))]


def slope_of(tokens: Sequence[int], agreement: Sequence[float]) -> Interval | None:
    """The rise of the least-squares line of agreement over log2(tokens), and the 95 % interval that the
    points' distances from it allow (Student's t). None for fewer than three different amounts."""
    x, y = np.log2(np.asarray(tokens, dtype=float)), np.asarray(agreement, dtype=float)
    if len(np.unique(x)) < 3:
        return None
    spread = float(((x - x.mean()) ** 2).sum())
    slope = float(((x - x.mean()) * (y - y.mean())).sum()) / spread
    free = len(x) - 2
    left = y - y.mean() - slope * (x - x.mean())
    error = math.sqrt(float((left**2).sum()) / free / spread)
    reach = _t_quantile(free) * error
    return Interval(slope, slope - reach, slope + reach, len(x))


def _t_quantile(degrees: int) -> float:
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, degrees) > 1 - LEVEL else (low, middle)
    return high


def learning_curve(distilled: Distilled, plan: DistillPlan, progress: Progress) -> LearningCurve:
    """Train on each part, in `plan.out`/curve, where points that were made before are taken from.

    Raises SettingError when that folder cannot be written, InputError when what lies there is damaged.
    """
    steps = max(1, round(STEPS_SHARE * distilled.settings.steps))
    points: list[Point] = []
    for part in PARTS:
        folder = plan.out / "curve" / f"{part:g}"
        kept = folder / "point.json"
        if not kept.exists():
            _make(folder / "training")
            point = _train(distilled, plan, part, steps, folder / "training", progress)
            write_whole(kept, json.dumps(asdict(point)) + "\n", "point of the learning curve")
            rmtree(folder / "training", ignore_errors=True)
        points.append(_read(kept))
    slope = slope_of([point.tokens for point in points], [point.agreement for point in points])
    return LearningCurve(steps, tuple(points), slope)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"it cannot be made ({(error.strerror or str(error)).lower()})"
        raise SettingError(str(folder), reason, "Check its permissions.") from error


def _train(
    distilled: Distilled,
    plan: DistillPlan,
    part: float,
    steps: int,
    folder: Path,
    progress: Progress,
) -> Point:
    material = distilled.material
    examples = nested(material.training, part)
    settings = replace(
        distilled.settings, steps=steps, evaluate_every=steps, on_policy=0.0, warmup_steps=max(1, steps // 20)
    )
    trainer = Trainer(
        material.draft,
        Corpus(
            material.texts(examples, plan.context), batch_tokens=settings.batch_tokens, seed=settings.seed
        ),
        material.texts(material.held_out, plan.context),
        distilled.prices,
        settings,
        folder,
    )

    def told(trainer: Trainer) -> None:
        done = trainer.state.step / steps
        line = f"{len(examples)} of {len(material.training)} answers, step {trainer.state.step} of {steps}"
        progress(_STAGE, (PARTS.index(part) + done) / len(PARTS), line)

    trainer.run(told)
    last = trainer.state.history[-1]
    tokens = sum(len(example.answer) for example in examples)
    return Point(len(examples), tokens, last.loss, last.acceptance, last.agreement, last.speedup)


def _read(path: Path) -> Point:
    try:
        return Point(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(str(path), f"it is damaged ({error})", "Remove it: it is made again.") from error
