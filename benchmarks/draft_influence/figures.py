"""What the rows of measure.py say, as tables and as one paragraph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from harness import Row
from outrider.lab.statistics import holm

SIGNIFICANCE = 0.01
"""The chance that the two-sample tests under the exact rules tell anything apart at all where nothing
differs, over all of them (Holm)."""

ROUNDING = 1e-12
"""Total variation below which probabilities in 64 bits cannot be told apart."""

Cell = dict[str, Any]


class Results:
    """The cells of a file by part; each knows its draft."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.head = rows[0]
        self.seconds = sum(row["seconds"] for row in rows[1:])
        self._cells: dict[str, list[Cell]] = defaultdict(list)
        for row in rows[1:]:
            self._cells[row["part"]] += [{"draft": row["draft"], **cell} for cell in row["cells"]]

    @property
    def drafts(self) -> list[str]:
        return list(self.head["names"])

    @property
    def leniences(self) -> list[float]:
        return list(self.head["sizes"]["leniences"])

    def cells(self, part: str, **wanted: object) -> list[Cell]:
        """Those of a part that have these values."""
        found = self._cells.get(part, [])
        return [cell for cell in found if all(cell.get(name) == value for name, value in wanted.items())]

    def told_apart(self) -> list[Cell]:
        """Two-sample tests under the exact rules that find a difference."""
        tests = self.cells("first tokens", lenience=1.0)
        rejected = holm([test["p_value"] for test in tests], SIGNIFICANCE)
        return [test for test, bad in zip(tests, rejected, strict=True) if bad]


def figures(results: Results) -> str:
    """All of it as Markdown."""
    head, sizes = results.head, results.head["sizes"]
    lines = [
        f"{head['cpu']}, {head['threads']} threads, {head['llama_cpp']}, {head['measured'][:10]}; "
        f"{results.seconds / 60:.1f} minutes in all. Target: {next(iter(head['models']))}.",
        "",
        finding(results),
        "",
        "### Under the exact rules",
        *table(*exact(results)),
        "",
        f"Greedy: {sizes['prompts']} prompts, {sizes['tokens']} tokens, drafts of "
        f"{', '.join(map(str, sizes['lengths']))} tokens a step. Short texts: {sizes['samples']} on each of "
        f"{sizes['short_prompts']} prompts for each draft, against as many plain ones; the chance of any "
        f"false alarm in that column is {SIGNIFICANCE:g}.",
        "",
        "### Under `--lenience`",
        *table(*lenient(results)),
        "",
        "TV (total variation) and acceptance: one step of drawn drafts at every position of the target's own "
        "texts, exactly; in brackets the least and the greatest prompt. Short texts: between these and plain "
        "ones, and what chance alone would show. Log probability, words, phrases: whole sampled texts, ± one "
        "standard error.",
    ]
    return "\n".join(lines)


# Under the exact rules


def exact(results: Results) -> tuple[list[str], list[list[str]]]:
    titles = [
        "draft", "greedy texts equal", "near-ties", "`verify`", "its least p", "greatest TV of a step",
        "short texts: least p", "log probability of a token", "style words per 100", "phrases",
        "accepted / drafted, greedy",
    ]  # fmt: skip
    return titles, [_exact_row(results, draft) for draft in ("none", *results.drafts)]


def _exact_row(results: Results, draft: str) -> list[str]:
    greedy = results.cells("greedy", draft=draft, lenience=1.0)
    equal = [cell for cell in greedy if cell["parts_at"] is None]
    near = [cell for cell in greedy if cell.get("near_tie")]
    checked = results.cells("certificate", draft=draft)
    steps = results.cells("positions", draft=draft, lenience=1.0)
    short = results.cells("first tokens", draft=draft, lenience=1.0)
    apart = [cell for cell in results.told_apart() if cell["draft"] == draft]
    return [
        draft,
        f"{len(equal)} of {len(greedy)}" if greedy else "–",
        str(len(near)) if greedy else "–",
        ("holds" if all(cell["holds"] for cell in checked) else "**fails**") if checked else "–",
        f"{min(cell['least_p'] for cell in checked):.2g} of {checked[0]['tests']}" if checked else "–",
        f"{max(cell['max_tv'] for cell in steps):.1e}" if steps else "–",
        f"{min(c['p_value'] for c in short):.2g}{', **differs**' if apart else ''}" if short else "–",
        *_said(results.cells("sampled", draft=draft, filters="default", lenience=1.0)),
        _ratio(greedy, "accepted", "drafted"),
    ]


# Under lenience


def lenient(results: Results) -> tuple[list[str], list[list[str]]]:
    titles = [
        "draft", "lenience", "greedy texts that differ", "TV, default filters", "TV, hardly any filters",
        "accepted, default filters", "short texts: TV (by chance)", "log probability of a token",
        "style words per 100", "phrases", "the last three with hardly any filters",
    ]  # fmt: skip
    pairs = [(draft, lenience) for draft in results.drafts for lenience in (1.0, *results.leniences)]
    return titles, [_lenient_row(results, *pair) for pair in pairs]


