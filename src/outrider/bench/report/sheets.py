"""A sweep over several kinds of machines: which pairing wins on each, and a sheet for each."""

from __future__ import annotations

from outrider.bench.report import words
from outrider.bench.report.choice import choices
from outrider.bench.report.view import View
from outrider.bench.results import Results


def winners(results: Results) -> list[tuple[str, str]]:
    """For each kind of machine what to run each file with there, in words."""
    return [
        (name, words.taken(choice))
        for name, sheet in results.sheets.items()
        for choice in choices(View(sheet))
    ]
