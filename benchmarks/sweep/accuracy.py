"""How right a sweep's predictions were, what it took, and whether the best setting was among its finalists.

    python benchmarks/sweep/accuracy.py RUN [--finalists 1]

Of a run in which every setting ran (exhaustive.toml), each cell is looked at as a sweep would have: would the
setting that was measured fastest have been among the best `--finalists` predicted ones, the automatic choice
and the controls, or is it within the noise of one of these?
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from harness import argument_parser, run_program
from outrider.lab.bench.results import Cell, Results
from outrider.lab.bench.stages import choose
from outrider.lab.bench.summary.account import time_saved
from outrider.lab.bench.summary.predictions import prediction_error
from outrider.lab.bench.summary.speeds import measured_speedup, paired
from outrider.lab.rows import PredictionRow
from outrider.lab.settings import Setting
from outrider.lab.statistics import estimate

CONTROLS = (Setting.of("model 3"), Setting.of("lookup 8"))


def main() -> None:
    parser = argument_parser(__doc__, out=False)
    parser.add_argument("run", type=Path)
    parser.add_argument("--finalists", type=int, default=1)
    arguments = parser.parse_args()
    results = Results.read(arguments.run)
    errors(results)
    times(results)
    print("| target | draft | workload | ran | fastest | would have run | fastest of these | apart |")
    print("|---|---|---|---:|---|---|---|---:|")
    for line in finalists(results, arguments.finalists):
        print(f"| {' | '.join(line)} |")


def errors(results: Results) -> None:
    found = prediction_error(results)
    for name, figures in (("raw", found.raw), ("anchored to plain decoding", found.anchored)):
        if figures is not None:
            print(
                f"{name}: {figures.settings} settings, median error {figures.median_error:.1%}, within 5 %: "
                f"{figures.within_5_ratio:.0%}, within 10 %: {figures.within_10_ratio:.0%}"
            )
    by_error = sorted(
        found.points, key=lambda p: abs(p.predicted_tokens_per_s / p.measured_tokens_per_s - 1), reverse=True
    )
    parted = {
        (run.target, run.draft, run.setting, run.workload) for run in results.runs if run.equal is False
    }
    for point in by_error[:8]:
        cell = point.cell
        note = ", texts part" if tuple(cell[:4]) in parted else ""
        ratio = point.predicted_tokens_per_s / point.measured_tokens_per_s
        print(
            f"  {ratio:.2f} of measured: {cell.target}, {cell.draft}, {cell.workload}, {cell.setting}{note}"
        )


def times(results: Results) -> None:
    account = time_saved(results)
    if account.everything_s:
        print(
            f"took {account.took_s / 60:.0f} min of model time (recording {account.recording_s / 60:.1f}, "
            f"scoring {account.scoring_s / 60:.1f}, running {account.running_s / 60:.1f}); all "
            f"{account.combinations} combinations would take {account.everything_s / 3600:.1f} h: "
            f"{account.took_ratio:.1%}"
        )


def finalists(results: Results, number: int) -> Iterator[list[str]]:
    """A line for each cell: the measured best, those that a sweep would have run, and how far apart the best
    of each are."""
    for target in results.targets:
        for draft in (None, *results.drafts):
            for workload in results.workloads:
                known = results.prediction_by_cell.items()
                rows = [r for c, r in known if c[:2] == (target, draft) and r.workload == workload]
                if rows and (line := finalist(results, rows, number)):
                    yield line


def finalist(results: Results, rows: Sequence[PredictionRow], number: int) -> list[str]:
    """The line of one cell; empty where nothing ran."""
    target, draft, workload = rows[0].target, rows[0].draft, rows[0].workload
    chosen = choose(rows, finalists=number, controls=CONTROLS)
    ran = {
        row.setting: speed.value
        for row in rows
        if (speed := measured_speedup(results, Cell(target, draft, row.setting, workload)))
    }
    ours = {name: ran[name] for name in (*chosen.finalists, *chosen.controls) if name in ran}
    if not ours:
        return []
    best, our_best = max(ran, key=ran.__getitem__), max(ours, key=ours.__getitem__)
    gap = gap_of(results, Cell(target, draft, best, workload), Cell(target, draft, our_best, workload))
    found = [target, draft or "none", workload, str(len(ran)), f"{best} {ran[best]:.2f}x"]
    return [*found, ", ".join(ours), f"{our_best} {ours[our_best]:.2f}x", gap]


def gap_of(results: Results, best: Cell, ours: Cell) -> str:
    """How much faster the first is, in the same blocks."""
    if best == ours:
        return "the same"
    strata = paired(results, best, ours)
    if strata is None:
        return ""
    apart = estimate(strata, draw_cases=False).interval
    within = " (within the noise)" if apart.low <= 1 <= apart.high else ""
    return f"{apart.value:.3f}x, {apart.low:.3f} to {apart.high:.3f}{within}"


if __name__ == "__main__":
    run_program(main)
