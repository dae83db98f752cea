"""What to run: of each file the library, the draft and the setting that are fastest here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.bench.report.view import Best, View
from outrider.bench.results import Cell
from outrider.bench.summary import speeds
from outrider.lab.settings import Setting
from outrider.lab.statistics import Interval


@dataclass(frozen=True, slots=True)
class Choice:
    """What to run a file with. `ran` is what was measured; `rival` the fastest of the same file under another
    backend, be it for certain or not (None: there is no other), `gain` how much faster than that it is and
    `outcome` whether that is beyond the noise."""

    ran: Cell
    backend: str
    speed: Interval
    command: tuple[str, ...]
    """`outrider run` as it was measured, in words"""
    rival: Choice | None = None
    gain: Interval | None = None
    outcome: speeds.Outcome = "tie"


def best_cell(view: View, target: str) -> Best | None:
    """The best way to speculate with a target over all workloads; None where nothing is known."""
    cells = [view.best(target, draft, view.pooled) for draft in view.columns] if view.pooled_first else []
    best = max((cell for cell in cells if cell.speedup), key=_rank, default=None)
    return None if best is None else _simpler(view, best)


def choices(view: View) -> list[Choice]:
    """Of every file what was measured fastest, under whichever backend; files that never ran are left out."""
    found, seen = list[Choice](), set[str]()
    for target in view.results.targets:
        if target in seen:
            continue
        same = view.results.same_file(target)
        seen.update(same)
        ran = [choice for name in same if (choice := _choice(view, name)) is not None]
        if ran:
            found.append(_against(view, sorted(ran, key=lambda choice: -choice.speed.value)))
    return found


def _against(view: View, ranked: Sequence[Choice]) -> Choice:
    """The first of them, against the second."""
    first, *others = ranked
    rival = _choice(view, others[0].ran.target, certain=False) if others else None
    compared = speeds.faster_than(view.results, first.ran, rival.ran) if rival else None
    if compared is None:
        return first
    gain, outcome = compared
    return replace(first, rival=rival, gain=gain, outcome=outcome)


def _choice(view: View, target: str, *, certain: bool = True) -> Choice | None:
    """The best of one target: plain decoding where nothing measured is faster, for `certain` or at all."""
    best = best_cell(view, target)
    ran = Cell.plain_of(target, view.pooled)
    if best is not None and best.is_measured and best.speedup is not None:
        is_faster = best.outcome == "faster" if certain else best.speedup.value > 1
        ran = best.cell if is_faster else ran
    speed = speeds.measured_speed(view.results, ran)
    if speed is None:
        return None
    return Choice(ran, view.results.backend(target), speed, _command(view, ran))


def _command(view: View, ran: Cell) -> tuple[str, ...]:
    backend = view.results.backend(ran.target)
    words = ["outrider", "run"]
    for flag, name, role in (("-m", ran.target, "target"), ("-md", ran.draft, "draft")):
        row = None if name is None else view.results.model(name, role)
        if row is not None:
            words += [flag, row.path]
    words += ["--backend", backend] if backend else []
    return (*words, *Setting.of(ran.setting).flags)


def _rank(cell: Best) -> tuple[bool, float]:
    """What is faster for certain comes before what only looks faster."""
    return cell.outcome == "faster", cell.speedup.value if cell.speedup else 0.0


def _simpler(view: View, best: Best) -> Best:
    """The same target without a draft model, where that is not measurably slower."""
    alone = view.best(best.target, None, best.workload) if None in view.columns else best
    if best.draft is None or alone.outcome != "faster" or not alone.is_measured:
        return best
    gain = view.gain(best, alone)
    return alone if gain is not None and gain.low <= 1 else best
