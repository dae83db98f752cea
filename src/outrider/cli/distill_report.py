"""What came of a distillation, as people read it, in 80 columns; and how far it is while it runs."""

from __future__ import annotations

import math
import shlex
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from types import FrameType

from rich.console import Console
from rich.text import Text

from outrider.cli.bench import show_progress
from outrider.cli.interrupt import LoadInterrupt
from outrider.cli.output import print_rows, print_table
from outrider.lab.distill.report import NAMES, Draft, Measured, Report, Training
from outrider.lab.distill.run import Progress
from outrider.lab.numbers import NOTHING, digits, duration, percent
from outrider.lab.progress import Progress as Shown
from outrider.lab.statistics import Interval

_WORDS = (
    "Agrees: the draft's most likely token is the answer's; accepted: of the tokens that the automatic "
    "choice drafts without lookup; bound: the share of the speed that perfect hindsight would allow. "
    "Speeds are those of the automatic choice with lookup, replayed at measured costs."
)


def print_distilled(console: Console, report: Report, target: str | None, files: Sequence[Path]) -> None:
    """The draft, what it was made of, what it gained, and how to use it. `target`: the reference that named
    it, None for the embedded default; `files`: those of the report."""
    print_rows(
        console, [*_draft(report.draft), *_data(report), *_training(report.training)], width=8, style=""
    )
    if report.measured is not None:
        _measured(console, report.measured)
    console.print(Text("\nhow to go on", style="bold"))
    print_rows(console, _use(report.draft, target, files), width=8, style="")


def _draft(draft: Draft) -> list[tuple[str, str]]:
    types = ", ".join(f"{name} {share:.0%}" for name, share in draft.tensor_types.items() if share >= 0.01)
    known = f"all {draft.target_tokens:,} tokens"
    if draft.known_tokens < draft.target_tokens:
        known = f"{draft.known_tokens:,} of the target's {draft.target_tokens:,} tokens"
    size = f"{draft.file_bytes / 1e6:.1f} MB ({types}), {draft.parameters / 1e6:.1f}M parameters"
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


def _measured(console: Console, measured: Measured) -> None:
    said = f"\non {measured.answers} held-out answers, through llama.cpp ({measured.tokens:,} tokens)"
    console.print(Text(said, style="bold"))
    plain, bound = measured.plain_tokens_per_s, measured.lookup.bound.value

    def line(name: str, auto: Interval, bound: float, *rest: str) -> tuple[str, ...]:
        agrees, accepted, over_lookup = rest or (NOTHING, NOTHING, NOTHING)
        speed = digits(plain * auto.value)
        return name, agrees, accepted, speed, _factor(auto), over_lookup, percent(auto.value / bound)

    rows: list[tuple[str, ...]] = [("no draft", NOTHING, NOTHING, digits(plain), NOTHING, NOTHING, NOTHING)]
    rows.append(line("lookup alone", measured.lookup.auto, bound))
    positions = []
    for kind, name in NAMES.items():
        draft = measured.drafts.get(kind)
        if draft is None:
            continue
        if draft.acceptance is None or draft.speedups is None or draft.over_lookup is None:
            console.print(Text(f"{name}: {draft.verdict.sentence}"))
            continue
        agrees, accepted = percent(draft.acceptance.rate.value), percent(measured.accepted[kind])
        shares = (agrees, accepted, _factor(draft.over_lookup))
        rows.append(line(name, draft.speedups.auto, draft.speedups.bound.value, *shares))
        by_position = draft.acceptance.by_position
        shown = " ".join(NOTHING if share is None else f"{share:.0%}" for share in by_position)
        positions.append((name, shown))
    head = ("", "agrees", "accepted", "tokens/s", "over plain", "over lookup", "bound")
    print_table(console, head, rows, left=("",), gap=1)
    console.print(Text("\nright at the first, second, … place of a draft", style="bold"))
    print_rows(console, positions, width=8, style="")
    trained = measured.drafts.get("trained")
    step = "" if trained is None or trained.step_ratio is None else f"{trained.step_ratio:.2f}"
    cost = f"A step of the draft takes {step} of the target's. " if step else ""
    console.print(Text(f"\n{cost}{_WORDS}", style="dim"))


def _factor(interval: Interval) -> str:
    low, high = (f"{end:.2f}" if 0 < end < math.inf else "?" for end in (interval.low, interval.high))
    return f"{interval.value:.2f} ({low}-{high})"


def _use(draft: Draft, target: str | None, files: Sequence[Path]) -> list[tuple[str, str]]:
    model = "" if target is None else f"-m {shlex.quote(target)} "
    file = shlex.quote(draft.path)
    checked = shlex.quote(target or "default")
    rows = [("use it", f"outrider run {model}-md {file}"), ("check it", f"outrider check {checked} {file}")]
    return [*rows, *(("report" if not i else "", str(path)) for i, path in enumerate(files))]


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
