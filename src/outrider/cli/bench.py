"""`outrider bench`: a plan from file and flags, the sweep, and its report."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from outrider.backends.gguf import show_log
from outrider.bench.contestants import headers_of
from outrider.bench.plan import ContestantSpec, Plan
from outrider.bench.plan_file import make_plan, plan_values
from outrider.bench.results import Results
from outrider.bench.servers import words_of
from outrider.bench.store import ROWS
from outrider.cli.bench_progress import show_progress
from outrider.cli.bench_runs import REPORT, show
from outrider.cli.bench_settings import BenchSettings
from outrider.cli.interrupt import LoadInterrupt
from outrider.cli.output import INTERRUPTED, readable
from outrider.cli.plans import hub_options
from outrider.cli.tables import print_notes
from outrider.core.errors import SettingError
from outrider.core.extras import require_extra
from outrider.core.schema import settings_of
from outrider.costs import import_costs
from outrider.lab.workloads.reading import load_workload
from outrider.lab.workloads.spec import workload_values

_FLAGS = {
    name: setting.flag for name, setting in settings_of(BenchSettings).items() if name in Plan.model_fields
} | {
    "workloads": "--workload",
    "contestants": "--contestant",
    "repetitions_least": "--repetitions",
    "repetitions_most": "--repetitions",
}
"""What a plan's settings are called on the command line."""

_OF_WORKLOADS = ("prompts", "max_tokens", "temperature", "seed")
"""Flags that hold for every workload."""


def bench(settings: BenchSettings) -> int:
    """Run what file and flags ask for; returns the exit status. Raises what `outrider.core.errors` has."""
    require_extra("outrider bench", "bench")
    plan = plan_of(settings)
    folder = settings.out or Path(plan.name)
    _check(plan, folder)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    for workload in map(load_workload, plan.workloads):  # a line that cannot be read ends it here
        if "passed over" in workload.source:
            print_notes(errors, [f"{workload.name}: {workload.source}"])
    # What follows takes a second to import: a plan that is wrong is refused before.
    from outrider.bench.sweep import run_sweep

    show_log(settings.verbose)
    try:
        with LoadInterrupt(), show_progress(errors) as progress:
            results = run_sweep(plan, folder, hub=hub_options(settings), progress=progress)
        show(results, folder / REPORT, as_json=settings.print_json, folder=folder)
        if plan.minutes is not None:
            _note_unfinished(results, errors)
    except KeyboardInterrupt:
        errors.print(Text("interrupted: run it again to go on"))
        return INTERRUPTED
    errors.print(Text(readable(f"report: {folder / REPORT}")))
    return 0


def _note_unfinished(results: Results, errors: Console) -> None:
    """Say which targets the time was too short for."""
    done = {row.target for row in results.done}
    if unfinished := [target for target in results.targets if target not in done]:
        listed = ", ".join(unfinished)
        print_notes(errors, [f"the time was over before all had run: {listed}; run it again to go on"])


def plan_of(settings: BenchSettings) -> Plan:
    """The plan that file and flags make together. Raises SettingError, which names the field or the flag."""
    given = {name: getattr(settings, name) for name in settings.model_fields_set}
    path = settings.plan
    values = plan_values(path) if path else {}
    flags = _plain_flags(given)
    if any(name in given for name in ("workload", *_OF_WORKLOADS)):
        flags["workloads"] = _workloads(given, values)
    if "backends" in flags:
        values.pop("backend", None)  # the same setting
    names = {name: _FLAGS[name] for name in flags if name != "workloads" or "workload" in given}
    return make_plan(values | flags, f"{path}: " if path else "", names)


def _plain_flags(given: Mapping[str, Any]) -> dict[str, Any]:
    """The plan's settings that flags give, but for the workloads."""
    flags = {name: given[name] for name in _FLAGS if name in given}
    for name in ("p_mins", "drafters", "backends"):
        if name in flags:
            flags[name] = [part.strip() for part in flags[name].split(",") if part.strip()]
    if "gpu_layers" in flags and flags["gpu_layers"] != "all" and not flags["gpu_layers"].isdecimal():
        raise SettingError(f"-ngl {flags['gpu_layers']}", "it is no number of layers", "Give one, or all.")
    if "library" in flags:
        flags["library"] = str(flags["library"])
    if "repetitions" in given:
        flags["repetitions_least"], flags["repetitions_most"] = _repetitions(given["repetitions"])
    if "contestant" in given:
        flags["contestants"] = [_contestant(text) for text in given["contestant"]]
    return flags


def _repetitions(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    if not match:
        raise SettingError(f"--repetitions {text}", "it is no range", "Write 3-8, or one number.")
    return int(match[1]), int(match[2] or match[1])


def _contestant(text: str) -> dict[str, str]:
    name, mark, what = text.partition("=")
    if not mark or not name.strip() or not what.strip():
        way_out = "Write NAME=http://HOST:PORT/v1 or NAME='COMMAND'."
        raise SettingError(f"--contestant {text}", "it is no engine with a name", way_out)
    is_url = what.strip().startswith(("http://", "https://"))
    return {"name": name.strip(), "url" if is_url else "command": what.strip()}


def _workloads(given: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    """The workloads of the flags, of the file, or the usual ones, with what flags say about all of them."""
    usual = [spec.name for spec in Plan().workloads]
    specs = given.get("workload") or values.get("workloads", usual)
    if not isinstance(specs, list):
        return specs
    said = {name: given[name] for name in _OF_WORKLOADS if name in given}
    found = [workload_values(spec) for spec in specs]
    return [spec | said if isinstance(spec, dict) else spec for spec in found]


def _check(plan: Plan, folder: Path) -> None:
    """Refuse what would fail only after hours. Raises SettingError and ContestantError."""
    if plan.costs is not None:
        _check_costs(plan.costs, bool(plan.drafts))
    for spec in plan.contestants:
        _check_contestant(spec)
    if folder.exists() and not folder.is_dir():
        raise SettingError(str(folder), "it is a file, no folder", "Name another one (-o).")
    if folder.is_dir() and not (folder / ROWS).exists() and any(folder.iterdir()):
        why = "the folder holds other files, and no run to go on with"
        raise SettingError(str(folder), why, "Name another one (-o).")


def _check_costs(path: Path, has_drafts: bool) -> None:
    if not path.is_file():
        raise SettingError(str(path), "there is no such file", "`outrider costs --costs FILE` writes one.")
    if import_costs(path).draft is None and has_drafts:
        raise SettingError(str(path), "it has no costs of a draft model", "Write it anew with -md.")


def _check_contestant(spec: ContestantSpec) -> None:
    headers_of(spec)
    if spec.command is not None:
        values = {"target": "target", "draft": "draft", "port": 0, "context": 0, "threads": 0}
        words_of(spec.name, spec.command, values)
