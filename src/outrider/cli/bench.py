"""`outrider bench`: a sweep, and its report as a table or as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from outrider.backends.gguf.log import show_log
from outrider.cli.bench_settings import BenchSettings, ExportSettings, ReportSettings
from outrider.cli.interrupt import LoadInterrupt
from outrider.cli.output import INTERRUPTED, readable, write, write_json
from outrider.cli.plans import check_context, hub_options, load_options
from outrider.cli.screen import Screen
from outrider.core import numbers
from outrider.core.errors import SettingError
from outrider.core.extras import require_extra
from outrider.core.files import check_writable
from outrider.core.notices import collect_notices
from outrider.core.numbers import Interval
from outrider.costs.store import import_costs
from outrider.lab.bench import figures
from outrider.lab.bench.plan import SweepPlan
from outrider.lab.bench.report.page import write_report
from outrider.lab.bench.report.words import choices, notes, skipped, verdict, winners
from outrider.lab.bench.results import ROWS, Results

if TYPE_CHECKING:  # it takes a second to import
    from outrider.lab.loaded import Loader
    from outrider.lab.subject import Progress

REPORT = "report.html"
"""A report's name in the folder of its run"""
SCHEMA = "outrider.bench.summary/1"


def bench(settings: BenchSettings) -> int:
    """Run the plan; returns the exit status."""
    if settings.ray is not None:
        require_extra("--ray", "ray", "leave --ray out")
    elif settings.machines:
        raise SettingError("--machines", "there is no cluster", "Name one (--ray), or leave it out.")
    plan = SweepPlan(**{name: getattr(settings, name) for name in SweepPlan.model_fields})
    options, draft_options = (load_options(settings, draft=draft) for draft in (False, True))
    _check(settings, plan)
    errors = Screen(stderr=True, soft_wrap=True)
    for workload in plan.workloads():  # a line that cannot be read ends it here
        if "skipped: " in workload.source:
            errors.note(f"{workload.name}: {workload.source}")
    # What follows takes a second to import: a plan that is wrong is refused before.
    from outrider.lab.bench.sweep import run_sweep
    from outrider.lab.loaded import Loader

    show_log(settings.verbose)
    loader = Loader(options, draft_options, hub_options(settings), settings.ctx_size, plan.costs)
    try:
        with ExitStack() as stack:
            elsewhere = _on_cluster(settings, loader, stack)
            notices = stack.enter_context(collect_notices())
            stack.enter_context(LoadInterrupt())
            report = stack.enter_context(errors.progress())

            def progress(now: Progress) -> None:
                report("sweeping", now.done, f"{now.stage}, {now.detail}")

            results = run_sweep(plan, settings.out, loader, progress=progress, elsewhere=elsewhere)
        errors.note(*notices)
        show(results, settings.out / REPORT, as_json=settings.print_json, folder=settings.out)
        if plan.minutes is not None:
            _note_unfinished(results, plan.repetitions, errors)
    except KeyboardInterrupt:
        errors.say("interrupted: run the same command again to go on")
        return INTERRUPTED
    errors.say(f"report: {settings.out / REPORT}")
    return 0


def _on_cluster(settings: BenchSettings, loader: Loader, stack: ExitStack) -> Callable[..., None] | None:
    if settings.ray is None:
        return None
    from outrider.fleet.ray.joining import joined
    from outrider.fleet.ray.sweeping import RaySweep

    stack.enter_context(joined(settings.ray))
    return RaySweep(settings.backend, loader.check_backend, loader.hub, settings.machines)


def _note_unfinished(results: Results, repetitions: int, errors: Screen) -> None:
    sheets = [*results.sheets.values()] or [results]
    done = set.intersection(
        *({row.target for row in sheet.done if row.repetitions >= repetitions} for sheet in sheets)
    )
    if unfinished := [target for target in results.targets if target not in done]:
        listed = ", ".join(unfinished)
        errors.note(f"time ran out before all had run: {listed}; run the same command again to go on")


def _check(settings: BenchSettings, plan: SweepPlan) -> None:
    """Raise SettingError for what would fail only after hours."""
    check_context("-c", settings.ctx_size)
    folder, costs = settings.out, plan.costs
    if costs is not None:
        if not costs.is_file():
            way_out = "`outrider costs --costs FILE` writes one."
            raise SettingError(str(costs), "there is no such file", way_out)
        if import_costs(costs).draft is None and plan.drafts:
            raise SettingError(str(costs), "it has no costs of a draft model", "Write it again with -md.")
    if folder.exists() and not folder.is_dir():
        raise SettingError(str(folder), "it is a file, not a folder", "Name another one (-o).")
    if folder.is_dir() and not (folder / ROWS).exists() and any(folder.iterdir()):
        why = "the folder holds other files, and no run to continue"
        raise SettingError(str(folder), why, "Name another one (-o).")


# What `outrider bench` does with runs that are there


def report(settings: ReportSettings) -> int:
    """Show what a run has found so far; returns the exit status."""
    folder, html = settings.folder, settings.html
    if html is not None:
        check_writable(html, "report")
    show(Results.read(folder), html, as_json=settings.print_json, folder=folder)
    return 0


