"""Every library on the same prompts, plainly and with the automatic choice, in turn.

    python benchmarks/backends/live.py PROMPTS.jsonl… --out live.jsonl --model TARGET.gguf \
        [--draft DRAFT.gguf] --library llama.cpp=FILE --library wheel=FILE --library native=FILE

Each prompt is answered greedily and from a cold cache by every library in both ways, in `--repetitions`
rounds of shuffled order. Each library's load options are those that `--backend auto` takes for it, its costs
are measured first, and its policy starts knowing nothing, once for each repetition. Then the hindsight bound
is worked out at what the library's calls took in those minutes. Rows that are there are not measured again.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import (
    Prompt,
    Row,
    append,
    argument_parser,
    describe,
    in_turn,
    load_prompts,
    resume,
    run_program,
    turn,
)
from outrider import LoadOptions
from outrider.policy.fixed import FixedPolicy
from outrider.session import Pair, Session, SessionOptions
from policy.bench import Bench, Plan, Run, middle
from policy.choices import AUTO, PLAIN, Choice
from policy.curves import as_row
from policy.live import in_force, measure_costs
from policy.summary import token_s

SAME = ("tokens", "repetitions", "libraries", "models", "cpu")
"""What all rows of a file share."""


@dataclass(frozen=True, slots=True)
class Way:
    """A library, ready to answer."""

    name: str
    pair: Pair
    session: Session
    bench: Bench
    modes: tuple[Choice, ...]


def parse() -> argparse.Namespace:
    parser = argument_parser(
        __doc__, prompts=True, pair=True, repetitions=3, tokens=128, threads=2, context=2048, seed=0
    )
    parser.add_argument("--library", action="append", required=True, metavar="NAME=FILE", dest="libraries")
    parser.add_argument(
        "--plain", action="append", default=[], metavar="NAME", help="a library to decode plainly only"
    )
    parser.add_argument("--lock", type=Path, help="a file to hold (flock) during each answer")
    parser.add_argument("--calibration", type=float, default=10.0, metavar="SECONDS", help="for each model")
    return parser.parse_args()


def open_way(arguments: argparse.Namespace, name: str, file: str, plan: Plan, out: Path) -> Way:
    options = LoadOptions(threads=arguments.threads, library=file)
    pair = Pair.load(arguments.model, arguments.draft, options=options)
    session = Session.open(pair, SessionOptions(arguments.context, policy=FixedPolicy()))
    costs = measure_costs(session, arguments.calibration)
    append(
        out, as_row(costs) | {"library": name, "settings": in_force(session), "notices": list(pair.notices)}
    )
    modes = (PLAIN,) if name in arguments.plain else (PLAIN, AUTO)
    return Way(
        name,
        pair,
        session,
        Bench(session, None if pair.draft is None else pair.draft.alignment, costs, plan),
        modes,
    )


def measure(ways: list[Way], prompt: Prompt, plan: Plan, rng: random.Random, lock: Path | None) -> Row:
    """One prompt, answered by every library in its ways."""
    tokens = ways[0].session.encode(prompt.messages)
    turns = [(way, mode) for way in ways for mode in way.modes]
    runs: dict[str, dict[str, list[Run]]] = {way.name: {mode.name: [] for mode in way.modes} for way in ways}
    for number, (way, mode) in in_turn(turns, plan.repetitions, rng, lock):
        runs[way.name][mode.name].append(way.bench.answer(tokens, mode, number))
    row: Row = {
        "kind": "prompt",
        "id": prompt.id,
        "category": prompt.category,
        "prompt_tokens": len(tokens),
    }
    with turn(lock):
        row["libraries"] = {way.name: of_library(way, prompt, tokens, runs[way.name]) for way in ways}
    return row


def of_library(way: Way, prompt: Prompt, tokens: tuple[int, ...], runs: dict[str, list[Run]]) -> Row:
    taken: Row = {
        mode: [run.as_json() | {"prefill_s": prefill_s(run)} for run in runs[mode]] for mode in runs
    }
    if AUTO.name not in runs:
        return taken
    plain, chosen = middle(runs[PLAIN.name]), middle(runs[AUTO.name])
    recording = way.bench.record(prompt, tokens, chosen.completion)
    hindsight = way.bench.hindsight(recording, [*runs[PLAIN.name], *runs[AUTO.name]], plain)
    return taken | {
        "equal": len({run.completion.tokens for found in runs.values() for run in found}) == 1,
        "text_tokens": hindsight["text_tokens"],
        "bound_s": hindsight["bound_s"],
        "own_s": hindsight["own_s"],
    }


def prefill_s(run: Run) -> float:
    return sum(r.read_s if r.kind == "decode" else r.total_s for r in run.completion.records)


def line(row: Row) -> str:
    base = None
    parts = []
    for name, found in row["libraries"].items():
        plain_s = median(map(token_s, found["plain"]))
        base = base or plain_s
        if "auto" not in found:
            parts.append(f"{name} {base / plain_s:.2f}x plain")
            continue
        auto_s = median(map(token_s, found["auto"]))
        share = found["bound_s"] / found["text_tokens"] / auto_s
        parts.append(f"{name} {base / plain_s:.2f}x plain, {base / auto_s:.2f}x auto ({share:.0%} of bound)")
    return f"{row['id']} {row['category']}: " + "; ".join(parts)


def main() -> None:
    arguments = parse()
    prompts = load_prompts(arguments.prompts)
    rng = random.Random(arguments.seed)
    rng.shuffle(prompts)
    plan = Plan(arguments.tokens, arguments.repetitions, (), arguments.seed)
    files = dict(given.split("=", 1) for given in arguments.libraries)
    head = describe(arguments.model, arguments.draft)
    head |= {"tokens": arguments.tokens, "repetitions": arguments.repetitions, "libraries": list(files)}
    head |= {"threads": arguments.threads, "context": arguments.context}
    done = {row["id"] for row in resume(arguments.out, head, SAME) if row["kind"] == "prompt"}
    with turn(arguments.lock):
        ways = [open_way(arguments, name, file, plan, arguments.out) for name, file in files.items()]
    for prompt in (prompt for prompt in prompts if prompt.id not in done):
        row = measure(ways, prompt, plan, rng, arguments.lock)
        append(arguments.out, row)
        print(line(row), flush=True)


if __name__ == "__main__":
    run_program(main)
