"""The report of a sweep: tables in the terminal, and one self-contained HTML file with pictures."""

from __future__ import annotations

from pathlib import Path

from outrider.core.files import check_writable, write_whole
from outrider.lab.bench.report.terminal import print_report
from outrider.lab.bench.results import Results

__all__ = ["print_report", "write_report"]


def write_report(results: Results, path: Path) -> None:
    """Write the HTML report to `path`, all of it or nothing: the same rows give the same bytes.

    Raises SettingError where it cannot be written.
    """
    from outrider.lab.bench.report.page import page  # drawing takes long to import

    check_writable(path, "report")
    write_whole(path, page(results), "report")
