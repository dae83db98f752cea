"""`outrider bench`: a plan from file and flags, the sweep, and its report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.backends.gguf.log import show_log
from outrider.cli.bench_settings import BenchSettings, ExportSettings, InitSettings, ReportSettings
from outrider.cli.interrupt import LoadInterrupt
from outrider.cli.output import INTERRUPTED, readable, write, write_json
from outrider.cli.plans import hub_options
from outrider.cli.screen import Screen
from outrider.core.errors import SettingError
from outrider.core.extras import require_extra
from outrider.core.files import check_writable, write_whole
from outrider.core.schema import settings_of
from outrider.costs.store import import_costs
from outrider.lab.bench.plan import SweepPlan, make_plan, plan_text, plan_values
from outrider.lab.bench.results import ROWS, Results
from outrider.lab.workloads.reading import load_workload, workload_values

if TYPE_CHECKING:  # it takes a second to import
    from outrider.lab.bench.target import Progress

_FLAGS = {
    name: setting.flag
    for name, setting in settings_of(BenchSettings).items()
    if name in SweepPlan.model_fields
} | {"workloads": "--workload"}
"""The flags of a plan's settings"""

_OF_WORKLOADS = ("prompts", "max_tokens", "temperature", "seed")
"""Flags that apply to every workload"""


def bench(settings: BenchSettings) -> int:
    """Run the plan of file and flags; returns the exit status."""
    require_extra("outrider bench", "bench")
    if settings.ray is not None:
        require_extra("--ray", "ray", "leave --ray out")
    elif settings.machines:
        raise SettingError("--machines", "there is no cluster", "Name one (--ray), or leave it out.")
    plan = plan_of(settings)
    folder = settings.out or Path(plan.name)
    _check(plan, folder)
    errors = Screen(stderr=True, soft_wrap=True)
    for workload in map(load_workload, plan.workloads):  # a line that cannot be read ends it here
        if "skipped: " in workload.source:
            errors.note(f"{workload.name}: {workload.source}")
    # What follows takes a second to import: a plan that is wrong is refused before.
    from outrider.lab.bench.sweep import run_sweep

    show_log(settings.verbose)
    try:
        with ExitStack() as stack:
            elsewhere = _on_cluster(settings, plan, stack)
            stack.enter_context(LoadInterrupt())
            report = stack.enter_context(errors.progress())

            def progress(now: Progress) -> None:
                detail = f"{now.stage}, {now.detail}" if now.detail else now.stage
                report("sweeping", now.done, detail, now.left_s)

            hub = hub_options(settings)
            results = run_sweep(plan, folder, hub=hub, progress=progress, elsewhere=elsewhere)
        show(results, folder / REPORT, as_json=settings.print_json, folder=folder)
        if plan.minutes is not None:
            _note_unfinished(results, plan.repetitions, errors)
    except KeyboardInterrupt:
        errors.say("interrupted: run the same command again to go on")
        return INTERRUPTED
    errors.say(f"report: {folder / REPORT}")
    return 0


def _on_cluster(settings: BenchSettings, plan: SweepPlan, stack: ExitStack) -> Callable[..., None] | None:
    if settings.ray is None:
        return None
    from outrider.fleet.ray.joining import joined
    from outrider.fleet.ray.sweeping import RaySweep
    from outrider.lab.bench.target import Loader

    stack.enter_context(joined(settings.ray))
    hub = hub_options(settings)
    return RaySweep(plan.backend, Loader(plan, (), hub).check_backend, hub, settings.machines)


def _note_unfinished(results: Results, repetitions: int, errors: Screen) -> None:
    sheets = [*results.sheets.values()] or [results]
    done = set.intersection(
        *({row.target for row in sheet.done if row.repetitions >= repetitions} for sheet in sheets)
    )
    if unfinished := [target for target in results.targets if target not in done]:
        listed = ", ".join(unfinished)
        errors.note(f"time ran out before all had run: {listed}; run the same command again to go on")


