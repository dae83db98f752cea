"""`outrider bench`: a sweep, and its report as a table or as JSON."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from outrider.backends.gguf.log import show_log
from outrider.cli.bench_settings import BenchSettings, ExportSettings, ReportSettings
from outrider.cli.interrupt import LoadInterrupt
from outrider.cli.output import INTERRUPTED, write, write_json
from outrider.cli.plans import hub_options, load_options
from outrider.cli.screen import Screen
from outrider.core.errors import SettingError
from outrider.core.extras import require_extra
from outrider.core.files import check_writable
from outrider.core.notices import collect_notices
from outrider.core.numbers import readable
from outrider.costs.store import import_costs
from outrider.lab.bench import figures
from outrider.lab.bench.figures import Finding
from outrider.lab.bench.plan import SweepPlan
from outrider.lab.bench.report import cells, choices, notes, skipped, verdict, write_report
from outrider.lab.bench.results import ROWS, Results
from outrider.lab.bench.results import export as write_table

if TYPE_CHECKING:  # it takes a second to import
    from outrider.fleet.ray.sweeping import RaySweep
    from outrider.lab.loaded import Loader

REPORT = "report.html"
"""A report's name in the folder of its run"""
SCHEMA = "outrider.bench.findings/1"


def bench(settings: BenchSettings) -> int:
    """Run the plan; returns the exit status."""
    if settings.ray is not None:
        require_extra("--ray", "ray", "leave --ray out")
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
            cluster = _cluster(settings, loader, stack)
            notices = stack.enter_context(collect_notices())
            stack.enter_context(LoadInterrupt())
            report = stack.enter_context(errors.progress())

            def progress(what: str, part: float | None) -> None:
                report("sweeping", part, what)

            where: dict[str, Any] = {} if cluster is None else {"elsewhere": cluster, "facts": cluster.facts}
            results = run_sweep(plan, settings.out, loader, progress=progress, **where)
        errors.note(*notices)
        show(results, settings.out / REPORT, as_json=settings.print_json, folder=settings.out)
        done = {row.target for row in results.done if row.repetitions >= plan.repetitions}
        unfinished = [target for target in results.targets if target not in done]
        if unfinished and plan.minutes is not None:
            listed = ", ".join(unfinished)
            errors.note(f"time ran out before all had run: {listed}; run the same command again to go on")
    except KeyboardInterrupt:
        errors.say("interrupted: run the same command again to go on")
        return INTERRUPTED
    errors.say(f"report: {settings.out / REPORT}")
    return 0


def _cluster(settings: BenchSettings, loader: Loader, stack: ExitStack) -> RaySweep | None:
    if settings.ray is None:
        return None
    from outrider.fleet.ray.sweeping import RaySweep, joined

    stack.enter_context(joined(settings.ray))
    return RaySweep(settings.backend, loader.check_backend)


def _check(settings: BenchSettings, plan: SweepPlan) -> None:
    """Raise SettingError for what would fail only after hours."""
    folder, costs = settings.out, plan.costs
    if costs is not None and import_costs(costs).draft is None and plan.drafts:
        raise SettingError(str(costs), "it has no costs of a draft model", "Write it again with -md.")
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
    write_table(Results.read(settings.folder), settings.to)
    write(readable(f"wrote {settings.to}") + "\n")
    return 0


def show(results: Results, html: Path | None, *, as_json: bool, folder: Path) -> None:
    """Print the report as a table or as JSON, and write it as a page if asked for."""
    if html is not None:
        write_report(results, html)
    if as_json:
        write_json(findings_json(results, folder, html))
    else:
        print_report(results, Screen())


# As people read it

_STYLES = {"faster": "green", "slower": "red", "tie": "yellow", "unsettled": "cyan"}


def print_report(results: Results, console: Screen) -> None:
    """Print what a run found; it fits 80 columns, and says everything without colour."""
    for target in results.targets:
        console.say(f"\n{target}", "bold")
        _print_pairings(results, target, console)
        console.say(" ".join(verdict(results, target)))
    if not results.targets:
        console.say("Nothing was measured yet.")
    for ran, command in choices(results).items():
        console.say(f"\nTo run {ran.target}:")
        console.print(f"  {readable(command)}", soft_wrap=True)  # to be copied
    left_out = skipped(results)
    if left_out.rows:
        console.say(f"\n{left_out.caption}", "bold")
        console.table(left_out.columns, [[*row.values()] for row in left_out.rows], left=left_out.columns)
    console.print()
    for line in notes(results):
        console.say(line)


def _print_pairings(results: Results, target: str, console: Screen) -> None:
    found = figures.bests_of(results, target)
    rows = [[*cells(results, one).values()] for one in found]
    styles = [_STYLES.get(one.outcome or "", "dim") for one in found]
    head = [name.replace("plain ", "plain\n") for name in cells(results, found[0])]
    styled: list[list[str | Text]] = [
        [*row[:4], *(Text(said, style) for said in row[4:])] for row, style in zip(rows, styles, strict=True)
    ]
    console.table(head, styled, left=("draft", "workload", "setting"))


# As programs read it


def findings_json(results: Results, folder: Path, report: Path | None) -> dict[str, Any]:
    """The findings as tables have them: every target, draft (null: none) and workload (null: all together) at
    its fastest setting. Speed-ups are ratios against plain decoding, with the bounds of their 95 % intervals;
    null is what is not known."""
    error = figures.prediction_error(results)
    return {
        "schema": SCHEMA,
        "folder": str(folder),
        "report": None if report is None else str(report),
        "machine": results.head.machine,
        "findings": [_flat(results, found) for found in figures.bests(results).values()],
        "choices": [ran._asdict() | {"command": command} for ran, command in choices(results).items()],
        "prediction_error": error and {"results": error[0], "median_error": error[1]},
        "skipped": skipped(results).rows,
    }


def _flat(results: Results, found: Finding) -> dict[str, Any]:
    parts, plain = asdict(found), figures.measured_speed(results, found.cell.plain)
    return parts.pop("cell")._asdict() | parts | {"plain_tokens_per_s": plain and asdict(plain)}  # type: ignore[no-any-return]
