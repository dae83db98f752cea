"""The settings of `bench` and its subcommands: a plan's, and what a command needs besides."""

from __future__ import annotations

from pathlib import Path

from outrider.core.schema import Group, argument, setting
from outrider.core.settings import Context, Hub, JsonOutput, Loading, Verbose
from outrider.lab.bench.plan import SweepPlan


class BenchSettings(SweepPlan, Hub, JsonOutput, Verbose, Context, Loading):
    """Those of `bench`."""

    out: Path = setting(Path("bench"), "Folder of the run.", "-o FOLDER")
    ray: str | None = setting(
        None, "Work on a Ray cluster: its HOST:PORT, or auto (docs/cluster.md).", "ADDRESS", panel="Machine"
    )


class ReportSettings(JsonOutput):
    """Those of `bench report`."""

    folder: Path = argument(..., "The folder of a run.", "FOLDER")
    html: Path | None = setting(None, "Write the HTML report there too.")


class ExportSettings(Group):
    """Those of `bench export`."""

    folder: Path = argument(..., "The folder of a run.", "FOLDER")
    to: Path = setting(..., "A file that ends in .csv or .jsonl.")
