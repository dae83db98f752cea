"""The HTML report: one file that needs no network and no other file, and a script for what is folded only."""

from __future__ import annotations

import gzip
import re
import shlex
from base64 import b64encode
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from outrider.lab import numbers
from outrider.lab.bench.report import lists, words
from outrider.lab.bench.report.choice import choices
from outrider.lab.bench.report.pictures import PICTURES
from outrider.lab.bench.report.pictures.picture import Missing, Picture
from outrider.lab.bench.report.view import View
from outrider.lab.bench.results import Results

_SETUP = (lists.quality, lists.skipped, lists.machine, lists.models, lists.tokenizers, lists.plan)


def page(results: Results) -> str:
    """The whole document. The same rows give the same text. Of a sweep over several kinds of machines a page
    with a sheet for each, which is a page of its own within it."""
    if len(results.sheets) < 2:
        return _sheet(next(iter(results.sheets.values()), results))
    sheets = {name: _sheet(sheet) for name, sheet in results.sheets.items()}
    return _rendered("sheets.html", results, winners=words.winners(results), sheets=sheets)


def _rendered(template: str, results: Results, **values: Any) -> str:
    environment = Environment(
        loader=PackageLoader("outrider.lab.bench", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"words": _words, "printable": numbers.printable, "packed": _packed}
    name = str(results.head.plan.get("name") or "sweep")
    return environment.get_template(template).render(name=name, **values)


def _sheet(results: Results) -> str:
    view = View(results)
    drawn = [make(view) for make in PICTURES]
    return _rendered(
        "page.html",
        results,
        drawings=_Drawings(),
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


def _packed(html: str) -> str:
    """HTML as an attribute, which the page's script unpacks when it is asked for."""
    return b64encode(gzip.compress(html.encode(), mtime=0)).decode()


_STYLE = r'(<\w[^<>]*) style="([^"]*)"'
"""within a tag: a model may be called what looks like one"""


class _Drawings:
    """What the drawings of a page have in common, once: styles, and markers, clips and hatches."""

    def __init__(self) -> None:
        self.styles: dict[str, str] = {}
        """class by its declarations"""
        self.definitions: dict[str, str] = {}
        """name by the element, which has NAME in its place"""

    def shared(self, svg: str) -> Markup:
        """A drawing without groups that do nothing, its styles and definitions those of the page."""
        names: dict[str, str] = {}
        groups: list[str] = []

        def classed(found: re.Match[str]) -> str:
            return f'{found[1]} class="{self.styles.setdefault(found[2], f"s{len(self.styles)}")}"'

        def defined(found: re.Match[str]) -> str:
            for name, element in re.findall(r'(?=<[a-zA-Z]+ id="([^"]+)")(.*?(?=<\w+ id=|$))', found[1]):
                key = re.sub(_STYLE, classed, element.replace(f'"{name}"', '"NAME"'))
                names[name] = self.definitions.setdefault(key, f"d{len(self.definitions)}")
            return ""

        def grouped(found: re.Match[str]) -> str:
            if found[0] != "</g>":
                groups.append(found[0])
            return "" if (groups[-1] if found[0] != "</g>" else groups.pop()) == "<g>" else found[0]

        svg = re.sub(r"<defs>(.*?)</defs>", defined, svg.replace("<g/>", ""))
        svg = re.sub(r"#([\w.-]+)", lambda found: f"#{names.get(found[1], found[1])}", svg)
        svg = re.sub(r"<g>|<g [^>]*>|</g>", grouped, svg)
        return Markup(re.sub(_STYLE, classed, svg))
