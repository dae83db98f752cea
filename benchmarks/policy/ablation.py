"""What each mechanism of the automatic choice brings: replays with each taken out in turn, at eight curves.

    python benchmarks/policy/ablation.py [--every 2] [--warm] [--wrong] [--fixed] [--limit] \
        [--out ablation.jsonl] [CURVE.json…]
    python benchmarks/policy/ablation.py --print [--out ablation.jsonl]

No clock: recorded answers (`qwen_q4` and `heldout_q4`, every second one of each) at the costs of `curves/`,
of which those named `assumed_` are what their notes say. Each recording starts as a process does, with a
policy that knows the costs and nothing of the pair; with `--warm` the policy goes on from one to the next.
`--wrong`: the draft model is sure of itself and always wrong. `--fixed`: also every fixed setting, of which
the best is chosen afterwards. `--limit`: also the informed decoder (limit.py). A run that was stopped goes
on where it was.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import (
    Row,
    append,
    argument_parser,
    describe,
    geometric_mean,
    read_rows,
    resume,
    run_program,
    table,
)
from outrider.lab.replay import Replayed
from outrider.policy import auto, objective, state
from outrider.policy.auto import AutoPolicy
from outrider.policy.objective import StepCosts
from policy.choices import AUTO, settings
from policy.curves import read_costs
from policy.limit import informed_limit
from policy.recorded import read_recordings
from policy.replay import DRAFT, Scene, with_draft

HERE = Path(__file__).parent
CURVES = (
    "xeon_ik_wheel",
    "epyc_ik_native",
    "xeon_q4_small_draft",
    "xeon_ik_wheel_cheap_draft",
    "assumed_datacentre",
    "assumed_consumer",
    "assumed_consumer_head",
    "assumed_consumer_steep_head",
)
RECORDINGS = ("qwen_q4", "heldout_q4")
FIXED = {setting.name: setting for setting in settings(has_draft=True)}
SLOW = 0.95
KEY = ("curve", "warm", "wrong", "every", "without")
"""the fields by which rows differ"""
WHOLE, INFORMED = "nothing", "informed"


def best_of_one_step(acceptance: Sequence[float], costs: StepCosts, min_length: int = 0) -> tuple[int, float]:
    """`objective.best_length` without the steps to come."""
    rewards = objective.expected_rewards(acceptance[: costs.max_length], costs)
    values = [reward - cost for reward, cost in zip(rewards, costs.calls_s.tolist(), strict=False)]
    length = max(range(min_length, len(values)), key=values.__getitem__)
    return length, values[length]


def reward_of_lookups(spent_s: float, emitted: float, plain_s: float, num_sequences: int, _: float) -> float:
    """`objective.reward_per_token` without what the draft model's costs say."""
    return objective.reward_per_token(spent_s, emitted, plain_s, num_sequences)


MECHANISMS: Mapping[str, tuple[Any, str, Any]] = {
    "guesses of lookups that the draft model checks": (auto, "MAX_GUESS", 0),
    "look-ahead in the cut": (objective, "best_length", best_of_one_step),
    "a first λ by the costs": (state, "reward_per_token", reward_of_lookups),
    "amortised reading of the prompt": (auto, "repays", lambda *_: True),
    "exploration": (auto, "EXPLORATION_SHARE", -math.inf),
    "the limit of loss": (auto, "MAX_LOSS", math.inf),
    "the request's bias": (state, "_BIAS_RATE", 0.0),
    "learning of weights": (state, "_RATE", 0.0),
}
"""Where each is, by name, and what stands there without it."""


@contextmanager
def without(mechanism: str) -> Iterator[None]:
    """The policy with a mechanism taken out."""
    with ExitStack() as stack:
        if mechanism != WHOLE:
            stack.enter_context(patch.object(*MECHANISMS[mechanism]))
        yield


def main() -> None:
    parser = argument_parser(__doc__, out=False, every=2)
    parser.add_argument("curves", nargs="*", type=Path, default=[HERE / f"curves/{n}.json" for n in CURVES])
    parser.add_argument("--out", type=Path, default=HERE / "ablation.jsonl")
    parser.add_argument("--warm", action="store_true", help="learn from one recording to the next")
    parser.add_argument("--wrong", action="store_true", help="a draft model that is always wrong")
    parser.add_argument("--fixed", action="store_true", help="also every fixed setting")
    parser.add_argument("--limit", action="store_true", help="also the informed decoder")
    parser.add_argument("--print", action="store_true", help="only print what --out holds")
    arguments = parser.parse_args()
    if not arguments.print:
        measure(arguments)
    for line in report(read_rows(arguments.out)[1:]):
        print(line)


