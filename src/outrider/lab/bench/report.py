"""What a run says in sentences, as a command and in tables: for the terminal, for programs, and as a page of
HTML that needs no network and no other file."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from outrider.core import numbers
from outrider.core.files import check_writable, write_whole
from outrider.lab.bench import figures
from outrider.lab.bench.figures import Finding, best
from outrider.lab.bench.results import Cell, Results
from outrider.lab.settings import PLAIN, Setting
from outrider.lab.statistics import estimate

METHOD = (
    "“Predicted” is replayed from recorded answers at measured call times, “measured” ran for real, in turn "
    "with plain decoding. A figure is the median over repetitions and the geometric mean over prompts; "
    "intervals are 95 %. A tie lies within the noise, or is uncertain and within 5 % of 1; farther away it "
    "is unsettled. docs/method.md of Outrider says all of this in full."
)


# What to run


def best_cell(
    results: Results, target: str, workload: str | None, *, measured: bool = False
) -> Finding | None:
    """The best way to speculate with a target under a workload, of those that are `measured` or of all; None
    where nothing is known. What is faster for certain comes before what only looks faster, and no draft model
    before one that adds nothing."""
    cells = [best(results, target, draft, workload) for draft in results.columns]
    cells = [cell for cell in cells if cell.is_measured or not measured]
    ranked = [((cell.outcome == "faster", cell.speedup.value), cell) for cell in cells if cell.speedup]
    if not ranked:
        return None
    found = max(ranked, key=lambda pair: pair[0])[1]
    alone = next((cell for cell in cells if cell.cell.draft is None), found)
    if found.cell.draft is None or alone.outcome != found.outcome or not alone.is_measured:
        return found
    strata = figures.paired(results, found.cell, alone.cell)
    return alone if strata and estimate(strata).low <= 1 else found


def choices(results: Results) -> dict[Cell, str]:
    """Of every target that ran what was measured fastest (plain decoding where nothing is faster or may well
    be), and the `outrider run` of it."""
    found = {}
    for target in results.targets:
        most = best_cell(results, target, results.pooled, measured=True)
        is_faster = most is not None and most.is_faster
        ran = most.cell if most and is_faster else Cell(target, None, PLAIN.name, results.pooled)
        if figures.measured_speed(results, ran):
            found[ran] = _command(results, ran)
    return found


def _command(results: Results, ran: Cell) -> str:
    words = ["outrider", "run"]
    target = results.model(ran.target, ran.target)
    draft = None if ran.draft is None else results.model(ran.draft, ran.target)
    words += [] if target is None else ["-m", target.path]
    if draft is None:  # a head drafts unless it is switched off
        words += ["--no-mtp"] if any(row.beside == ran.target for row in results.models) else []
    elif target is None or draft.path != target.path:
        words += ["-md", draft.path]
    backend = results.backend(ran.target)
    words += ["--backend", backend] if backend else []
    return shlex.join([*words, *Setting.of(ran.setting).flags])


# The verdict


def verdict(results: Results, target: str) -> list[str]:
    """What to do with a target on this machine, in a sentence, and what settles it where it is not settled.

    What gains nothing over all workloads may gain on some: then these are named."""
    found = best_cell(results, target, results.pooled)
    if found is None or found.speedup is None:
        return [f"{target}: nothing was measured or predicted yet."]
    start = "On this machine" if found.is_measured else "By prediction, not yet measured"
    ran, speedup, workload = _setting(found.cell), numbers.speedup(found.speedup), found.cell.workload
    if found.is_faster:
        likely = "fastest" if found.outcome == "faster" else "most likely fastest"
        bounds = f" ({numbers.bounds(found.speedup)})" if found.is_measured else ""
        gain = f"{speedup}{bounds} plain decoding over {workload or 'all workloads'}{_rates(results, found)}"
        settling = [] if found.outcome == "faster" and found.is_measured else [unsettled(found)]
        return [f"{start}, {target} is {likely} with {ran}, {gain}.", *settling]
    verb = {"tie": "ties", "unsettled": "is most likely slower"}.get(found.outcome or "", "is slower")
    each = [best_cell(results, target, name) for name in results.workloads]
    if wins := [one for one in each if one is not None and one.is_faster]:
        gains = joined(f"{w.cell.workload} ({_setting(w.cell)}, {numbers.speedup(w.speedup)})" for w in wins)
        said = f"gains nothing over all workloads ({ran} {verb} at {speedup}), but it does on {gains}"
        is_settled = any(one.outcome == "faster" for one in wins)
        return [f"{start}, {target} {said}.", *([] if is_settled else [unsettled(wins[0])])]
    return [f"{start}, decode {target} plainly: the best that was tried, {ran}, {verb} ({speedup})."]


def _rates(results: Results, found: Finding) -> str:
    plain = figures.measured_speed(results, found.cell.plain)
    if plain is None or found.speedup is None:
        return ""
    after = numbers.digits(plain.value * found.speedup.value)
    return f" (from {numbers.rate(plain)} to about {after} tokens/s)"


def unsettled(found: Finding) -> str:
    """Why a result is not settled, and what settles it."""
    speedup = found.speedup
    assert speedup is not None
    if not found.is_measured:
        return "It has not run for real: run the same command again, with more --minutes if it has a limit."
    if speedup.low <= 1:
        return (
            "That is not settled: it gains on some prompts and not on others. More of them settle it "
            "(--prompts, or --workload with a file of your own), in another folder (-o)."
        )
    times, more = f"{speedup.repetitions} times", max(2 * speedup.repetitions, 4)
    few = "once, so the machine's noise is unknown" if speedup.repetitions == 1 else f"{times}, too few here"
    return (
        f"That is not settled: each prompt ran {few}. Run the same command with --repetitions {more} to "
        "settle it: it goes on where it is."
    )


def _setting(ran: Cell) -> str:
    if ran.setting == PLAIN.name:
        return "plain decoding"
    draft = "no draft model" if ran.draft is None else f"the draft {ran.draft}"
    return f"{draft} and the setting “{ran.setting}”"


def joined(names: Iterable[str]) -> str:
    """A list as people write it.

    >>> joined(["a", "b", "c"])
    'a, b and c'
    """
    *others, end = list(names) or [""]
    return f"{', '.join(others)} and {end}" if others else end


# What to keep in mind


def notes(results: Results) -> list[str]:
    """Noise, texts that differed, how far predictions were off."""
    said = []
    found = [(target, figures.noise(results, target, results.pooled)) for target in results.targets]
    if noises := [f"{target} ±{numbers.percent(n.high - 1, 1)}" for target, n in found if n]:
        said.append(f"Noise of plain decoding against itself: {joined(noises)}.")
    return [*said, *_equality(results), _prediction_line(results)]


def _prediction_line(results: Results) -> str:
    error = figures.prediction_error(results)
    if error is None:
        return "No setting was both predicted and run: nothing is known about the error of predictions."
    over = numbers.counted(error[0], "result")
    return f"Over {over} the predicted speed-ups were off by {numbers.percent(error[1], 1)} in the median."


def _equality(results: Results) -> list[str]:
    checked = [row for row in results.runs if row.equal is not None]
    others = [row for row in checked if row.equal is False]
    if not others:
        equal = f"All {len(checked)} answers that can be compared equal the recorded ones."
        return [equal] if checked else []
    return [
        f"{len(others)} of {len(checked)} answers differ from the recorded ones somewhere: two tokens were "
        "nearly as likely, and rounding decided between them. `outrider verify` says by what margin; "
        "--bitwise excludes it."
    ]


# Tables of texts


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of plain texts by column, all with the same columns; those in `figures` are aligned right. `bars`
    are drawn in the last one, as long as these percentages of it."""

    caption: str
    rows: Sequence[Mapping[str, str]]
    figures: Collection[str] = ()
    bars: Sequence[float] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """Their heads; none where there are no rows."""
        return tuple(self.rows[0]) if self.rows else ()


