"""How well real calls correct a cost curve: errors of what is expected of the next call, in made traces.

    PYTHONPATH=src python benchmarks/policy/correction.py NAME >> benchmarks/policy/correction.jsonl

It tries the `CallCosts` that it imports: for another commit's, put a checkout of it into PYTHONPATH.
A trace has 4 texts of 100 calls each, and is made 5 times for each curve. `never` learns nothing.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean

from outrider.costs import CallCosts
from outrider.costs.store import import_costs

CURVES = ("xeon_ik_wheel", "epyc_ik_native", "epyc_f16", "xeon_q4")
SEEDS = range(5)
SPREAD = 0.03

Disturbance = Callable[[int, int, random.Random], float]
"""The factor of a call: its place in the trace, its tokens, a source of chance."""

TRACES: dict[str, Disturbance] = {
    "as measured": lambda _i, _n, _rng: 1.0,
    "a slow moment": lambda i, _n, _rng: 1.6 if 150 <= i < 170 else 1.0,
    "load that comes and goes": lambda i, _n, rng: (1.4 if i // 40 % 2 else 1.0) * rng.uniform(1, 1.1),
    "throttled": lambda i, _n, _rng: 1 + 0.4 * min(max(i - 100, 0) / 50, 1),
    "warming up": lambda i, _n, _rng: 1 + 0.3 * math.exp(-i / 10),
    "twice as slow": lambda _i, _n, _rng: 2.0,
    "long calls 2x": lambda _i, n, _rng: 2.0 if n > 1 else 1.0,
    "long calls 0.5x": lambda _i, n, _rng: 0.5 if n > 1 else 1.0,
    "first call 5x": lambda i, _n, _rng: 5.0 if i == 0 else 1.0,
    "one call in twenty 3x": lambda _i, _n, rng: 3.0 if rng.random() < 0.05 else 1.0,
}
UNMEASURED = "unmeasured"
LONGER_CONTEXT = "stored tokens 4x"
ATTENTION = "long contexts"
"""of up to 30,000 tokens, where each token of a call attends to 16,000 others in the time of a single one"""


def errors(measured: CallCosts, trace: str, seed: int) -> tuple[float, float]:
    """Mean absolute logarithm of the next call's time over what was expected of it: learning, and never."""
    rng = random.Random(seed)
    learning = CallCosts() if trace == UNMEASURED else CallCosts.from_json(measured.as_json())
    never = CallCosts() if trace == UNMEASURED else measured
    found = []
    for i in range(400):
        n = 1 if rng.random() < 0.5 else min(2 + int(rng.expovariate(1 / 3)), 16)
        context = 200 + 900 * (i // 100 % 3) + i % 100
        if trace == ATTENTION:
            context = (1_000, 8_000, 30_000)[i // 100 % 3] + i % 100
        factor = TRACES.get(trace, TRACES["as measured"])(i, n, rng) * rng.lognormvariate(0, SPREAD)
        stored = 4 * context if trace == LONGER_CONTEXT else context
        seconds = measured.call_s(n, context=stored)
        if trace == ATTENTION:
            single_s = measured.call_s(1, context=0)
            seconds = measured.call_s(n, context=0) + n * single_s * context / 16_000
        seconds *= factor
        found.append(
            [abs(math.log(seconds / costs.call_s(n, context=context))) for costs in (learning, never)]
        )
        learning.observe(n, seconds, context=context)
    return mean(pair[0] for pair in found), mean(pair[1] for pair in found)


def main() -> None:
    for trace in (*TRACES, LONGER_CONTEXT, ATTENTION, UNMEASURED):
        pairs = []
        for name in CURVES:
            measured = import_costs(Path(__file__).parent / f"curves/{name}.json").target
            pairs += [errors(measured, trace, seed) for seed in SEEDS]
        learned, never = (round(mean(values), 4) for values in zip(*pairs, strict=True))
        print(json.dumps({"trace": trace, sys.argv[1]: learned, "never": never}))


if __name__ == "__main__":
    main()
