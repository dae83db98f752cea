"""A sweep over several kinds of machines: which pairing wins on each, and a sheet for each."""

from __future__ import annotations

from outrider.bench.report import words
from outrider.bench.report.view import View
from outrider.bench.results import Results


def winners(results: Results) -> list[tuple[str, str]]:
    """What wins on each kind of machine with each target, in words."""
    return [
        (name, words.winner(view, target))
        for name, view in ((name, View(sheet)) for name, sheet in results.sheets.items())
        for target in view.results.targets
    ]
