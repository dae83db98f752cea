"""`outrider distill`: a draft of one's own, and what it gained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.text import Text

from outrider.backends.gguf import show_log
from outrider.cli.distill_settings import DistillSettings
from outrider.cli.output import INTERRUPTED, print_notes, readable, write, write_json
from outrider.cli.plans import hub_options
from outrider.core.errors import SettingError
from outrider.core.extras import require_extra
from outrider.core.notices import collect_notices, notify
from outrider.core.schema import Group
from outrider.lab.distill.plan import Data, DistillPlan, Draft, Training
from outrider.lab.models import ModelFile, find_model
from outrider.models import DEFAULT

if TYPE_CHECKING:
    from outrider.lab.distill.run import Progress

_Part = TypeVar("_Part", bound=Group)


@dataclass(frozen=True, slots=True)
class _Work:
    """What is to be done, for whom it is shown."""

    settings: DistillSettings
    file: ModelFile
    plan: DistillPlan
    errors: Console

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """Where to report how far it is; Ctrl-C waits for the end of a step of training. Notices are shown at
        the end."""
        from outrider.cli.distill_report import StepInterrupt, show_distilling

        with (
            collect_notices() as notices,
            StepInterrupt() as interrupt,
            show_distilling(self.errors, interrupt) as progress,
        ):
            yield progress
        print_notes(self.errors, notices)


def distill(settings: DistillSettings) -> int:
    """Distil, and say what came of it; returns the exit status. All that can be refused is refused before
    the first answer."""
    require_extra("outrider distill", "distill")
    if settings.ray is not None:
        require_extra("--ray", "ray", "leave --ray out")
    show_log(settings.verbose)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    file, plan = plan_of(settings)
    # PyTorch takes a second or two: a wrong option is refused before.
    from outrider.lab.distill.questions import asked

    asked(plan.data)
    work = _Work(settings, file, plan, errors)
    try:
        if settings.ray is not None:
            _answer_on_cluster(work, settings.ray)
        if settings.answers_only:
            _record(work)
        else:
            _distill(work)
    except KeyboardInterrupt:
        kept = f"what is done is kept in {plan.out}; the same command goes on from there"
        errors.print(Text(readable(f"interrupted: {kept}")))
        return INTERRUPTED
    return 0


def _answer_on_cluster(work: _Work, address: str) -> None:
    """Have the answers made there; what follows finds them."""
    from outrider.fleet.ray.answering import answer
    from outrider.fleet.ray.joining import joined

    with joined(address), work.progress() as progress:
        hub = hub_options(work.settings)
        answer(work.file, work.plan, _reference(work.settings) or DEFAULT, hub, progress)


def _record(work: _Work) -> None:
    from outrider.lab.distill.run import record

    with work.progress() as progress:
        record(work.file, work.plan, progress)
    folder = work.plan.answers_folder
    count = sum(1 for _ in folder.glob("*.npz"))
    if work.settings.print_json:
        write_json({"schema": "outrider.distill.answers/1", "folder": str(folder), "answers": count})
    else:
        write(f"{count:,} answers in {folder}; the same command without --answers-only trains on them\n")


def _distill(work: _Work) -> None:
    from outrider.cli.distill_report import print_distilled
    from outrider.lab.distill.measure import measure_held_out
    from outrider.lab.distill.report import write_report
    from outrider.lab.distill.run import distill as run

    settings, file, plan = work.settings, work.file, work.plan
    written: Path | None = None
    with work.progress() as progress:
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
        console = Console(highlight=False, emoji=False, markup=False)
        print_distilled(console, report, _reference(settings), written)


# The settings made into a plan; what excludes each other is refused.

_TAKEN_NAMES = ("first", "answers")
"""Files of a run have these."""


def plan_of(settings: DistillSettings) -> tuple[ModelFile, DistillPlan]:
    """The target, and what is to be done. Raises SettingError, ModelFileError or HubError."""
    _check_together(settings)
    hub = hub_options(settings)
    file = find_model(_reference(settings) or DEFAULT, hub=hub)
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
    if settings.model is not None and settings.hf_repo is not None:
        _exclude("-m", "-hf", "both name the model")
    if settings.ctx_size <= settings.max_tokens:
        reason = f"answers of {settings.max_tokens} tokens leave no room for a prompt"
        raise SettingError(f"-c {settings.ctx_size}", reason, "Give more, or a smaller --max-tokens.")


def _exclude(one: str, other: str, reason: str) -> None:
    raise SettingError(f"{one} and {other}", reason, "Give one of them.")


def _reference(settings: DistillSettings) -> str | None:
    """What names the target; None: the embedded default."""
    return f"hf:{settings.hf_repo}" if settings.hf_repo is not None else settings.model
