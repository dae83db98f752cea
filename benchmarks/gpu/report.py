"""What `device.sh` measured, in tables.

    python benchmarks/gpu/report.py OUT [--recordings FILE.recordings.jsonl…] [--pairs 0.5b:8b]

V(n), plain decoding beside a bare loop, what `outrider plan` says of the same card, and recorded answers at
the measured curves. Real texts are the matter of `policy/report.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Row, argument_parser, geometric_mean, read_rows, run_program, table
from outrider.costs import CallCosts
from outrider.costs.store import PairCosts
from outrider.lab.plan.calls import PlannedModel, machine_of
from outrider.lab.plan.catalogue import catalogue
from outrider.lab.plan.shapes import ModelShape
from policy.choices import AUTO
from policy.recorded import read_recordings
from policy.replay import Scene

SIZES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 24, 32)


def calls(curves: dict[str, CallCosts]) -> Iterator[str]:
    lines = []
    for name, costs in curves.items():
        known = {p.num_tokens: p for p in costs.points if not p.context_tokens}
        lines.append([name, *(f"{1000 * known[n].seconds:.2f}" if n in known else "" for n in SIZES)])
    yield from table(["ms of a call over n tokens", *map(str, SIZES)], lines)


def orders(rows: Sequence[Row]) -> Iterator[str]:
    lines = []
    for row in (row for row in rows if row["kind"] == "orders"):
        for sizes in (name for name in row if name[0].isdigit()):
            lines.append([row["model"], sizes, " ".join(f"{1000 * seconds:.2f}" for seconds in row[sizes])])
    yield from table(["calls in this order", "over", "ms"], lines)


def plain(rows: Sequence[Row]) -> Iterator[str]:
    lines = []
    for row in (row for row in rows if row["kind"] == "plain"):
        bare, ours = row["bare"]["median"], row["engine"]["median"]
        lines.append([row["model"], f"{1000 * bare:.3f}", f"{1000 * ours:.3f}", f"{ours / bare - 1:+.1%}"])
    yield from table(["ms a token", "bare loop", "Outrider, plain", "more"], lines)


def planned(rows: Sequence[Row], card: str) -> Iterator[str]:
    lines = []
    for row in (row for row in rows if card and row["kind"] == "calls"):
        costs, machines = CallCosts.from_json(row["costs"]), (machine_of(card, catalogue(), "llama.cpp"),)
        curve = PlannedModel(ModelShape(**row["shape"]), machines, is_target=True)
        ratios = [curve.call_s(n) / costs.call_s(n, context=0) for n in SIZES]
        error = median(abs(ratio - 1) for ratio in ratios)
        lines.append([row["model"], *(f"{ratio:.2f}" for ratio in ratios), f"{error:.0%}"])
    if lines:
        yield from table([f"planned for {card} / measured", *map(str, SIZES), "median error"], lines)


def replayed(curves: dict[str, CallCosts], files: Sequence[Path], pairs: Sequence[str]) -> Iterator[str]:
    """Acceptance from elsewhere, costs from this card; `pairs` of shapes besides each target by itself."""
    recordings, lines = [r for path in files for r in read_recordings(path) if r.tokens], []
    asked: list[tuple[str, str | None]] = [(name, None) for name in curves]
    for small, large in (pair.split(":") for pair in pairs):
        asked += [(t, d) for t in curves for d in curves if f"-{large}-" in t and f"-{small}-Q4" in d]
    for target, draft in asked if recordings else ():
        costs = PairCosts(curves[target], curves[draft] if draft else None)
        scene = Scene.of(recordings, costs, warm=True)
        automatic, bounds = scene.run(AUTO)[0], scene.bounds()
        speedup = geometric_mean(r.speedup for r in automatic)
        share = geometric_mean(b / r.seconds for b, r in zip(bounds, automatic, strict=True))
        figures = f"{speedup:.2f}x", f"{speedup / share:.2f}x", f"{share:.0%}"
        lines.append([target, draft or "lookup alone", *figures])
    yield from table(["recorded answers", "draft model", "speed-up", "bound", "of the bound"], lines)


def main() -> None:
    parser = argument_parser(__doc__, out=False)
    parser.add_argument("measured", type=Path, metavar="OUT")
    parser.add_argument("--recordings", nargs="*", type=Path, default=[])
    parser.add_argument("--pairs", nargs="*", default=["0.5b:8b", "1.5b:32b"], help="DRAFT:TARGET, of shapes")
    given = parser.parse_args()
    rows = read_rows(given.measured / "rows_calls.jsonl")
    curves = {row["model"]: CallCosts.from_json(row["costs"]) for row in rows if row["kind"] == "calls"}
    print(f"```json\n{json.dumps(rows[0], indent=1)}\n```\n")
    tables = calls(curves), orders(rows), plain(rows), planned(rows, rows[0]["card"])
    for lines in (*tables, replayed(curves, given.recordings, given.pairs)):
        print("\n".join(lines), flush=True)


if __name__ == "__main__":
    run_program(main)
