"""How many calls and how much time does forcing save, and does the answer stay what it was?

    python benchmarks/structured/live.py --out qwen.jsonl [--model TARGET.gguf] [--draft DRAFT.gguf]
        [--only tool,record] [--modes off,forced,auto,canonical] [--temperatures 0,0.8]

Each case of cases.jsonl is answered in each mode, in `--repetitions` rounds of shuffled order, from a cold
cache: `off` is plain constrained decoding, `forced` drafts what the grammar forces and nothing else, `auto`
has every drafter and decides by itself, `canonical` allows only the usual tokens of forced text. Without
`--model` the embedded default is the target. The costs of both models' calls are measured first.

README.md defines the rows; report.py makes tables of them. Rows that are there are not measured again.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from statistics import median
from typing import get_args

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Row, append, argument_parser, describe, resume, run_program, turn
from outrider import LoadOptions
from outrider.core.params import JsonStyle
from outrider.policy import FixedPolicy
from outrider.session import Pair, Session
from policy.curves import as_row
from policy.live import in_force, measure_costs
from structured.bench import MODES, OFF, Bench, Mode, Plan
from structured.cases import CASES, Case, load_cases

SAME = ("threads", "context", "tokens", "repetitions", "modes", "style", "settings", "models", "cpu")
"""What all rows of a file share."""

Task = tuple[Case, float]
"""a case and a temperature"""


def modes(text: str) -> list[Mode]:
    if unknown := [name for name in text.split(",") if name not in MODES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is no mode: choose from {', '.join(MODES)}")
    return [MODES[name] for name in text.split(",")]


def temperatures(text: str) -> list[float]:
    found = [float(part) for part in text.split(",")]
    if min(found) < 0:
        raise argparse.ArgumentTypeError(f"{min(found)} is negative")
    return found


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__, pair=True, repetitions=3, tokens=256, threads=2, context=2048, seed=0)
    parser.add_argument("--cases", type=Path, default=CASES)
    parser.add_argument("--only", default="", metavar="NAME,…", help="groups, or what ids begin with")
    parser.add_argument("--modes", type=modes, default=list(MODES.values()), metavar="MODE,…")
    parser.add_argument("--temperatures", type=temperatures, default=[0.0, 0.8], metavar="T,…")
    parser.add_argument("--style", choices=get_args(JsonStyle), default="spaced", help="white space of JSON")
    parser.add_argument("--calibration", type=float, default=12.0, metavar="SECONDS", help="for each model")
    parser.add_argument("--lock", type=Path, help="a file to hold (flock) while a case is measured")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    cases = load_cases(arguments.cases, [name for name in arguments.only.split(",") if name])
    tasks = [(case, temperature) for case in cases for temperature in arguments.temperatures]
    random.Random(arguments.seed).shuffle(tasks)  # groups and the machine's moods unrelated
    plan = Plan(arguments.modes, arguments.tokens, arguments.repetitions, arguments.style, arguments.seed)
    pair = Pair.load(arguments.model, arguments.draft, options=LoadOptions(threads=arguments.threads))
    with pair.open(arguments.context, policy=FixedPolicy()) as session:  # the policies come later
        head = describe(*(weights.path for weights in (pair.target, pair.draft) if weights))
        head |= {name: getattr(arguments, name) for name in SAME if hasattr(arguments, name)}
        head |= {"modes": [mode.name for mode in plan.modes], "settings": in_force(session)}
        rows = resume(arguments.out, head, SAME)
        done = {(row["id"], row["temperature"]) for row in rows if row["kind"] == "case"}
        waiting = [(case, t) for case, t in tasks if (case.id, t) not in done]
        check_room(session, waiting, arguments)
        if waiting:
            with turn(arguments.lock):
                costs = measure_costs(session, arguments.calibration)
            append(arguments.out, as_row(costs))
            run(Bench(session, costs, plan), waiting, arguments.out, arguments.lock)


def check_room(session: Session, tasks: list[Task], arguments: argparse.Namespace) -> None:
    """Refuse before anything is measured what would not fit in the end."""
    lengths = [len(session.encode([{"role": "user", "content": case.prompt}])) for case, _ in tasks]
    needed = max(lengths, default=0) + arguments.tokens
    if needed > arguments.context:
        sys.exit(f"the longest prompt and its answer have {needed} tokens: give -c {needed} or more")


def run(bench: Bench, tasks: list[Task], out: Path, lock: Path | None) -> None:
    for number, (case, temperature) in enumerate(tasks, 1):
        with turn(lock):
            row = bench.measure(case, temperature)
        append(out, row)
        print(f"{number}/{len(tasks)} {line(row)}", flush=True)


def line(row: Row) -> str:
    parts = [f"{row['id']} at {row['temperature']:g}:"]
    plain = [run["decode_s"] / run["tokens"] for run in row["runs"].get(OFF.name, []) if run.get("tokens")]
    for name, runs in row["runs"].items():
        good = [run for run in runs if run.get("tokens")]
        calls = median(run["target_calls"] / run["tokens"] for run in good) if good else float("nan")
        part = f"{name} {calls:.2f} calls/token"
        if plain and good and name != OFF.name:
            part += f" {median(plain) / median(run['decode_s'] / run['tokens'] for run in good):.2f}x"
        wrong = [run for run in runs if run.get("complaint") or run.get("error")]
        parts.append(part + (f" INVALID {len(wrong)}" if wrong else ""))
    differ = ", ".join(row["divergence"])
    return " ".join(parts) + (f", texts differ: {differ}" if differ else "")


if __name__ == "__main__":
    run_program(main)
