"""What a run says, in sentences: for the terminal and for the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from outrider.core import numbers
from outrider.lab.bench.report.choice import Choice, best_cell
from outrider.lab.bench.report.view import Best, View, draft_name, workload_name
from outrider.lab.bench.results import Cell, Results
from outrider.lab.bench.summary import counts, speeds
from outrider.lab.settings import PLAIN

METHOD = (
    "“Predicted” is replayed from recorded answers at measured call times, “measured” ran for real, in turn "
    "with plain decoding. A figure is the median over repetitions and the geometric mean over prompts; "
    "intervals are 95 %. A tie lies within the noise, or is uncertain and within 5 % of 1; farther away it "
    "is unsettled. docs/method.md of Outrider says all of this in full."
)

_WORDS = {"faster": "wins on", "unsettled": "is unsettled on", "slower": "loses on", "tie": "ties on"}


def verdict(view: View, target: str) -> list[str]:
    """What to do with a target on this machine, in a sentence, and those that say more of it."""
    best = best_cell(view, target)
    if best is None or best.speedup is None:
        return [f"{target}: nothing was measured or predicted yet."]
    start = "On this machine" if best.is_measured else "By prediction, not yet measured"
    ran, speedup = _setting(best.cell), numbers.speedup(best.speedup)
    if best.is_faster:
        mine = _by_workload(view, best)
        is_settled = best.outcome == "faster" and best.is_measured
        likely = "fastest" if best.outcome == "faster" else "most likely fastest"
        bounds = f" ({numbers.bounds(best.speedup)})" if best.is_measured else ""
        gain = f"{speedup}{bounds} plain decoding over {workload_name(best.workload)}"
        more = [f"Each workload at its best setting, it {_details(mine)}."] if len(mine) > 1 else []
        more += _of_drafts(view, best) if is_settled else [unsettled(best)]
        return [f"{start}, {target} is {likely} with {ran}, {gain}{_rates(best)}.", *more]
    verb = {"tie": "ties", "unsettled": "is most likely slower"}.get(best.outcome or "", "is slower")
    cells = [view.best(target, draft, best.workload) for draft in view.columns]
    for cell in sorted(cells, key=lambda cell: cell is not best):
        mine = _by_workload(view, cell)
        if winners := [single for single in mine if single.is_faster]:
            other = "" if cell is best else f" with {draft_name(cell.draft)}"
            settling = [] if any(w.outcome == "faster" for w in winners) else [unsettled(winners[0])]
            said = f"{target} gains nothing over all workloads ({ran} {verb} at {speedup}), but by workload"
            return [f"{start}, {said}{other} it {_details(mine)}.", *settling]
    return [f"{start}, decode {target} plainly: the best that was tried, {ran}, {verb} ({speedup})."]


def _rates(best: Best) -> str:
    if best.plain is None or best.speedup is None:
        return ""
    after = numbers.digits(best.plain.value * best.speedup.value)
    return f" (from {numbers.rate(best.plain)} to about {after} tokens/s)"


def unsettled(best: Best) -> str:
    """Why a result is not settled, and what settles it."""
    speedup = best.speedup
    assert speedup is not None
    if not best.is_measured:
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


def winner(view: View, target: str) -> str:
    """What is fastest with a target, in a few words."""
    if (best := best_cell(view, target)) is None:
        return f"{target}: nothing was measured or predicted yet."
    if not best.is_faster:
        return f"{target}: plain decoding."
    how = ", by prediction" if not best.is_measured else "" if best.outcome == "faster" else ", not settled"
    return f"{target}: {_setting(best.cell)}, {numbers.speedup(best.speedup)} plain decoding{how}."


def winners(results: Results) -> list[tuple[str, str]]:
    """Of a sweep over several kinds of machines, by their names, what wins on each with each target."""
    views = ((name, View(sheet)) for name, sheet in results.sheets.items())
    return [(name, winner(view, target)) for name, view in views for target in view.results.targets]


def taken(choice: Choice) -> str:
    """Which library to take for a file, and with what, in a sentence that ends before the command."""
    name, rival = choice.ran.target.removesuffix(f" ({choice.backend})"), choice.rival
    if rival is None or choice.gain is None:
        return f"To run {name}:"
    gain = f"{numbers.speedup(choice.gain)} ({numbers.bounds(choice.gain)}) the best under"
    if choice.outcome == "faster":
        said = f"Take {choice.backend} for {name}, with {_setting(choice.ran)}: {gain}"
    elif choice.outcome == "unsettled":
        said = f"Most likely {choice.backend} is faster for {name}, with {_setting(choice.ran)}: {gain}"
    else:
        said = f"For {name} either library will do: {choice.backend} with {_setting(choice.ran)} is {gain}"
    return (
        f"{said} {rival.backend} ({_setting(rival.ran)}); {numbers.rate(choice.speed)} tokens/s against "
        f"{numbers.rate(rival.speed)}. To run it:"
    )


def _setting(ran: Cell) -> str:
    """What a file was run with."""
    if ran.setting == PLAIN.name:
        return "plain decoding"
    draft = "no draft model" if ran.draft is None else f"the draft {ran.draft}"
    return f"{draft} and the setting “{ran.setting}”"


def _of_drafts(view: View, best: Best) -> list[str]:
    """What draft models add to lookup alone, where that is nothing."""
    drafts = [draft for draft in view.columns_of(best.target) if draft is not None]
    has_ran = any(view.best(best.target, draft, best.workload).is_measured for draft in drafts)
    if best.draft is not None or not best.is_measured or not has_ran:
        return []
    return ["No draft model adds anything to that beyond the noise."]


def _by_workload(view: View, cell: Best) -> list[Best]:
    return [view.best(cell.target, cell.draft, workload) for workload in view.results.workloads]


def _details(cells: Sequence[Best]) -> str:
    """On which workloads it wins, ties, loses: each at the setting that is best there."""
    parts = []
    for outcome, word in _WORDS.items():
        found = [cell for cell in cells if cell.speedup and cell.outcome == outcome]
        named = [
            f"{cell.workload} ({'' if cell.is_measured else '≈ '}{numbers.speedup(cell.speedup)})"
            for cell in found
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


def prediction_line(view: View) -> str:
    """How far predictions were off."""
    figures = speeds.prediction_error(view.results)
    if figures is None:
        return "No setting was both predicted and run: nothing is known about the error of predictions."
    return (
        f"Over {figures.settings} result{'s' * (figures.settings != 1)} the predicted speed-ups were off by "
        f"{numbers.percent(figures.median_error, 1)} in the median; "
        f"{numbers.percent(figures.within_5_ratio)} were within 5 %, "
        f"{numbers.percent(figures.within_10_ratio)} within 10 %."
    )


def notes(view: View) -> list[str]:
    """What to keep in mind: noise, hiccups, texts that differed, how far predictions were off."""
    said = []
    found = [(target, speeds.noise(view.results, target, view.pooled)) for target in view.results.targets]
    if noises := [f"{target} ±{numbers.percent(n.high - 1, 1)}" for target, n in found if n]:
        said.append(f"Noise of plain decoding against itself: {joined(noises)}.")
    hiccups = counts.hiccups(view.results)
    if hiccups.calls:
        said.append(
            f"Hiccups of the machine: {hiccups.hiccups} of {hiccups.calls} single-token calls took more than "
            f"twice the median ({numbers.percent(hiccups.ratio, 2)})."
        )
    measured = [best.speedup for best in view.bests.values() if best.is_measured and best.speedup]
    caveats = Counter(speedup.caveat for speedup in measured if speedup.caveat)
    said += [
        f"{count} of {len(measured)} measured best settings have too few repetitions or prompts ({caveat})."
        for caveat, count in caveats.items()
    ]
    took_s = counts.model_seconds(view.results)
    spent = [f"Model calls took {numbers.duration(took_s)}."] if took_s else []
    return [*said, *_equality(view), prediction_line(view), *spent]


def _equality(view: View) -> list[str]:
    """How many answers equal the recorded ones, as far as that can be said."""
    checked = [row for row in view.results.runs if row.equal is not None]
    others = [row for row in checked if row.equal is False]
    if not others:
        equal = f"All {len(checked)} answers that can be compared equal the recorded ones."
        return [equal] if checked else []
    return [
        f"{len(others)} of {len(checked)} answers differ from the recorded ones somewhere: two tokens were "
        "nearly as likely, and rounding decided between them. `outrider verify` says by what margin; "
        "--bitwise excludes it."
    ]