def cells(results: Results, found: Finding) -> dict[str, str]:
    """A pairing at its best setting, a text by column; "≈" marks what is only predicted."""
    is_predicted = found.speedup is not None and not found.is_measured
    return {
        "draft": found.cell.draft or "none",
        "workload": found.cell.workload or "all",
        "plain tokens/s": numbers.rate(figures.measured_speed(results, found.cell.plain)),
        "setting": found.cell.setting or numbers.NOTHING,
        "speed-up": ("≈ " if is_predicted else "") + numbers.speedup(found.speedup),
        "95 %": "predicted" if is_predicted else numbers.bounds(found.speedup).replace(" to ", "–"),
        "verdict": found.outcome or "not known",
    }


def measured(results: Results) -> Table:
    """Everything that ran for real, predicted beside measured."""
    rows = []
    for finding in figures.verdicts(results):
        cell, ran = finding.cell, results.runs_by_cell[finding.cell]
        per_call = sum(row.tokens for row in ran) / max(sum(row.target_calls for row in ran), 1)
        row = {
            "target": cell.target,
            "backend": results.backend(cell.target) or numbers.NOTHING,
            "draft": cell.draft or "none",
            "workload": cell.workload or "all",
            "setting": cell.setting,
            "tokens/s": numbers.rate(figures.measured_speed(results, cell)),
            "predicted": numbers.speedup(figures.predicted_speedup(results, cell)),
            "measured": numbers.speedup(finding.speedup),
            "95 % interval": numbers.bounds(finding.speedup),
            "tokens a target call": f"{per_call:.2f}",
            "verdict": finding.outcome or "",
        }
        rows.append(row)
    right = ("tokens/s", "predicted", "measured", "tokens a target call")
    return Table("Everything that ran for real", rows, right)


