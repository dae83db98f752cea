"""What a run says, in sentences and as a command: for the terminal, for the page and for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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

_WORDS = {"faster": "wins on", "unsettled": "is unsettled on", "slower": "loses on", "tie": "ties on"}


def draft_name(draft: str | None) -> str:
    """A draft as a column's head."""
    return "no draft model" if draft is None else draft


def workload_name(workload: str | None) -> str:
    """A workload as people read it."""
    return "all workloads" if workload is None else workload


# What to run


@dataclass(frozen=True, slots=True)
class Choice:
    """What to run a target with: the cell that was measured, its tokens per second, and `outrider run` as it
    was measured, in words."""

    ran: Cell
    speed: Interval
    command: tuple[str, ...]


def best_cell(results: Results, target: str, *, measured: bool = False) -> Best | None:
    """The best way to speculate with a target over all workloads, of those that are `measured` or of all.

    None where nothing is known. What is faster for certain comes before what only looks faster, and no draft
    model before one that adds nothing.
    """
    cells = [best(results, target, draft, results.pooled) for draft in results.columns]
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
        most = best_cell(results, target, measured=True)
        ran = most.cell if most is not None and most.is_faster else None
        ran = ran or Cell(target, None, PLAIN.name, results.pooled)
        if speed := figures.measured_speed(results, ran):
            found.append(Choice(ran, speed, _command(results, ran)))
    return found


def _command(results: Results, ran: Cell) -> tuple[str, ...]:
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
    return (*words, *Setting.of(ran.setting).flags)


# The verdict


def verdict(results: Results, target: str) -> list[str]:
    """What to do with a target on this machine, in a sentence, and those that say more of it."""
    found = best_cell(results, target)
    if found is None or found.speedup is None:
        return [f"{target}: nothing was measured or predicted yet."]
    start = "On this machine" if found.is_measured else "By prediction, not yet measured"
    ran, speedup, workload = _setting(found.cell), numbers.speedup(found.speedup), found.cell.workload
    if found.is_faster:
        mine = _by_workload(results, found)
        is_settled = found.outcome == "faster" and found.is_measured
        likely = "fastest" if found.outcome == "faster" else "most likely fastest"
        bounds = f" ({numbers.bounds(found.speedup)})" if found.is_measured else ""
        gain = f"{speedup}{bounds} plain decoding over {workload_name(workload)}"
        more = [f"Each workload at its best setting, it {_details(mine)}."] if len(mine) > 1 else []
        more += _of_drafts(results, found) if is_settled else [unsettled(found)]
        return [f"{start}, {target} is {likely} with {ran}, {gain}{_rates(found)}.", *more]
    verb = {"tie": "ties", "unsettled": "is most likely slower"}.get(found.outcome or "", "is slower")
    cells = [best(results, target, draft, workload) for draft in results.columns]
    for cell in sorted(cells, key=lambda cell: cell is not found):
        mine = _by_workload(results, cell)
        if winners := [single for single in mine if single.is_faster]:
            other = "" if cell is found else f" with {draft_name(cell.cell.draft)}"
            settling = [] if any(w.outcome == "faster" for w in winners) else [unsettled(winners[0])]
            said = f"{target} gains nothing over all workloads ({ran} {verb} at {speedup}), but by workload"
            return [f"{start}, {said}{other} it {_details(mine)}.", *settling]
    return [f"{start}, decode {target} plainly: the best that was tried, {ran}, {verb} ({speedup})."]


def _rates(found: Best) -> str:
    if found.plain is None or found.speedup is None:
        return ""
    after = numbers.digits(found.plain.value * found.speedup.value)
    return f" (from {numbers.rate(found.plain)} to about {after} tokens/s)"


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


def winners(results: Results) -> list[tuple[str, str]]:
    """Of a sweep over several kinds of machines, by their names, what wins on each with each target."""
    sheets = results.sheets.items()
    return [(name, _winner(sheet, target)) for name, sheet in sheets for target in sheet.targets]


def _winner(results: Results, target: str) -> str:
    if (found := best_cell(results, target)) is None:
        return f"{target}: nothing was measured or predicted yet."
    if not found.is_faster:
        return f"{target}: plain decoding."
    how = ", by prediction" if not found.is_measured else "" if found.outcome == "faster" else ", not settled"
    return f"{target}: {_setting(found.cell)}, {numbers.speedup(found.speedup)} plain decoding{how}."


def _setting(ran: Cell) -> str:
    if ran.setting == PLAIN.name:
        return "plain decoding"
    draft = "no draft model" if ran.draft is None else f"the draft {ran.draft}"
    return f"{draft} and the setting “{ran.setting}”"


def _of_drafts(results: Results, found: Best) -> list[str]:
    """What draft models add to lookup alone, where that is nothing."""
    target, workload = found.cell.target, found.cell.workload
    drafts = [draft for draft in results.columns_of(target) if draft is not None]
    has_ran = any(best(results, target, draft, workload).is_measured for draft in drafts)
    if found.cell.draft is not None or not found.is_measured or not has_ran:
        return []
    return ["No draft model adds anything to that beyond the noise."]


def _by_workload(results: Results, found: Best) -> list[Best]:
    return [best(results, found.cell.target, found.cell.draft, workload) for workload in results.workloads]


def _details(found: Sequence[Best]) -> str:
    """On which workloads it wins, ties, loses: each at the setting that is best there."""
    parts = []
    for outcome, word in _WORDS.items():
        named = [
            f"{one.cell.workload} ({'' if one.is_measured else '≈ '}{numbers.speedup(one.speedup)})"
            for one in found
            if one.speedup and one.outcome == outcome
        ]
        parts += [f"{word} {joined(named)}"] if named else []
    return joined(parts, ", ")


def joined(names: Iterable[str], last: str = " and ") -> str:
    """A list as people write it.

    >>> joined(["a", "b", "c"])
    'a, b and c'
    """
    *others, end = list(names) or [""]
    return f"{', '.join(others)}{last}{end}" if others else end


# What to keep in mind


def notes(results: Results) -> list[str]:
    """Noise, texts that differed, how far predictions were off."""
    said = []
    found = [(target, figures.noise(results, target, results.pooled)) for target in results.targets]
    if noises := [f"{target} ±{numbers.percent(n.high - 1, 1)}" for target, n in found if n]:
        said.append(f"Noise of plain decoding against itself: {joined(noises)}.")
    measured = [one.speedup for one in figures.bests(results).values() if one.is_measured and one.speedup]
    caveats = Counter(speedup.caveat for speedup in measured if speedup.caveat)
    said += [
        f"{count} of {len(measured)} measured best settings have too few repetitions or prompts ({caveat})."
        for caveat, count in caveats.items()
    ]
    took_s = figures.model_seconds(results)
    spent = [f"Model calls took {numbers.duration(took_s)}."] if took_s else []
    return [*said, *_equality(results), _prediction_line(results), *spent]


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
