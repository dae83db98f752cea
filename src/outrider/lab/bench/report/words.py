"""What a run says in sentences, as a command and in tables: for the terminal, the page and programs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.core import numbers
from outrider.core.numbers import Interval
from outrider.lab.bench import figures
from outrider.lab.bench.figures import Best, best
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


@dataclass(frozen=True, slots=True)
class Choice:
    """What to run a target with: the cell that was measured, and `outrider run` as it was measured."""

    ran: Cell
    tokens_per_s: Interval
    command: str


def best_cell(results: Results, target: str, workload: str | None, *, measured: bool = False) -> Best | None:
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


def choices(results: Results) -> list[Choice]:
    """Of every target that ran what was measured fastest: plain decoding where nothing is faster or may well
    be."""
    found = []
    for target in results.targets:
        most = best_cell(results, target, results.pooled, measured=True)
        ran = most.cell if most is not None and most.is_faster else None
        ran = ran or Cell(target, None, PLAIN.name, results.pooled)
        if speed := figures.measured_speed(results, ran):
            found.append(Choice(ran, speed, _command(results, ran)))
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
        gain = f"{speedup}{bounds} plain decoding over {workload or 'all workloads'}{_rates(found)}"
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


def _rates(found: Best) -> str:
    if found.plain_tokens_per_s is None or found.speedup is None:
        return ""
    after = numbers.digits(found.plain_tokens_per_s.value * found.speedup.value)
    return f" (from {numbers.rate(found.plain_tokens_per_s)} to about {after} tokens/s)"


def unsettled(found: Best) -> str:
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
    return (
        f"Over {numbers.counted(error.settings, 'result')} the predicted speed-ups were off by "
        f"{numbers.percent(error.median_error, 1)} in the median; "
        f"{numbers.percent(error.within_5_ratio)} were within 5 %, "
        f"{numbers.percent(error.within_10_ratio)} within 10 %."
    )


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


def cells(found: Best) -> dict[str, str]:
    """A pairing at its best setting, a text by column; "≈" marks what is only predicted."""
    is_predicted = found.speedup is not None and not found.is_measured
    return {
        "draft": found.cell.draft or "none",
        "workload": found.cell.workload or "all",
        "plain tokens/s": numbers.rate(found.plain_tokens_per_s),
        "setting": found.cell.setting or numbers.NOTHING,
        "speed-up": ("≈ " if is_predicted else "") + numbers.speedup(found.speedup),
        "95 %": "predicted" if is_predicted else numbers.bounds(found.speedup).replace(" to ", "–"),
        "verdict": found.outcome or "not known",
    }


def measured(results: Results) -> Table:
    """Everything that ran for real, predicted beside measured."""
    rows = []
    for verdict in figures.verdicts(results):
        cell = verdict.cell
        per_call = figures.tokens_per_target_call(results, cell)
        row = {
            "target": cell.target,
            "backend": results.backend(cell.target) or numbers.NOTHING,
            "draft": cell.draft or "none",
            "workload": cell.workload or "all",
            "setting": cell.setting,
            "tokens/s": numbers.rate(figures.measured_speed(results, cell)),
            "predicted": numbers.speedup(figures.predicted_speedup(results, cell)),
            "measured": numbers.speedup(verdict.speedup),
            "95 % interval": numbers.bounds(verdict.speedup),
            "tokens a target call": numbers.NOTHING if per_call is None else f"{per_call:.2f}",
            "verdict": verdict.outcome,
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
    left_out = [(row.what, row.why) for row in results.skipped]
    left_out += [
        (f"{pair.draft} for {pair.target}", pair.why_not or "its tokenizer does not line up")
        for pair in results.pairs
        if not pair.usable
    ]
    return Table("What took no part", [{"what": what, "why": why} for what, why in left_out])


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
