"""The HTML report: one file that needs no network, no script and no other file."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from html import escape
from importlib.resources import files

from outrider.bench.report import lists, words
from outrider.bench.report.choice import choices
from outrider.bench.report.pictures import PICTURES, Missing, Panel, Picture
from outrider.bench.report.tables import Table
from outrider.bench.report.view import View
from outrider.bench.results import Results
from outrider.lab import numbers
from outrider.lab.drawing import share_letters

__all__ = ["page"]


def page(results: Results) -> str:
    """The whole document. The same rows give the same text."""
    view = View(results)
    drawn = [make(view) for make in PICTURES]
    name = str(results.head.plan.get("name") or "sweep")
    pictures = [_picture(made) for made in drawn if isinstance(made, Picture)]
    letters, shown = share_letters("\n".join(pictures))
    style = files("outrider.bench.report").joinpath("page.css").read_text("utf-8")
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_text(name)}: which pairing wins</title>",
            '<link rel="icon" href="data:,">',
            f"<style>\n{style}</style></head>",
            "<body><main>",
            *_opening(view, name),
            *_contents(drawn),
            letters,
            shown,
            *_missing([made for made in drawn if isinstance(made, Missing)]),
            *_closing(view),
            "</main></body></html>\n",
        ]
    )


def _text(text: str) -> str:
    return escape(numbers.printable(text)).replace(" %", "&nbsp;%")


def _opening(view: View, name: str) -> Iterable[str]:
    machine = view.results.head.machine
    where = f"{machine.get('cpu', 'unknown processor')}, started {view.results.head.started}"
    yield f"<header><h1>{_text(name)}: which pairing wins</h1>"
    yield f'<p class="soft">{_text(where)}</p></header>'
    sentences = [words.verdict(view, target) for target in view.results.targets] or [
        "Nothing was measured yet."
    ]
    yield '<section class="verdicts" aria-label="Verdict">'
    yield from (f"<p>{_text(sentence)}</p>" for sentence in sentences)
    for choice in choices(view):
        command = escape(numbers.printable(shlex.join(choice.command)))
        yield f"<p>{_text(words.taken(choice))} <code>{command}</code></p>"
    yield "</section>"
    lines = [*words.notes(view), words.prediction_line(view), words.time_line(view)]
    yield "<ul>" + "".join(f"<li>{_text(line)}</li>" for line in lines) + "</ul>"


def _contents(drawn: Iterable[Picture | Missing]) -> Iterable[str]:
    links = [(made.id, made.title) for made in drawn if isinstance(made, Picture)]
    links += [("measured", "Everything that ran"), ("method", "Method"), ("setup", "Setup")]
    items = "".join(f'<li><a href="#{place}">{_text(title)}</a></li>' for place, title in links)
    yield f'<nav aria-label="Contents"><ul>{items}</ul></nav>'


def _picture(made: Picture) -> str:
    parts = [
        f'<section><h2 id="{made.id}">{_text(made.title)}</h2>',
        f'<figure aria-labelledby="{made.id}">',
        f'<figcaption><p>{_text(made.finding)}</p><p class="reading">{_text(made.reading)}</p></figcaption>',
        _panels(made.panels),
    ]
    if made.key:
        parts.append("<ol>" + "".join(f"<li>{_text(line)}</li>" for line in made.key) + "</ol>")
    if made.more:
        parts.append(_folded(f"{made.title}, by workload ({len(made.more)} pictures)", _panels(made.more)))
    parts.append(_folded(f"The numbers: {made.table.caption.lower()}", made.table.html()))
    return "\n".join([*parts, "</figure></section>"])


def _panels(panels: Iterable[Panel]) -> str:
    drawn = "\n".join(_panel(panel) for panel in panels)
    return f'<div class="panels">{drawn}</div>'


def _panel(panel: Panel) -> str:
    """A broad one scrolls where it does not fit, and can be scrolled by the keyboard."""
    title = _text(panel.title)
    kind = f'"panel broad" tabindex="0" role="group" aria-label="{title}"' if panel.is_broad else '"panel"'
    return f"<div class={kind}><h3>{title}</h3>\n{panel.svg}</div>"


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{_text(title)}</summary>\n{content}</details>"


def _missing(found: list[Missing]) -> Iterable[str]:
    if found:
        items = "".join(f"<li>{_text(made.title)}: {_text(made.why)}.</li>" for made in found)
        yield f"<section><h2>Left out</h2><ul>{items}</ul></section>"


def _closing(view: View) -> Iterable[str]:
    ran = lists.measured(view)
    yield '<section><h2 id="measured">Everything that ran</h2>'
    if ran.rows:
        yield (
            f"<p>A verdict here has to hold among all {len(ran.rows)} results of this list, so that it "
            "can be a tie where the pictures above, which look at fewer, say otherwise.</p>"
        )
        yield _folded(f"{len(ran.rows)} results, predicted beside measured", ran.html())
    else:
        yield "<p>Nothing ran for real yet; every figure is predicted or missing.</p>"
    yield "</section>"
    yield f'<section><h2 id="method">Method</h2><p>{_text(words.METHOD)}</p></section>'
    yield '<section><h2 id="setup">Setup</h2>'
    tables = (lists.quality, lists.skipped, lists.machine, lists.models, lists.tokenizers, lists.plan)
    yield from (_setup(make(view)) for make in tables)
    yield "</section>"


def _setup(table: Table) -> str:
    if not table.rows:
        return f"<p>{_text(table.caption)}: nothing.</p>"
    return table.html()
