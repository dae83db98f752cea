"""What came of a distillation, as people read it, in 80 columns; and how far it is while it runs."""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from types import FrameType

from rich.console import Console
from rich.text import Text

from outrider.cli.bench import show_progress
from outrider.cli.check import print_judged
from outrider.cli.interrupt import LoadInterrupt
from outrider.cli.output import print_rows
from outrider.core.numbers import duration, gigabytes, short_count
from outrider.lab.distill.report import Draft, Report, Training
from outrider.lab.distill.run import Progress
from outrider.lab.progress import Progress as Shown


def print_distilled(console: Console, report: Report, target: str | None, written: Path | None) -> None:
    """The draft, what it was made of, what it gained, and how to use it. `target`: the reference that named
    it, None for the embedded default; `written`: the file of the report."""
    print_rows(
        console, [*_draft(report.draft), *_data(report), *_training(report.training)], width=8, style=""
    )
    console.print()
    if report.measured is not None:
        print_judged(console, report.measured)
    console.print(Text("how to go on", style="bold"))
    print_rows(console, _use(report.draft, target, written), width=8, style="")


def _draft(draft: Draft) -> list[tuple[str, str]]:
    types = ", ".join(f"{name} {share:.0%}" for name, share in draft.tensor_types.items() if share >= 0.01)
    known = f"all {draft.target_tokens:,} tokens"
    if draft.known_tokens < draft.target_tokens:
        known = f"{draft.known_tokens:,} of the target's {draft.target_tokens:,} tokens"
    size = f"{gigabytes(draft.file_bytes)} ({types}), {short_count(draft.parameters)} parameters"
    return [("draft", draft.path), ("", f"{size}, {draft.layers} layers; it knows {known}")]


def _data(report: Report) -> list[tuple[str, str]]:
    data = report.data
    prompts = ", ".join(Path(name).name for name in data.prompts) or "the bundled prompts"
    answers = f"{data.training_answers:,} answers of {report.target_name} to {prompts}"
    text = f"{answers}: {data.training_tokens:,} tokens; {data.held_out_answers:,} more held out"
    return [("data", text), ("", f"the draft knows {data.coverage:.1%} of the held-out answers' tokens")]


def _training(training: Training) -> list[tuple[str, str]]:
    first = training.history[0]
    best = max(training.history, key=lambda found: found.rank)
    took = (
        f"{training.steps:,} steps, {training.trained_tokens:,} tokens; {duration(training.seconds)} in all"
    )
    gained = f"agreement {first.agreement:.1%} to {best.agreement:.1%}, Σ min(p, q) {first.acceptance:.1%}"
    gained += f" to {best.acceptance:.1%}, loss {first.loss:.3f} to {best.loss:.3f}"
    return [("training", took), ("", f"{gained}, at step {training.best_step:,}, which was kept")]


def _use(draft: Draft, target: str | None, written: Path | None) -> list[tuple[str, str]]:
    model = "" if target is None else f"-m {shlex.quote(target)} "
    file = shlex.quote(draft.path)
    checked = shlex.quote(target or "default")
    rows = [("use it", f"outrider run {model}-md {file}"), ("check it", f"outrider check {checked} {file}")]
    return [*rows, *([("report", str(written))] if written is not None else [])]


# How far a distillation is: one line on a terminal, plain ones now and then elsewhere; its end by Ctrl-C.

_TRAINING = "training"
_RECENT_S = 120.0
"""The time left follows the speed of so many last seconds: answers that were there already took none."""


class StepInterrupt(LoadInterrupt):
    """While a draft is trained, the first SIGINT waits for the step under way, which would be lost; a second
    one does not. Everywhere else it ends at once what was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stepping = False

    def check(self) -> None:
        """Raise KeyboardInterrupt where a SIGINT waits."""
        if self.requested:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_stepping and not self.requested:
            self.requested = True
        else:
            super()._note(number, frame)


class TimeLeft:
    """Seconds until a stage is over, by how fast it went lately."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._stage = ""
        self._seen: deque[tuple[float, float]] = deque()

    def of(self, stage: str, part: float | None) -> float | None:
        """The estimate, given how far the stage is; None as long as there is none."""
        if stage != self._stage:
            self._stage = stage
            self._seen.clear()
        if part is None:
            return None
        now = self._clock()
        self._seen.append((now, part))
        while len(self._seen) > 2 and now - self._seen[1][0] >= _RECENT_S:
            self._seen.popleft()
        then, before = self._seen[0]
        return (now - then) / (part - before) * (1 - part) if part > before else None


@contextmanager
def show_distilling(
    errors: Console, interrupt: StepInterrupt, clock: Callable[[], float] = monotonic
) -> Iterator[Progress]:
    """Where to report how far it is, after every step: the time left is that of the stage alone."""
    left = TimeLeft(clock)
    with show_progress(errors, clock, by_stage=True) as show:

        def progress(stage: str, part: float | None, line: str = "") -> None:
            interrupt.is_stepping = stage == _TRAINING
            show(Shown(stage, part or 0.0, left.of(stage, part), line))
            interrupt.check()

        yield progress