def plan_of(settings: BenchSettings) -> SweepPlan:
    """The plan of file and flags. Raises SettingError, which names the field or the flag."""
    given = {name: getattr(settings, name) for name in settings.model_fields_set}
    path = settings.plan
    values = plan_values(path) if path else {}
    flags = _plain_flags(given)
    if any(name in given for name in ("workload", *_OF_WORKLOADS)):
        flags["workloads"] = _workloads(given, values)
    names = {name: _FLAGS[name] for name in flags if name != "workloads" or "workload" in given}
    return make_plan(values | flags, f"{path}: " if path else "", names)


def _plain_flags(given: Mapping[str, Any]) -> dict[str, Any]:
    flags = {name: given[name] for name in _FLAGS if name in given}
    for name in ("p_mins", "drafters"):
        if name in flags:
            flags[name] = [part.strip() for part in flags[name].split(",") if part.strip()]
    if "gpu_layers" in flags and flags["gpu_layers"] != "all" and not flags["gpu_layers"].isdecimal():
        raise SettingError(f"-ngl {flags['gpu_layers']}", "not a number of layers", "Give one, or all.")
    if "library" in flags:
        flags["library"] = str(flags["library"])
    return flags


def _workloads(given: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    """The workloads of the flags, the file, or the default, with the flags that apply to all of them."""
    usual = [spec.name for spec in SweepPlan().workloads]
    specs = given.get("workload") or values.get("workloads", usual)
    if not isinstance(specs, list):
        return specs
    said = {name: given[name] for name in _OF_WORKLOADS if name in given}
    found = [workload_values(spec) for spec in specs]
    return [spec | said if isinstance(spec, dict) else spec for spec in found]


def _check(plan: SweepPlan, folder: Path) -> None:
    """Raise SettingError for what would fail only after hours."""
    if plan.costs is not None:
        _check_costs(plan.costs, bool(plan.drafts))
    if folder.exists() and not folder.is_dir():
        raise SettingError(str(folder), "it is a file, not a folder", "Name another one (-o).")
    if folder.is_dir() and not (folder / ROWS).exists() and any(folder.iterdir()):
        why = "the folder holds other files, and no run to continue"
        raise SettingError(str(folder), why, "Name another one (-o).")


def _check_costs(path: Path, has_drafts: bool) -> None:
    if not path.is_file():
        raise SettingError(str(path), "there is no such file", "`outrider costs --costs FILE` writes one.")
    if import_costs(path).draft is None and has_drafts:
        raise SettingError(str(path), "it has no costs of a draft model", "Write it again with -md.")


# What `outrider bench` does with runs that are there, and the plan that it writes.

REPORT = "report.html"
"""A report's name in the folder of its run"""


def init(settings: InitSettings) -> int:
    """Write the commented plan; returns the exit status."""
    file = settings.file
    check_writable(file, "plan")
    if file.exists() and not settings.force:
        raise SettingError(str(file), "the file exists", "Name another one, or replace it with --force.")
    write_whole(file, plan_text(), "plan")
    write(readable(f"wrote {file}: edit it, then run it: outrider bench {file}") + "\n")
    return 0


def report(settings: ReportSettings) -> int:
    """Show what a run has found so far; returns the exit status."""
    folder, html = settings.folder, settings.html
    if html is not None:
        require_extra(str(html), "bench", "leave --html out")
        check_writable(html, "report")
    show(Results.read(folder), html, as_json=settings.print_json, folder=folder)
    return 0


def show(results: Results, html: Path | None, *, as_json: bool, folder: Path) -> None:
    """Print the report as a table or as JSON, and write it as a page if asked for."""
    from outrider.lab.bench.report import print_report, write_report

    if html is not None:
        write_report(results, html)
    if as_json:
        from outrider.cli.bench_json import summary_json

        write_json(summary_json(results, folder, html))
    else:
        print_report(results, Screen())


def export(settings: ExportSettings) -> int:
    """Write a run's rows as a table; returns the exit status."""
    from outrider.lab.bench.export import export as write_table

    write_table(Results.read(settings.folder), settings.to)
    write(readable(f"wrote {settings.to}") + "\n")
    return 0
