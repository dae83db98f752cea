"""What came of a distillation, as people read it, in 80 columns."""

from __future__ import annotations

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
from outrider.lab.distill.report import (
    NAMES,
    Contender,
    Curve,
    Data,
    Draft,
    Figure,
    Kind,
    Measured,
    Report,
    Training,
)
from outrider.lab.distill.run import Progress
from outrider.lab.numbers import NOTHING, digits, duration, percent
from outrider.lab.progress import Progress as Shown

_ORDER: tuple[Kind, ...] = ("none", "lookup", "continued", "first", "trained")


def print_distilled(console: Console, report: Report, target: str | None, files: Sequence[Path]) -> None:
    """The draft, what it was made of, what it gained, and how to use it. `target`: the reference that named
    it, None for the embedded default; `files`: those of the report."""
    print_rows(
        console, [*_draft(report.draft), *_data(report), *_training(report.training)], width=8, style=""
    )
    if report.measured is not None:
        _measured(console, report.measured)
    if report.learning_curve is not None:
        console.print(Text("\nmore data", style="bold"))
        print_rows(console, _curve(report.learning_curve), width=8, style="")
    console.print(Text("\nhow to go on", style="bold"))
    print_rows(console, _use(report.draft, target, files), width=8, style="")


def _draft(draft: Draft) -> list[tuple[str, str]]:
    types = ", ".join(f"{name} {share:.0%}" for name, share in draft.tensor_types.items() if share >= 0.01)
    known = f"all {draft.target_tokens:,} tokens"
    if draft.known_tokens < draft.target_tokens:
        known = f"{draft.known_tokens:,} of the target's {draft.target_tokens:,} tokens"
    size = f"{draft.file_bytes / 1e6:.1f} MB ({types}), {draft.parameters / 1e6:.1f}M parameters"
    kind = "an EAGLE-3 head" if draft.kind == "eagle3" else f"{draft.layers} layers"
    rows = [("draft", draft.path), ("", f"{size}, {kind}; it knows {known}")]
    return [*rows, ("", f"safetensors: {draft.safetensors}")] if draft.safetensors else rows


def _data(report: Report) -> list[tuple[str, str]]:
    data: Data = report.data
    prompts = ", ".join(Path(name).name for name in data.prompts) or "the bundled prompts"
    answers = f"{data.training_answers:,} answers of {report.target_name} to {prompts}"
    text = f"{answers}: {data.training_tokens:,} tokens; {data.held_out_answers:,} more held out"
    return [("data", text), ("", f"the draft knows {data.coverage:.1%} of the held-out answers' tokens")]


def _training(training: Training) -> list[tuple[str, str]]:
    first = training.history[0]
    best = max(training.history, key=lambda found: (found.tokens_per_s, found.agreement))
    took = (
        f"{training.steps:,} steps, {training.trained_tokens:,} tokens; {duration(training.seconds)} in all"
    )
    gained = f"agreement {first.agreement:.1%} to {best.agreement:.1%}, Σ min(p, q) {first.acceptance:.1%}"
    gained += f" to {best.acceptance:.1%}, loss {first.loss:.3f} to {best.loss:.3f}"
    return [("training", took), ("", f"{gained}, at step {training.best_step:,}, which was kept")]


def _measured(console: Console, measured: Measured) -> None:
    said = f"\non {measured.answers} held-out answers, through llama.cpp ({measured.tokens:,} tokens)"
    console.print(Text(said, style="bold"))
    head = ("", "agrees", "accepted", "tokens/s", "over plain", "over lookup", "bound")
    found = [contender for kind in _ORDER if (contender := measured.of(kind)) is not None]
    print_table(console, head, map(_line, found), left=("",), gap=1)
    trained, lookup = measured.of("trained"), measured.of("lookup")
    console.print()
    if trained is not None:
        _positions(console, measured, trained)
        _categories(console, trained)
        _in_words(console, trained)
    elif lookup is not None:
        _categories(console, lookup)


def _line(found: Contender) -> tuple[str, ...]:
    return (
        NAMES[found.kind],
        _rounded(found.agreement),
        _rounded(found.accepted_by_choice),
        digits(found.tokens_per_s),
        NOTHING if found.kind == "none" else _factor(found.over_plain),
        _factor(found.over_lookup),
        _rounded(found.of_bound),
    )


def _positions(console: Console, measured: Measured, trained: Contender) -> None:
    rows = []
    for found in (measured.of("continued"), measured.of("first"), trained):
        if found is not None:
            shares = " ".join(
                NOTHING if share is None else f"{share:.0%}" for share in found.agreement_by_position
            )
            rows.append((NAMES[found.kind], shares))
    console.print(Text("right at the first, second, … place of a draft", style="bold"))
    print_rows(console, rows, width=8, style="")


def _categories(console: Console, found: Contender) -> None:
    head = ("by category", "answers", "agrees", "over plain", "over lookup")
    rows = [
        (
            row.category,
            str(row.answers),
            _share(row.agreement),
            _factor(row.over_plain),
            _factor(row.over_lookup),
        )
        for row in found.categories
    ]
    console.print(Text())
    print_table(console, head, rows, left=("by category",), gap=1)


def _in_words(console: Console, trained: Contender) -> None:
    """What the columns are."""
    words = (
        "agrees: the draft's most likely token is the answer's; accepted: of the tokens that the automatic "
        "choice drafts with the draft alone; speeds: of the automatic choice with lookup, replayed at the "
        "costs measured here; bound: the share of the speed that hindsight would allow; 95 % intervals by "
        "answer"
    )
    if trained.step_ratio is not None:
        words = f"a step of the draft takes {trained.step_ratio:.2f} of the target's; {words}"
    console.print(Text(f"\n{words}", style="dim"))


def _ends(figure: Figure, shown: Callable[[float], str]) -> str:
    low, high = ("?" if end is None else shown(end) for end in (figure.low, figure.high))
    return f"{low}-{high}"


def _rounded(figure: Figure | None) -> str:
    return percent(None if figure is None else figure.value)


def _share(figure: Figure | None) -> str:
    if figure is None:
        return NOTHING
    return f"{figure.value:.0%} ({_ends(figure, lambda end: f'{100 * end:.0f}')})"


def _factor(figure: Figure | None) -> str:
    if figure is None:
        return NOTHING
    return f"{figure.value:.2f} ({_ends(figure, lambda end: f'{end:.2f}')})"


def _curve(curve: Curve) -> list[tuple[str, str]]:
    rows = [
        (f"{point.answers:,}", f"answers, {point.tokens:,} tokens: agrees {point.agreement:.1%}")
        for point in curve.points
    ]
    return [*rows, ("", _doubling(curve))]


def _doubling(curve: Curve) -> str:
    runs = f"short trainings of {curve.steps:,} steps each"
    slope = curve.per_doubling
    if slope is None or slope.low is None or slope.high is None:
        return f"too few amounts of data for a line ({runs})"
    ends = f"{100 * slope.low:+.1f} to {100 * slope.high:+.1f}"
    added = f"each doubling added {100 * slope.value:+.1f} points of agreement ({ends}) in {runs}"
    if slope.low > 0:
        return f"{added}: more data should help, by how much in a whole training is open"
    if slope.high < 0:
        return f"{added}: they are too short for so much data, so train longer first"
    return f"{added}: whether more data would help cannot be said from them"


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
