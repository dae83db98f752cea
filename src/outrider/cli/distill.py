"""`outrider distill`: a draft of one's own, and what it gained."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from outrider.backends.gguf import show_log
from outrider.cli.distill_plan import plan_of
from outrider.cli.distill_settings import DistillSettings
from outrider.cli.output import INTERRUPTED, readable, write, write_json
from outrider.cli.tables import print_notes
from outrider.core.extras import require_extra
from outrider.distill.plan import DistillPlan
from outrider.lab.models import ModelFile


@dataclass(frozen=True, slots=True)
class _Work:
    """What is to be done, for whom it is shown."""

    settings: DistillSettings
    file: ModelFile
    plan: DistillPlan
    errors: Console


def distill(settings: DistillSettings) -> int:
    """Distil, and say what came of it; returns the exit status. All that can be refused is refused before
    the first answer."""
    require_extra("outrider distill", "distill")
    show_log(settings.verbose)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    file, plan = plan_of(settings)
    # PyTorch takes a second or two: a wrong option is refused before.
    from outrider.distill.questions import asked

    asked(plan.data)
    work = _Work(settings, file, plan, errors)
    try:
        if settings.answers_only:
            _record(work)
        else:
            _distill(work)
    except KeyboardInterrupt:
        kept = f"what is done is kept in {plan.out}; the same command goes on from there"
        errors.print(Text(readable(f"interrupted: {kept}")))
        return INTERRUPTED
    return 0


def _record(work: _Work) -> None:
    from outrider.cli.distill_progress import StepInterrupt, show_distilling
    from outrider.distill.run import record

    with StepInterrupt() as interrupt, show_distilling(work.errors, interrupt) as progress:
        notices = record(work.file, work.plan, progress)
    print_notes(work.errors, notices)
    folder = work.plan.answers_folder
    count = sum(1 for _ in folder.glob("*.npz"))
    if work.settings.print_json:
        write_json({"schema": "outrider.distill.answers/1", "folder": str(folder), "answers": count})
    else:
        write(f"{count:,} answers in {folder}; the same command without --answers-only trains on them\n")


def _distill(work: _Work) -> None:
    from outrider.cli.distill_progress import StepInterrupt, show_distilling
    from outrider.cli.distill_report import print_distilled
    from outrider.distill.learning_curve import learning_curve
    from outrider.distill.measure import measure_held_out
    from outrider.distill.pictures import write_report
    from outrider.distill.report import report_of
    from outrider.distill.run import distill as run

    settings, file, plan = work.settings, work.file, work.plan
    with StepInterrupt() as interrupt, show_distilling(work.errors, interrupt) as progress:
        made = run(file, plan, progress)
        notices = list(made.notices)
        curve = learning_curve(made, plan, progress) if settings.learning_curve else None
        measured = None
        if not settings.no_report:
            measured = measure_held_out(file, plan, made, progress, notices)
        report = report_of(file, made, measured, curve, notices)
        files = [] if settings.no_report else write_report(report, plan.out)
    print_notes(work.errors, report.notices)
    if settings.print_json:
        write(report.model_dump_json(by_alias=True) + "\n")
    else:
        reference = f"hf:{settings.hf_repo}" if settings.hf_repo is not None else settings.model
        console = Console(highlight=False, emoji=False, markup=False)
        print_distilled(console, report, reference, files)