def measure(arguments: Any) -> None:
    """Append a row for every curve and mechanism that has none yet."""
    found = [read_recordings(HERE / f"{name}.recordings.jsonl")[:: arguments.every] for name in RECORDINGS]
    recordings = [r for some in found for r in some if r.tokens]
    if arguments.wrong:
        recordings = [with_draft(recording, wrong=True) for recording in recordings]
    rows = resume(arguments.out, describe(), ())
    done = {tuple(row[name] for name in KEY) for row in rows}
    fixed: dict[str, list[Replayed]] = {}
    for path in arguments.curves:
        scene = Scene.of(recordings, read_costs(path), warm=arguments.warm)
        key = (path.stem, arguments.warm, arguments.wrong, arguments.every)
        bounds = scene.bounds()
        names = [WHOLE, *MECHANISMS]
        names += [INFORMED] * arguments.limit
        names += list(FIXED) * arguments.fixed
        for name in names:
            if (*key, name) in done:
                continue
            if name in FIXED and name not in fixed:
                fixed[name] = scene.run(FIXED[name])[0]
            times = times_at(scene, fixed[name]) if name in FIXED else run(scene, name)
            row = dict(zip(KEY, (*key, name), strict=True))
            row |= figures(*times, bounds)
            append(arguments.out, row)
            way = f"without {name}" if name in (WHOLE, *MECHANISMS) else name
            print(
                f"{path.stem}, {way}: {row['speedup']:.3f}x, "
                f"{row['of_bound']:.1%} of the bound, {slowest(row)} below {SLOW}x",
                flush=True,
            )


def run(scene: Scene, name: str) -> tuple[list[float], list[float]]:
    """Seconds of each recording and of decoding it plainly: without a mechanism, or by the informed
    decoder."""
    if name == INFORMED:
        learned, policy = replace(scene, warm=True).run(AUTO)
        assert isinstance(policy, AutoPolicy)
        draft = (DRAFT, scene.drafts[DRAFT])
        limits = [informed_limit(r, policy.state, scene.costs, draft)[1] for r in scene.recordings]
        return limits, [one.plain_s for one in learned]
    with without(name):
        replayed, _ = scene.run(AUTO)
    return [one.seconds for one in replayed], [one.plain_s for one in replayed]


def times_at(scene: Scene, replayed: Sequence[Replayed]) -> tuple[list[float], list[float]]:
    """The same of steps that were replayed at other costs: a fixed setting takes the same steps at any."""
    target, draft = scene.costs, scene.drafts[DRAFT]
    seconds, plain_s = [], []
    for recording, one in zip(scene.recordings, replayed, strict=True):
        reads = any(record.work.prefill_calls for record in one.records)
        spent_s = draft.prefill_s(len(recording.prompt)) if reads else 0.0
        for record in one.records:
            spent_s += target.call_s(record.num_evaluated, context=record.position)
            spent_s += sum(draft.call_s(n, context=record.position) for n in record.work.call_tokens)
        seconds.append(spent_s)
        first = len(recording.prompt)
        plain_s.append(sum(target.call_s(1, context=first + i) for i in range(len(recording.tokens))))
    return seconds, plain_s


def figures(seconds: Sequence[float], plain_s: Sequence[float], bounds: Sequence[float]) -> Row:
    """What a row says of some replays."""
    speedups = [plain / ours for plain, ours in zip(plain_s, seconds, strict=True)]
    return {
        "recordings": len(speedups),
        "speedup": geometric_mean(speedups),
        "of_bound": geometric_mean(bound / ours for bound, ours in zip(bounds, seconds, strict=True)),
        "lowest": min(speedups),
        "slow": sum(speedup < SLOW for speedup in speedups),
    }


def report(rows: Sequence[Row]) -> Iterator[str]:
    """A table for each way of starting, a column for each curve."""
    for way in sorted({tuple(row[name] for name in KEY[1:4]) for row in rows}):
        mine = [row for row in rows if tuple(row[name] for name in KEY[1:4]) == way]
        warm, wrong, _ = way
        by_curve: dict[str, dict[str, Row]] = {}
        for row in mine:
            by_curve.setdefault(row["curve"], {})[row["without"]] = row
        columns = [column(by_curve[curve]) for curve in CURVES if curve in by_curve]
        names = list(dict.fromkeys(name for cells in columns for name in cells))
        start, draft = "warm" if warm else "cold", ", draft always wrong" if wrong else ""
        yield f"{mine[0]['recordings']} recordings, {start}{draft}\n"
        lines = [[name, *(cells.get(name, "") for cells in columns)] for name in names]
        yield from table(["", *(curve.replace("_", " ") for curve in CURVES if curve in by_curve)], lines)


def column(rows: Mapping[str, Row]) -> dict[str, str]:
    """What a table says of one curve, by the name of the line: the whole policy, others beside it, and what
    taking a mechanism out changes."""
    whole = rows[WHOLE]
    found = {
        "speed-up": f"{whole['speedup']:.3f}x",
        "share of the bound": f"{whole['of_bound']:.1%}",
        f"lowest text, texts below {SLOW}x": slowest(whole),
    }
    if INFORMED in rows:
        found["informed decoder, share of the bound"] = f"{rows[INFORMED]['of_bound']:.1%}"
    if fixed := {name: row for name, row in rows.items() if name in FIXED}:
        best = max(fixed.values(), key=lambda row: float(row["speedup"]))
        found["best fixed setting, found afterwards"] = f"{best['without']}: {best['speedup']:.3f}x"
    for name in MECHANISMS:
        if name in rows:
            change = rows[name]["speedup"] / whole["speedup"] - 1
            found[f"without {name}"] = f"{change:+.1%}, {slowest(rows[name])}"
    return found


def slowest(row: Row) -> str:
    return f"{row['lowest']:.2f}x, {row['slow']}"


if __name__ == "__main__":
    run_program(main)