def export(settings: ExportSettings) -> int:
    """Write a run's rows as a table; returns the exit status."""
    from outrider.lab.bench.export import export as write_table

    write_table(Results.read(settings.folder), settings.to)
    write(readable(f"wrote {settings.to}") + "\n")
    return 0


def show(results: Results, html: Path | None, *, as_json: bool, folder: Path) -> None:
    """Print the report as a table or as JSON, and write it as a page if asked for."""
    if html is not None:
        write_report(results, html)
    if as_json:
        write_json(summary_json(results, folder, html))
    else:
        print_report(results, Screen())


# As people read it

_STYLES = {"faster": "green", "slower": "red", "tie": "yellow", "unsettled": "cyan"}


def print_report(results: Results, console: Screen) -> None:
    """Print what a run found; it fits 80 columns, and says everything without colour."""
    for name, sheet in results.sheets.items():
        console.say(f"\nOn {name}", "bold underline")
        _print_sheet(sheet, console)
    if len(results.sheets) > 1:
        console.say("\nWhat wins on each machine", "bold underline")
        for name, said in winners(results):
            console.say(f"On {name}: {said}")
    if not results.sheets:
        _print_sheet(results, console)


def _print_sheet(results: Results, console: Screen) -> None:
    for target in results.targets:
        console.say(f"\n{target}", "bold")
        _print_pairings(results, target, console)
        console.say(" ".join(verdict(results, target)))
    if not results.targets:
        console.say("Nothing was measured yet.")
    for choice in choices(results):
        console.say(f"\nTo run {choice.ran.target}:")
        console.print(f"  {readable(shlex.join(choice.command))}", soft_wrap=True)  # to be copied
    left_out = skipped(results)
    if left_out.rows:
        console.say(f"\n{left_out.caption}", "bold")
        console.table(left_out.columns, [[*row.values()] for row in left_out.rows], left=left_out.columns)
    console.print()
    for line in notes(results):
        console.say(line)


def _print_pairings(results: Results, target: str, console: Screen) -> None:
    rows: list[list[str | Text]] = []
    for draft in results.columns_of(target):
        name = draft or "none"
        for workload in results.pooled_first:
            found = figures.best(results, target, draft, workload)
            is_predicted = found.speedup is not None and not found.is_measured
            said = found.outcome or "not known"
            setting = found.cell.setting or numbers.NOTHING
            plain = [name, workload or "all", numbers.rate(found.plain), setting]
            styled = [
                ("≈ " if is_predicted else "") + numbers.speedup(found.speedup),
                "predicted" if is_predicted else numbers.bounds(found.speedup).replace(" to ", "–"),
                said,
            ]
            rows.append([*plain, *(Text(text, _STYLES.get(said, "dim")) for text in styled)])
            name = ""
    head = ("draft", "workload", "plain\ntokens/s", "setting", "speed-up", "95 %", "verdict")
    console.table(head, rows, left=("draft", "workload", "setting"))


# As programs read it


def summary_json(results: Results, folder: Path, report: Path | None) -> dict[str, Any]:
    """The fastest setting of every cell with its speed-up, then how good predictions were.

    A cell is a target, a draft (null: none) and a workload (null: all of them together). Speed-ups are
    ratios against plain decoding, with the bounds of their 95 % intervals; null is what did not run.
    """
    about = {
        "schema": SCHEMA,
        "folder": str(folder),
        "report": None if report is None else str(report),
    }
    if results.sheets:  # the same for each kind of machine
        sheets = {name: summary_json(sheet, folder, report) for name, sheet in results.sheets.items()}
        return about | {"machines": [{"name": name, **sheet} for name, sheet in sheets.items()]}
    error = figures.prediction_error(results)
    return about | {
        "machine": results.head.machine,
        "cells": [
            _cell(results, target, draft, workload)
            for target in results.targets
            for draft in results.columns
            for workload in (*results.workloads, None)
        ],
        "choices": [
            {
                "target": choice.ran.target,
                "backend": results.backend(choice.ran.target) or None,
                "draft": choice.ran.draft,
                "setting": choice.ran.setting,
                "tokens_per_s": _interval(choice.speed),
                "command": shlex.join(choice.command),
            }
            for choice in choices(results)
        ],
        "prediction_error": None if error is None else asdict(error),
        "skipped": [{"what": row.what, "why": row.why} for row in results.skipped],
    }


def _cell(results: Results, target: str, draft: str | None, workload: str | None) -> dict[str, Any]:
    # One workload is all of them.
    found = figures.best(results, target, draft, results.pooled if workload is None else workload)
    return {
        "target": target,
        "backend": results.backend(target) or None,
        "draft": draft,
        "workload": workload,
        "best_setting": found.cell.setting or None,
        "measured_speedup": _interval(found.speedup if found.is_measured else None),
        "outcome": found.outcome if found.is_measured else None,
        "predicted_speedup": _interval(figures.predicted_speedup(results, found.cell)),
        "plain_tokens_per_s": _interval(found.plain),
        "noise_ratio": _interval(figures.noise(results, target, found.cell.workload)),
    }


def _interval(found: Interval | None) -> dict[str, float] | None:
    return None if found is None else {"value": found.value, "low": found.low, "high": found.high}