def _lenient_row(results: Results, draft: str, lenience: float) -> list[str]:
    greedy = results.cells("greedy", draft=draft, lenience=lenience)
    differ = [cell for cell in greedy if cell["parts_at"] is not None]
    drawn = {"draft": draft, "kind": "drawn", "rule": "token", "lenience": lenience}
    default = results.cells("positions", filters="default", **drawn)
    wide = results.cells("positions", filters="wide", **drawn)
    short = results.cells("first tokens", draft=draft, lenience=lenience)
    said = [
        _said(results.cells("sampled", draft=draft, filters=filters, lenience=lenience))
        for filters in ("default", "wide")
    ]
    return [
        draft,
        f"{lenience:g}",
        f"{len(differ)} of {len(greedy)}" if greedy else "–",
        spread(default, "tv"),
        spread(wide, "tv"),
        spread(default, "acceptance"),
        _short(short),
        *said[0],
        "; ".join(said[1]),
    ]


def _short(tests: Sequence[Cell]) -> str:
    if not tests:
        return "–"
    found, chance = (np.mean([test[name] for test in tests]) for name in ("distance", "chance_distance"))
    return f"{found:.2f} ({chance:.2f})"


def _said(texts: Sequence[Cell]) -> list[str]:
    """Log probability of a token, style words in 100, phrases."""
    if not texts:
        return ["–"] * 3
    each = [cell["logprob"] / max(cell["tokens"], 1) for cell in texts]
    error = np.std(each, ddof=1) / len(each) ** 0.5 if len(each) > 1 else np.nan
    words = sum(cell["words"] for cell in texts)
    style = 100 * sum(cell["style_words"] for cell in texts) / max(words, 1)
    phrases = sum(cell["phrases"] for cell in texts)
    return [f"{np.mean(each):.2f} ± {error:.2f}", f"{style:.1f}", f"{phrases} in {len(texts)} texts"]


def _ratio(cells: Sequence[Cell], part: str, whole: str) -> str:
    total = sum(cell[whole] for cell in cells)
    return f"{sum(cell[part] for cell in cells) / total:.3f}" if total else "–"


def mean(cells: Sequence[Cell], name: str) -> float:
    """Over positions: a longer text counts for more."""
    weights = [cell["positions"] for cell in cells]
    return float(np.average([cell[name] for cell in cells], weights=weights))


def spread(cells: Sequence[Cell], name: str) -> str:
    if not cells:
        return "–"
    values = [cell[name] for cell in cells]
    digits = ".1e" if 0 < max(values) < 1e-6 else ".3f"
    return f"{mean(cells, name):{digits}} ({min(values):{digits}} to {max(values):{digits}})"


# The finding


def finding(results: Results) -> str:
    """One paragraph for who asks what a draft may do to an answer."""
    steps = results.cells("positions", lenience=1.0)
    greedy = results.cells("greedy", lenience=1.0)
    equal = sum(cell["parts_at"] is None for cell in greedy)
    near = sum(bool(cell.get("near_tie")) for cell in greedy)
    checked = results.cells("certificate")
    holds = sum(cell["holds"] for cell in checked)
    tests = results.cells("first tokens", lenience=1.0)
    most = max((cell["max_tv"] for cell in steps), default=0.0)
    is_exact = equal + near == len(greedy) and holds == len(checked) and most < ROUNDING
    is_exact = is_exact and not results.told_apart()
    sentences = [
        f"**With the exact rules {'no' if is_exact else 'SOME'} draft changed the answer**: {equal} of "
        f"{len(greedy)} greedy texts are plain decoding's token for token ({near} part at a near-tie that "
        f"the batch shape alone flips), `outrider verify` holds with {holds} of {len(checked)} drafts, a "
        f"step moves the target's distribution by {most:.0e} of total variation at most (rounding), and "
        f"{len(results.told_apart())} of {len(tests)} two-sample tests tell short texts from plain ones."
    ]
    extremes = dict.fromkeys((max(results.leniences), min(results.leniences)))
    sentences += [_under(results, lenience) for lenience in extremes]
    return " ".join(sentences)


def _under(results: Results, lenience: float) -> str:
    moved = []
    for draft in results.drafts:
        cells = results.cells(
            "positions", draft=draft, filters="default", kind="drawn", rule="token", lenience=lenience
        )
        greedy = results.cells("greedy", draft=draft, lenience=lenience)
        differ = sum(cell["parts_at"] is not None for cell in greedy)
        moved.append(f"{draft} {mean(cells, 'tv'):.3f} and {differ} of {len(greedy)}" if cells else draft)
    return (
        f"With `--lenience {lenience:g}` a step moves it by (mean total variation, and greedy texts that "
        f"differ): {'; '.join(moved)}."
    )


def table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Lines of Markdown."""
    lines = [[*titles], *([*row] for row in rows)]
    marks = ["---", *("---:" for _ in lines[0][1:])]
    return [f"| {' | '.join(line)} |" for line in (lines[0], marks, *lines[1:])]
