"""A sweep that is killed at random moments against one that is left alone: do both end with the same rows?

    python benchmarks/sweep/kill.py TARGET.gguf DRAFT.gguf [--kills 10] [--seed 0]

Both sweep the same pair, at costs that are given, so that the choice of finalists does not hang on timings.
The process is killed with SIGKILL, wherever it is. Compared is everything but times and the counts of the
automatic choice, which listens to the clock.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from harness import argument_parser, run_program
from outrider.costs import CallCosts, CallPoint, PairCosts, export_costs
from outrider.lab.bench.store import read_rows
from outrider.lab.rows import BlockRow, HeadRow, Row, RunRow
from outrider.lab.settings import Setting

_LONGEST_S = 15.0
_TIMES = {"calls", "own_s", "own_token_s", "curve", "hiccups", "bound_s", "seconds", "effective", "order"}
_COUNTS = {"target_calls", "draft_calls", "drafted", "accepted", "forced", "equal", "divergence"}


def main() -> None:
    parser = argument_parser(__doc__, out=False, seed=0)
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--kills", type=int, default=10)
    arguments = parser.parse_args()
    rng, pair = random.Random(arguments.seed), (arguments.target, arguments.draft)
    with tempfile.TemporaryDirectory() as folder:
        costs = Path(folder) / "costs.json"
        curve = CallCosts([CallPoint(n, 0.01 * (0.8 + 0.2 * n)) for n in (1, 2, 4, 8, 16, 32)])
        small = CallCosts([CallPoint(n, 0.002 * (0.8 + 0.2 * n)) for n in (1, 2, 4, 8, 16, 32)])
        export_costs(costs, PairCosts(curve, small))
        whole, broken = Path(folder) / "whole", Path(folder) / "broken"
        sweep(pair, costs, whole, None)
        for kill in range(arguments.kills):
            after_s = rng.uniform(1.0, _LONGEST_S)
            ended = sweep(pair, costs, broken, after_s)
            lines = len((broken / "rows.jsonl").read_bytes().split(b"\n")) - 1 if broken.exists() else 0
            print(f"kill {kill + 1}: after {after_s:.1f} s, {lines} rows{' (it had ended)' if ended else ''}")
        sweep(pair, costs, broken, None)
        one, other = said(read_rows(whole)), said(read_rows(broken))
        print(f"rows left alone: {one.total()}, killed {arguments.kills} times: {other.total()}")
        for row in [*(one - other), *(other - one)]:
            print(f"differs: {row[:300]}")
        sys.exit(one != other)


def sweep(pair: tuple[Path, Path], costs: Path, folder: Path, kill_after_s: float | None) -> bool:
    """Run the sweep, killed after so many seconds; whether it ended by itself."""
    target, draft = map(str, pair)
    command = [sys.executable, "-m", "outrider", "bench", "-m", target, "-md", draft]
    command += ["--workload", "chat", "--workload", "json", "--prompts", "1", "--max-tokens", "16"]
    command += ["--draft-lengths", "0-6", "--p-mins", "0,0.5", "--repetitions", "2-2", "--no-quality"]
    command += ["--costs", str(costs), "-o", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        status = process.wait(kill_after_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(0.2)
        return False
    if status:
        sys.exit(f"the sweep ended with status {status}")
    return True


def said(rows: list[Row]) -> Counter[str]:
    """What rows say that does not hang on time; runs of complete blocks, the last of each."""
    complete = {row.block for row in rows if isinstance(row, BlockRow)}
    runs = {
        (r.block, r.draft, r.setting, r.case): r
        for r in rows
        if isinstance(r, RunRow) and r.block in complete
    }
    others = [row for row in rows if not isinstance(row, RunRow | HeadRow)]
    return Counter(repr(_timeless(row)) for row in [*others, *runs.values()])


def _timeless(row: Row) -> dict[str, object]:
    data = row.model_dump()
    automatic = "setting" in data and Setting.of(data["setting"]).is_auto
    leave = _TIMES | (_COUNTS if automatic else set())
    data = {k: v for k, v in data.items() if k not in leave and not k.endswith(("_s", "_bytes"))}
    if "cases" in data:
        keep = ("case", "tokens") if automatic else ("case", "tokens", "target_calls", "draft_calls")
        data["cases"] = [{key: case[key] for key in keep} for case in data["cases"]]
    return data


if __name__ == "__main__":
    run_program(main)
