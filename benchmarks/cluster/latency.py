"""What speculation would gain on a target that is split over hosts: stored recordings, replayed with a
fixed time added to every call of the target. The draft model and lookup stay with the driver.

    python benchmarks/cluster/latency.py --out benchmarks/cluster/latency.jsonl
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import append, argument_parser, describe, geometric_mean
from outrider.costs import CallCosts
from outrider.lab.recording import read_recordings
from policy.choices import AUTO, fixed
from policy.curves import read_costs
from policy.replay import DRAFT, Scene

LATENCIES_MS = (0, 1, 5, 20)
POLICY = Path(__file__).parents[1] / "policy"
PAIRS = {
    "1.5B, Q4_K_M": ("heldout_q4.recordings.jsonl", "epyc_q4.json"),
    "1.5B, F16": ("heldout_f16.recordings.jsonl", "epyc_f16.json"),
}


def later(costs: CallCosts, latency_s: float) -> CallCosts:
    """Every call takes so much longer, however many tokens it has."""
    points = [replace(point, seconds=point.seconds + latency_s) for point in costs.points]
    return CallCosts(points, prefill_token_s=costs.prefill_token_s, window=costs.window)


def rows() -> Iterator[dict[str, Any]]:
    for name, (recorded, costs) in PAIRS.items():
        recordings = [r for r in read_recordings(POLICY / recorded) if r.tokens]
        pair = read_costs(POLICY / "curves" / costs)
        for latency in LATENCIES_MS:
            target = later(pair.target, latency / 1000)
            scene = Scene(recordings, target, {DRAFT: pair.draft} if pair.draft else {})
            found, _ = scene.run(AUTO)
            tokens, calls = sum(len(r.tokens) for r in recordings), sum(len(f.records) for f in found)
            lookup = [replayed.speedup for replayed in scene.run(fixed(4, 0, model=False))[0]]
            yield {
                "pair": name, "recordings": len(recordings), "latency_ms": latency,
                "plain_call_ms": round(1000 * target.call_s(1, context=0), 2),
                "auto": round(geometric_mean(f.speedup for f in found), 3),
                "auto_lowest": round(min(f.speedup for f in found), 3),
                "tokens_per_call": round(tokens / calls, 3),
                "lookup_4": round(geometric_mean(lookup), 3),
            }  # fmt: skip


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    append(arguments.out, describe())
    for row in rows():
        print(json.dumps(row), flush=True)
        append(arguments.out, row)


if __name__ == "__main__":
    main()
