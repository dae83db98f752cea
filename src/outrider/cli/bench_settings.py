"""The settings of `bench` and its subcommands: a plan's, and what a command needs besides."""

from __future__ import annotations

from pathlib import Path

from outrider.cli.settings import OnMachines
from outrider.core.schema import Group, setting
from outrider.core.settings import Context, Hub, JsonOutput, Loading, Verbose
from outrider.lab.bench.plan import SweepPlan


class BenchSettings(SweepPlan, Hub, JsonOutput, Verbose, Context, Loading, OnMachines):
    """Those of `bench`."""

    out: Path = setting(Path("bench"), "-o", metavar="FOLDER", help="Folder of the run.")


class ReportSettings(JsonOutput):
    """Those of `bench report`."""

    folder: Path = setting(..., metavar="FOLDER", argument=True, help="The folder of a run.")
    html: Path | None = setting(None, help="Write the HTML report there too.")


class ExportSettings(Group):
    """Those of `bench export`."""

    folder: Path = setting(..., metavar="FOLDER", argument=True, help="The folder of a run.")
    to: Path = setting(..., help="A file that ends in .csv or .jsonl.")
