"""What to run: of each file the library, the draft and the setting that are fastest here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.core.numbers import Interval
from outrider.lab.bench.report.view import Best, View
from outrider.lab.bench.results import Cell
from outrider.lab.bench.summary import speeds
from outrider.lab.settings import PLAIN, Setting
from outrider.lab.statistics import estimate


@dataclass(frozen=True, slots=True)
class Choice:
    """What to run a file with.

    Args:
        ran: What was measured.
        rival: The fastest of the same file under another backend; None where there is no other.
        gain: How much faster than that it is, and `outcome` whether that is beyond the noise.
    """

    ran: Cell
    backend: str
    speed: Interval
    command: tuple[str, ...]
    """`outrider run` as it was measured, in words"""
    rival: Choice | None = None
    gain: Interval | None = None
    outcome: speeds.Outcome = "tie"


def best_cell(view: View, target: str, *, measured: bool = False) -> Best | None:
    """The best way to speculate with a target over all workloads, of those that are `measured` or of all.

    None where nothing is known. What is faster for certain comes before what only looks faster, and no draft
    model before one that adds nothing.
    """
    cells = [view.best(target, draft, view.pooled) for draft in view.columns] if view.pooled_first else []
    cells = [cell for cell in cells if cell.is_measured or not measured]
    ranked = [((cell.outcome == "faster", cell.speedup.value), cell) for cell in cells if cell.speedup]
    if not ranked:
        return None
    best = max(ranked, key=lambda pair: pair[0])[1]
    alone = next((cell for cell in cells if cell.draft is None), best)
    if best.draft is None or alone.outcome != best.outcome or not alone.is_measured:
        return best
    strata = speeds.paired(view.results, best.cell, alone.cell)
    return alone if strata and estimate(strata).interval.low <= 1 else best


def choices(view: View) -> list[Choice]:
    """Of every file what was measured fastest, under whichever backend; files that never ran are left out."""
    found = []
    for target in view.results.targets:
        same = view.results.same_file(target)
        ran = [choice for name in same if (choice := _choice(view, name)) is not None]
        if target != same[0] or not ran:
            continue
        first, *others = sorted(ran, key=lambda choice: -choice.speed.value)
        rival = others[0] if others else None
        if rival and (compared := speeds.faster_than(view.results, first.ran, rival.ran)):
            first = replace(first, rival=rival, gain=compared[0], outcome=compared[1])
        found.append(first)
    return found


def _choice(view: View, target: str) -> Choice | None:
    """The best of one target: plain decoding where nothing measured is faster or may well be."""
    best = best_cell(view, target, measured=True)
    ran = best.cell if best is not None and best.is_faster else None
    ran = ran or Cell(target, None, PLAIN.name, view.pooled)
    speed = speeds.measured_speed(view.results, ran)
    if speed is None:
        return None
    return Choice(ran, view.results.backend(target), speed, _command(view, ran))


def _command(view: View, ran: Cell) -> tuple[str, ...]:
    backend = view.results.backend(ran.target)
    words = ["outrider", "run"]
    target = view.results.model(ran.target, "target")
    draft = None if ran.draft is None else view.results.draft(ran.draft, ran.target)
    words += [] if target is None else ["-m", target.path]
    if draft is None:  # a head drafts unless it is switched off
        words += ["--no-mtp"] if any(row.beside == ran.target for row in view.results.models) else []
    elif target is None or draft.path != target.path:
        words += ["-md", draft.path]
    words += ["--backend", backend] if backend else []
    return (*words, *Setting.of(ran.setting).flags)
