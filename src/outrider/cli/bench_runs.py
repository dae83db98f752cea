"""What `outrider bench` does with runs that are there, and the plan that it writes."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from outrider.bench.plan_file import plan_text
from outrider.bench.results import Results
from outrider.cli.bench_settings import CompareSettings, ExportSettings, InitSettings, ReportSettings
from outrider.cli.output import readable, write, write_json
from outrider.core.errors import SettingError
from outrider.core.extras import require_extra
from outrider.core.files import check_writable, write_whole

REPORT = "report.html"
"""The name of a report in the folder of its run."""


def init(settings: InitSettings) -> int:
    """Write the commented plan; returns the exit status. Raises SettingError where a file is there."""
    file = settings.file
    check_writable(file, "plan")
    if file.exists() and not settings.force:
        raise SettingError(str(file), "the file exists", "Name another one, or replace it with --force.")
    write_whole(file, plan_text(), "plan")
    write(readable(f"wrote {file}: edit it, then run it: outrider bench {file}") + "\n")
    return 0


def report(settings: ReportSettings) -> int:
    """Show what a run has found so far; returns the exit status. Raises InputError and SettingError."""
    folder, html = settings.folder, settings.html
    if html is not None:
        require_extra(str(html), "bench", "leave --html out")
        check_writable(html, "report")
    show(Results.read(folder), html, as_json=settings.print_json, folder=folder)
    return 0


def show(results: Results, html: Path | None, *, as_json: bool, folder: Path) -> None:
    """The report as a table or as JSON on standard output, and as a page if it is to be written."""
    from outrider.bench.report import print_report, write_report

    if html is not None:
        write_report(results, html)
    if as_json:
        from outrider.cli.bench_json import summary_json

        write_json(summary_json(results, folder, html))
    else:
        print_report(results, _console())


def compare(settings: CompareSettings) -> int:
    """Show what changed from one run to another; returns the exit status. Raises InputError."""
    from outrider.bench.changes import print_changes

    print_changes(Results.read(settings.before), Results.read(settings.after), _console())
    return 0


def export(settings: ExportSettings) -> int:
    """Write a run's rows as a table; returns the exit status. Raises InputError and SettingError."""
    to = settings.to
    if to.suffix.lower() not in (".csv", ".parquet"):
        raise SettingError(str(to), "its name says no format", "End it in .csv or .parquet.")
    check_writable(to, "table")
    from outrider.bench.export import export as write_table

    write_table(Results.read(settings.folder), to)
    write(readable(f"wrote {to}") + "\n")
    return 0


def _console() -> Console:
    return Console(highlight=False, emoji=False, markup=False)
