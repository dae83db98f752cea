"""`outrider distill`: a draft of one's own, and what it gained."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from outrider.backends.gguf.log import show_log
from outrider.cli.check import print_judged
from outrider.cli.distill_settings import DistillSettings
from outrider.cli.interrupt import LoadInterrupt
from outrider.cli.output import INTERRUPTED, write, write_json
from outrider.cli.plans import hub_options, target_reference
from outrider.cli.screen import Screen
from outrider.core.errors import SettingError
from outrider.core.extras import require_extra
from outrider.core.notices import collect_notices, notify
from outrider.core.numbers import duration, gigabytes, short_count
from outrider.core.schema import Group
from outrider.lab.distill.plan import Data, DistillPlan, Draft, Training
from outrider.lab.models import ModelFile, find_model
from outrider.models.reference import DEFAULT

if TYPE_CHECKING:
    from outrider.lab.distill.report import Draft as MadeDraft
    from outrider.lab.distill.report import Report
    from outrider.lab.distill.report import Training as DoneTraining
    from outrider.lab.distill.run import Progress

_Part = TypeVar("_Part", bound=Group)


_TRAINING = "training"


class StepInterrupt(LoadInterrupt):
    """During training the first SIGINT waits for the current step, which would be lost; otherwise, and the
    second time, it interrupts at once."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stepping = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_stepping and not self.requested:
            self.requested = True
        else:
            super()._note(number, frame)


@contextmanager
def show_distilling(errors: Screen) -> Iterator[Progress]:
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


class _Work(NamedTuple):
    settings: DistillSettings
    file: ModelFile
    plan: DistillPlan
    errors: Screen


def distill(settings: DistillSettings) -> int:
    """Distil, and report; returns the exit status. Whatever can be refused is refused before the first
    answer."""
    require_extra("outrider distill", "distill")
    show_log(settings.verbose)
    errors = Screen(stderr=True, soft_wrap=True)
    file, plan = plan_of(settings)
    # PyTorch takes a second or two: a wrong option is refused before.
    from outrider.lab.distill.questions import asked

    asked(plan.data)
    work = _Work(settings, file, plan, errors)
    try:
        if settings.answers_only:
            _record(work)
        else:
            _distill(work)
    except KeyboardInterrupt:
        kept = f"what is done is kept in {plan.out}; the same command goes on from there"
        errors.say(f"interrupted: {kept}")
        return INTERRUPTED
    return 0


def _record(work: _Work) -> None:
    from outrider.lab.distill.run import record

    with show_distilling(work.errors) as progress:
        record(work.file, work.plan, progress)
    folder = work.plan.answers_folder
    count = sum(1 for _ in folder.glob("*.npz"))
    if work.settings.print_json:
        write_json({"schema": "outrider.distill.answers/1", "folder": str(folder), "answers": count})
    else:
        write(f"{count:,} answers in {folder}; the same command without --answers-only trains on them\n")


def _distill(work: _Work) -> None:
    from outrider.lab.distill.measure import measure_held_out
    from outrider.lab.distill.report import write_report
    from outrider.lab.distill.run import distill as run

    settings, file, plan = work.settings, work.file, work.plan
    written: Path | None = None
    with show_distilling(work.errors) as progress:
        with collect_notices() as notices:
            made = run(file, plan, progress)
            measured = None if settings.no_report else measure_held_out(file, plan, made, progress)
            notify(*(measured.notices if measured else ()))
        notify(*notices)
        report = replace(made.report, measured=measured, notices=notices)
        if not settings.no_report:
            written = write_report(report, plan.out)
    if settings.print_json:
        write_json(report.as_json())
    else:
        print_distilled(Screen(), report, target_reference(settings), written)


# The plan

_TAKEN_NAMES = ("first", "answers")
"""Names of a run's own files"""


def plan_of(settings: DistillSettings) -> tuple[ModelFile, DistillPlan]:
    """The target and the plan. Raises SettingError, ModelFileError or HubError."""
    _check_together(settings)
    hub = hub_options(settings)
    file = find_model(target_reference(settings) or DEFAULT, hub=hub)
    name = f"{file.name}-draft" if settings.name is None else settings.name
    if not name or "/" in name or name.startswith(".") or name in _TAKEN_NAMES:
        raise SettingError(f"--name {name!r}", "not a name for the draft's file", "Give another.")
    base = settings.go_on or settings.base
    plan = DistillPlan(
        target=file.path,
        out=settings.out or Path(f"distilled-{name}"),
        name=name,
        data=_part(settings, Data),
        draft=_part(settings, Draft),
        training=_part(settings, Training),
        base=None if base is None else find_model(base, hub=hub).path,
        threads=max(settings.threads, 0),
        context=settings.ctx_size,
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


def print_distilled(console: Screen, report: Report, target: str | None, written: Path | None) -> None:
    """The draft, its data, what it gained, and how to use it. `target` is its reference, None for the
    embedded default; `written` is the report's file."""
    rows = [
        ("draft", _draft(report.draft)),
        ("data", _data(report)),
        ("training", _training(report.training)),
    ]
    console.rows(rows, width=8, style="")
    console.print()
    if report.measured is not None:
        print_judged(console, report.measured)
    console.say("how to go on", "bold")
    named, file = "" if target is None else f"-m {shlex.quote(target)} ", shlex.quote(report.draft.path)
    check = f"outrider check {shlex.quote(target or 'default')} {file}"
    use = [("use it", f"outrider run {named}-md {file}"), ("check it", check), ("report", str(written or ""))]
    console.rows(use, width=8, style="")


def _draft(draft: MadeDraft) -> list[str]:
    types = ", ".join(f"{name} {share:.0%}" for name, share in draft.tensor_types.items() if share >= 0.01)
    known = f"all {draft.target_tokens:,} tokens"
    if draft.known_tokens < draft.target_tokens:
        known = f"{draft.known_tokens:,} of the target's {draft.target_tokens:,} tokens"
    size = f"{gigabytes(draft.file_bytes)} ({types}), {short_count(draft.parameters)} parameters"
    return [draft.path, f"{size}, {draft.layers} layers; it knows {known}"]


def _data(report: Report) -> list[str]:
    data = report.data
    prompts = ", ".join(Path(name).name for name in data.prompts) or "the bundled prompts"
    answers = f"{data.training_answers:,} answers of {report.target_name} to {prompts}"
    text = f"{answers}: {data.training_tokens:,} tokens; {data.held_out_answers:,} more held out"
    return [text, f"the draft knows {data.coverage:.1%} of the held-out answers' tokens"]


def _training(training: DoneTraining) -> list[str]:
    first = training.history[0]
    best = max(training.history, key=lambda found: found.rank)
    took = (
        f"{training.steps:,} steps, {training.trained_tokens:,} tokens; {duration(training.seconds)} in all"
    )
    gained = f"agreement {first.agreement:.1%} to {best.agreement:.1%}, Σ min(p, q) {first.acceptance:.1%}"
    gained += f" to {best.acceptance:.1%}, loss {first.loss:.3f} to {best.loss:.3f}"
    return [took, f"{gained}, at step {training.best_step:,}, which was kept"]
