"""`outrider distill`: a draft of one's own, and what it gained."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.backends.gguf.log import show_log
from outrider.cli.check import print_judged
from outrider.cli.interrupt import LoadInterrupt
from outrider.cli.output import INTERRUPTED, write_json
from outrider.cli.plans import hub_options, target_reference
from outrider.cli.screen import Screen
from outrider.core.errors import SettingError
from outrider.core.extras import require_extra
from outrider.core.notices import collect_notices
from outrider.core.numbers import duration, gigabytes, short_count
from outrider.lab.distill.plan import DistillPlan, DistillSettings
from outrider.lab.models import find_model
from outrider.models.reference import DEFAULT

if TYPE_CHECKING:  # it imports PyTorch, which takes a second or two
    from outrider.lab.distill import run


def distill(settings: DistillSettings) -> int:
    """Distil, and report; returns the exit status. Whatever can be refused is refused before the first
    answer."""
    require_extra("outrider distill", "distill")
    show_log(settings.verbose)
    errors = Screen(stderr=True, soft_wrap=True)
    plan = plan_of(settings)
    from outrider.lab.distill import run

    try:
        with collect_notices() as notices, LoadInterrupt(), errors.progress() as progress:
            report = run.distill(plan, progress)
    except KeyboardInterrupt:
        errors.say(
            f"interrupted: the answers are kept in {plan.answers_folder}; the same command goes on with them"
        )
        return INTERRUPTED
    errors.note(*notices)
    if settings.print_json:
        write_json(report.as_json())
    else:
        print_distilled(Screen(), report, plan, target_reference(settings))
    return 0


def plan_of(settings: DistillSettings) -> DistillPlan:
    """Raises SettingError, ModelFileError or HubError."""
    _check_together(settings)
    hub = hub_options(settings)
    file = find_model(target_reference(settings) or DEFAULT, hub=hub)
    base = settings.base
    out = settings.out or Path(f"distilled-{file.name}")
    return DistillPlan(file, out, settings, None if base is None else find_model(base, hub=hub).path)


def _check_together(settings: DistillSettings) -> None:
    if settings.steps is not None and settings.minutes is not None:
        raise SettingError("--steps and --minutes", "both say how long to train", "Give one of them.")
    if settings.ctx_size <= settings.max_tokens:
        reason = f"answers of {settings.max_tokens} tokens leave no room for a prompt"
        raise SettingError(f"-c {settings.ctx_size}", reason, "Give more, or a smaller --max-tokens.")


def print_distilled(console: Screen, report: run.Report, plan: DistillPlan, target: str | None) -> None:
    """The draft, its data, what it gained, and how to use it. `target` is its reference, None for the
    embedded default."""
    known = f"all {report.target_tokens:,} tokens"
    if report.known_tokens < report.target_tokens:
        known = f"{report.known_tokens:,} of the target's {report.target_tokens:,} tokens"
    size = f"{gigabytes(report.file_bytes)}, {short_count(report.parameters)} parameters"
    prompts = ", ".join(Path(name).name for name in plan.settings.prompts) or "the bundled prompts"
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
    written = "" if plan.settings.no_report else str(plan.report)
    use = [("use it", f"outrider run {named}-md {path}"), ("check it", check), ("report", written)]
    console.rows(use, width=8, style="")