def models(results: Results) -> Table:
    """The files that took part, by their content."""
    rows = [
        {
            "model": row.model,
            "role": row.role,
            "backend": row.backend or numbers.NOTHING,
            "architecture": row.architecture,
            "quantization": row.quantization,
            "parameters": numbers.short_count(row.parameters),
            "of these active": numbers.short_count(row.active_parameters),
            "file": numbers.gigabytes(row.file_bytes),
            "fingerprint": row.fingerprint,
            "load options": _plain(row.effective),
            "path": row.path,
        }
        for row in results.models
    ]
    return Table("Models", rows, ("parameters", "of these active", "file"))


def skipped(results: Results) -> Table:
    """What takes no part, and why."""
    return Table("What took no part", [{"what": row.what, "why": row.why} for row in results.skipped])


def facts(caption: str, values: Mapping[str, Any]) -> Table:
    """What was measured on, or what was asked for."""
    rows = [{"what": name.replace("_", " "), "value": _plain(value)} for name, value in values.items()]
    return Table(caption, rows)


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        value = [f"{name} {_plain(part)}" for name, part in value.items()]
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value)) or numbers.NOTHING
    if value is None:
        return numbers.NOTHING
    return value if isinstance(value, str) else json.dumps(value)


# The page

_LONGEST_BOUND = 2.0
"""times its value: an interval that reaches farther is cut off, or it would make all bars short"""


def bars(values: Iterable[float]) -> list[float]:
    """Their lengths, in percent of the longest."""
    found = list(values)
    return [round(100 * value / max([*found, 1e-9]), 1) for value in found]


_SIZES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32)


def costs(results: Results) -> Table:
    """What target calls cost by their tokens, and a draft step beside them."""
    rows, ratios = list[dict[str, str]](), list[float]()
    for row in [row for row in results.costs if row.role == "target"]:
        curve = row.costs()
        one_s = curve.call_s(1, context=0)
        drafts = [r for r in results.costs if r.role == "draft" and r.beside in (None, row.model)]
        calls = [("target call", size, curve.call_s(size, context=0)) for size in _SIZES]
        calls += [(f"step of {r.model}", 1, r.costs().call_s(1, context=0)) for r in drafts]
        for call, size, seconds in calls:
            ratios.append(seconds / one_s)
            shown = {"target": row.model, "call": call, "tokens": str(size)}
            shown |= {"time": numbers.milliseconds(seconds), "calls of one token": f"{ratios[-1]:.2f}"}
            rows.append(shown)
    caption = "What a call costs: where a longer one takes as long, longer drafts cost nothing"
    return Table(caption, rows, ("tokens", "time", "calls of one token"), bars(ratios))


def write_report(results: Results, path: Path) -> None:
    """Write the page to `path`, all of it or nothing. Raises SettingError where it cannot be written."""
    check_writable(path, "report")
    write_whole(path, page(results), "report")


def page(results: Results) -> str:
    """The whole document. The same rows give the same text."""
    environment = Environment(
        loader=PackageLoader("outrider.lab.bench", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"words": _words, "readable": numbers.readable}
    return environment.get_template("page.html").render(
        name=str(results.head.plan.get("name") or "sweep"),
        where=f"{results.head.machine.get('cpu', 'unknown processor')}, started {results.head.started}",
        targets=_targets(results),
        notes=notes(results),
        pictures={"costs": costs(results)},
        measured=measured(results),
        method=METHOD,
        setup=[
            skipped(results),
            facts("Machine and builds", results.head.machine),
            models(results),
            facts("Plan", results.head.plan),
        ],
    )


def _targets(results: Results) -> list[dict[str, Any]]:
    commands = {ran.target: command for ran, command in choices(results).items()}
    found = []
    for target in results.targets:
        bars = _bars(results, figures.bests_of(results, target))
        pooled = [bar for bar in bars if bar["workload"] == results.pooled and bar["value"]]
        parts = {
            "target": target,
            "said": verdict(results, target),
            "command": commands.get(target, ""),
            "bars": pooled,
            "by_workload": [bar for bar in bars if bar["workload"] != results.pooled and pooled],
        }
        found.append(parts)
    return found


def _bars(results: Results, found: Sequence[Finding]) -> list[dict[str, Any]]:
    """The chart that a report begins with. Its rows are those of a table, so that it is read, and heard,
    without the bars. Places on the axis are parts of its length, in percent; `one` is plain decoding's."""
    speedups = [one.speedup for one in found if one.speedup]
    ends = [s.high if s.high < _LONGEST_BOUND * s.value else s.value for s in speedups]
    longest = max([1.25, *ends])

    def place(value: float) -> float:
        return round(100 * min(value / longest, 1.0), 1)

    return [
        {
            "workload": one.cell.workload,
            "cells": cells(results, one),
            "kind": (one.outcome or "unknown") if one.is_measured else "predicted",
            "value": place(one.speedup.value) if one.speedup else 0.0,
            "low": place(one.speedup.low) if one.speedup else 0.0,
            "high": place(one.speedup.high) if one.speedup else 0.0,
            "one": place(1.0),
        }
        for one in found
    ]


def _words(text: str) -> Markup:
    """A sentence within HTML; a figure stays on a line with its percent sign."""
    return Markup(str(escape(numbers.readable(text))).replace(" %", "&#160;%"))
