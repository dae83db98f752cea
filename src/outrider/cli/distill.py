"""`outrider distill`: a draft of one's own, and what it gained."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

from outrider.backends.gguf.log import show_log
from outrider.cli.check import print_judged
from outrider.cli.distill_settings import DistillSettings
from outrider.cli.interrupt import LoadInterrupt
from outrider.cli.output import INTERRUPTED, write, write_json
from outrider.cli.plans import hub_options, target_reference
from outrider.cli.screen import Screen
from outrider.core.errors import SettingError
from outrider.core.extras import require_extra
from outrider.core.notices import collect_notices
from outrider.core.numbers import duration, gigabytes, short_count
from outrider.core.schema import Group
from outrider.lab.distill.plan import Data, DistillPlan, Draft, Training
from outrider.lab.models import ModelFile, find_model
from outrider.models.reference import DEFAULT

if TYPE_CHECKING:  # it imports PyTorch, which takes a second or two
    from outrider.lab.distill import run

_Part = TypeVar("_Part", bound=Group)
_TRAINING = "training"
"""the stage whose steps are not interrupted"""


class StepInterrupt(LoadInterrupt):
    """During training the first SIGINT waits for the current step, which would be lost; otherwise, and the
    second time, it interrupts at once."""

    is_stepping = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_stepping and not self.requested:
            self.requested = True
        else:
            super()._note(number, frame)


@contextmanager
def show_distilling(errors: Screen) -> Iterator[run.Progress]:
    """Yields a function for reporting progress, at which a pending Ctrl-C is raised. Notices are shown at the
    end."""
    with collect_notices() as notices, StepInterrupt() as interrupt, errors.progress() as report:

        def progress(stage: str, part: float | None, line: str = "") -> None:
            interrupt.is_stepping = stage == _TRAINING
            report(stage, part or 0.0, line)
            if interrupt.requested:
                raise KeyboardInterrupt

        yield progress
    errors.note(*notices)


def distill(settings: DistillSettings) -> int:
    """Distil, and report; returns the exit status. Whatever can be refused is refused before the first
    answer."""
    require_extra("outrider distill", "distill")
    show_log(settings.verbose)
    errors = Screen(stderr=True, soft_wrap=True)
    file, plan = plan_of(settings)
    from outrider.lab.distill.questions import asked

    asked(plan.data)
    from outrider.lab.distill import run

    report: run.Report | None = None
    try:
        with show_distilling(errors) as progress:
            if settings.answers_only:
                run.record(file, plan, progress)
            else:
                report = run.distill(file, plan, progress)
    except KeyboardInterrupt:
        kept = f"what is done is kept in {plan.out}; the same command goes on from there"
        errors.say(f"interrupted: {kept}")
        return INTERRUPTED
    if report is None:
        _print_answers(plan.answers_folder, as_json=settings.print_json)
    elif settings.print_json:
        write_json(report.as_json())
    else:
        print_distilled(Screen(), report, plan, target_reference(settings))
    return 0


def _print_answers(folder: Path, *, as_json: bool) -> None:
    count = sum(1 for _ in folder.glob("*.npz"))
    if as_json:
        write_json({"schema": "outrider.distill.answers/1", "folder": str(folder), "answers": count})
    else:
        write(f"{count:,} answers in {folder}; the same command without --answers-only trains on them\n")


# The plan


def plan_of(settings: DistillSettings) -> tuple[ModelFile, DistillPlan]:
    """The target and the plan. Raises SettingError, ModelFileError or HubError."""
    _check_together(settings)
    hub = hub_options(settings)
    file = find_model(target_reference(settings) or DEFAULT, hub=hub)
    base = settings.go_on or settings.base
    plan = DistillPlan(
        target=file.path,
        out=settings.out or Path(f"distilled-{file.name}"),
        name=file.name,
        data=_part(settings, Data),
        draft=_part(settings, Draft),
        training=_part(settings, Training),
        base=None if base is None else find_model(base, hub=hub).path,
        threads=max(settings.threads, 0),
        context=settings.ctx_size,
        measures=not settings.no_report,
    )
    return file, plan


def _part(settings: DistillSettings, kind: type[_Part]) -> _Part:
    return kind(**{name: getattr(settings, name) for name in kind.model_fields})


def _check_together(settings: DistillSettings) -> None:
    if settings.go_on is not None:
        for name in ("base", "layers", "vocabulary"):
            if getattr(settings, name) is not None:
                _exclude("--continue", f"--{name}", "a draft that is continued keeps its layers and tokens")
    if settings.steps is not None and settings.minutes is not None:
        _exclude("--steps", "--minutes", "both say how long to train")
    if settings.ctx_size <= settings.max_tokens:
        reason = f"answers of {settings.max_tokens} tokens leave no room for a prompt"
        raise SettingError(f"-c {settings.ctx_size}", reason, "Give more, or a smaller --max-tokens.")


def _exclude(one: str, other: str, reason: str) -> None:
    raise SettingError(f"{one} and {other}", reason, "Give one of them.")


# The report as people read it


def print_distilled(console: Screen, report: run.Report, plan: DistillPlan, target: str | None) -> None:
    """The draft, its data, what it gained, and how to use it. `target` is its reference, None for the
    embedded default."""
    types = ", ".join(f"{name} {share:.0%}" for name, share in report.tensor_types.items() if share >= 0.01)
    known = f"all {report.target_tokens:,} tokens"
    if report.known_tokens < report.target_tokens:
        known = f"{report.known_tokens:,} of the target's {report.target_tokens:,} tokens"
    size = f"{gigabytes(report.file_bytes)} ({types}), {short_count(report.parameters)} parameters"
    prompts = ", ".join(Path(name).name for name in plan.data.prompts) or "the bundled prompts"
    answers = f"{report.training_answers:,} answers of {report.target} to {prompts}"
    first, best = report.history[0], max(report.history, key=lambda found: found.rank)
    took = f"{report.steps:,} steps, {report.trained_tokens:,} tokens; {duration(report.seconds)} in all"
    gained = (
        f"agreement {first.agreement:.1%} to {best.agreement:.1%}, Σ min(p, q) {first.acceptance:.1%} to "
        f"{best.acceptance:.1%}, loss {first.loss:.3f} to {best.loss:.3f}"
    )
    rows = [
        ("draft", [report.path, f"{size}, {report.shape.layers} layers; it knows {known}"]),
        ("data", [
            f"{answers}: {report.training_tokens:,} tokens; {report.held_out_answers:,} more held out",
            f"the draft knows {report.coverage:.1%} of the held-out answers' tokens",
        ]),
        ("training", [took, f"{gained}, at step {report.best_step:,}, which was kept"]),
    ]  # fmt: skip
    console.rows(rows, width=8, style="")
    console.print()
    if report.measured is not None:
        print_judged(console, report.measured)
    console.say("how to go on", "bold")
    named, path = "" if target is None else f"-m {shlex.quote(target)} ", shlex.quote(report.path)
    check = f"outrider check {shlex.quote(target or 'default')} {path}"
    written = str(plan.report) if plan.measures else ""
    use = [("use it", f"outrider run {named}-md {path}"), ("check it", check), ("report", written)]
    console.rows(use, width=8, style="")
