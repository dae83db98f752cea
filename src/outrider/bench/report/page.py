"""The HTML report: one file that needs no network, no script and no other file."""

from __future__ import annotations

import shlex

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from outrider.bench.report import lists, words
from outrider.bench.report.choice import choices
from outrider.bench.report.pictures import PICTURES
from outrider.bench.report.pictures.picture import Missing, Picture
from outrider.bench.report.view import View
from outrider.bench.results import Results
from outrider.lab import numbers

_SETUP = (lists.quality, lists.skipped, lists.machine, lists.models, lists.tokenizers, lists.plan)


def page(results: Results) -> str:
    """The whole document. The same rows give the same text."""
    view = View(results)
    drawn = [make(view) for make in PICTURES]
    loader = PackageLoader("outrider.bench", "report")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"words": _words, "printable": numbers.printable}
    style, *_ = loader.get_source(environment, "page.css")
    return environment.get_template("page.html").render(
        style=style,
        name=str(results.head.plan.get("name") or "sweep"),
        where=f"{results.head.machine.get('cpu', 'unknown processor')}, started {results.head.started}",
        verdicts=[words.verdict(view, target) for target in results.targets],
        choices=[(words.taken(choice), shlex.join(choice.command)) for choice in choices(view)],
        notes=[*words.notes(view), words.prediction_line(view), words.time_line(view)],
        pictures=[made for made in drawn if isinstance(made, Picture)],
        missing=[made for made in drawn if isinstance(made, Missing)],
        measured=lists.measured(view),
        method=words.METHOD,
        setup=[make(view) for make in _SETUP],
    )


def _words(text: str) -> Markup:
    """A sentence within HTML; a figure stays on a line with its percent sign."""
    return Markup(str(escape(numbers.printable(text))).replace(" %", "&nbsp;%"))
