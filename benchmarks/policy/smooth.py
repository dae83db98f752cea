"""How evenly does the text come? Gaps between characters: plain, as speculated, and paced.

    python benchmarks/policy/smooth.py PROMPTS.jsonl… --out smooth.jsonl [--model TARGET.gguf] [--draft …]

Each prompt is answered plainly, with speculation, and with speculation under the pacing of `--smooth`,
in turn and in changing order, greedily and from a cold cache. Paced text goes through the thread that
the command line uses, to a null device, so `tokens_per_s` also tells what pacing costs the engine.
A row holds p50, p95 and max of the gaps between characters in seconds, defined in `outrider.session.readout`;
`late_s` is the longest that a character waited, `step_s` the longest step.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Prompt, argument_parser, describe, load_prompts, run_program
from outrider import LoadOptions, Request, SamplingParams
from outrider.cli.stream import PacedPrinter
from outrider.core.data import Piece
from outrider.session import Pair, Session, SessionOptions
from outrider.session.generation import Generation
from outrider.session.pacing import Pacer
from outrider.session.readout import Emission, character_gaps, read_out

KINDS = ("plain", "unpaced", "paced")
Row = dict[str, Any]


def main() -> None:
    arguments = parse()
    prompts = load_prompts(arguments.prompts)
    pair = Pair.load(arguments.model, arguments.draft, options=LoadOptions(threads=arguments.threads))
    rows = []
    with (
        arguments.out.open("w", encoding="utf-8") as file,
        Session.open(pair, SessionOptions(arguments.context)) as session,
        open(os.devnull, "wb", buffering=0) as null,
    ):
        models = [weights.path for weights in pair.models]
        head = describe(*models) | {"threads": arguments.threads, "tokens": arguments.tokens}
        file.write(
            json.dumps(head | {"drafters": [drafter.name for drafter in session.engine.drafters]}) + "\n"
        )
        pacer = Pacer()  # knows the machine after the first answer, as in a conversation
        for number in range(arguments.rounds):
            for index, prompt in enumerate(prompts):
                turn = (number + index) % len(KINDS)
                for kind in KINDS[turn:] + KINDS[:turn]:
                    row = answer(session, prompt, kind, arguments.tokens, pacer, null.fileno())
                    rows.append(row | {"round": number})
                    file.write(json.dumps(rows[-1]) + "\n")
                    file.flush()
                    print(line(row), flush=True)
    summarise(rows)


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__, prompts=True, pair=True, threads=2, context=4096, tokens=128, rounds=1)
    return parser.parse_args()


def answer(
    session: Session, prompt: Prompt, kind: str, num_tokens: int, pacer: Pacer, descriptor: int
) -> Row:
    """Answer a prompt once; the gaps between the characters as they would be seen."""
    session.engine.reset()
    tokens = session.encode(prompt.messages)
    request = Request(tokens, SamplingParams(temperature=0), max_tokens=num_tokens, speculate=kind != "plain")
    generation = Generation(session.engine, request)
    emitted: list[Emission] = []
    arrived: list[Emission] = []
    if kind == "paced":
        with PacedPrinter(lambda pieces: write(descriptor, pieces), pacer) as printer:
            for update in generation:
                arrived.append(Emission(perf_counter(), len(update.text)))
                printer.print(update.pieces)
        emitted = printer.emitted
    else:
        for update in generation:
            arrived.append(Emission(perf_counter(), len(update.text)))
            write(descriptor, update.pieces)
        emitted = arrived
    gaps, readout = character_gaps(emitted), read_out(generation.completion)
    return {
        "kind": "answer",
        "id": prompt.id,
        "category": prompt.category,
        "how": kind,
        "characters": sum(emission.num_characters for emission in emitted),
        "p50_s": gaps.p50 if gaps else None,
        "p95_s": gaps.p95 if gaps else None,
        "max_s": gaps.max if gaps else None,
        "late_s": max(waits(arrived, emitted)),
        "step_s": max((after.at_s - before.at_s for before, after in pairwise(arrived)), default=0.0),
        "tokens_per_s": readout.tokens_per_s,
        "tokens_per_target_call": readout.tokens_per_target_call,
    }


def write(descriptor: int, pieces: tuple[Piece, ...]) -> None:
    os.write(descriptor, "".join(piece.text for piece in pieces).encode())


def waits(arrived: list[Emission], emitted: list[Emission]) -> list[float]:
    """How long each character waited for its turn, in seconds."""
    ready = [emission.at_s for emission in arrived for _ in range(emission.num_characters)]
    shown = [emission.at_s for emission in emitted for _ in range(emission.num_characters)]
    return [later - earlier for earlier, later in zip(ready, shown, strict=True)] or [0.0]


def line(row: Row) -> str:
    gaps = ", ".join(
        f"{name} {1000 * row[f'{name}_s']:.1f} ms"
        for name in ("p50", "p95", "max", "late")
        if row["p95_s"] is not None
    )
    return f"{row['id']} {row['category']} {row['how']}: {gaps}; {row['tokens_per_s']:.1f} tokens/s"


def summarise(rows: list[Row]) -> None:
    """Medians over the prompts, and for how many of them pacing stays below plain decoding."""
    by_how: dict[str, dict[tuple[int, int], Row]] = {kind: {} for kind in KINDS}
    for row in rows:
        if row["p95_s"] is not None:
            by_how[row["how"]][row["id"], row["round"]] = row
    for kind, found in by_how.items():
        p95 = median(row["p95_s"] for row in found.values())
        speed = median(row["tokens_per_s"] for row in found.values())
        print(f"{kind:<8} median p95 {1000 * p95:6.1f} ms, {speed:.1f} tokens/s")
    both = by_how["plain"].keys() & by_how["paced"].keys()
    below = sum(by_how["paced"][key]["p95_s"] < by_how["plain"][key]["p95_s"] for key in both)
    print(f"paced p95 below plain decoding's in {below} of {len(both)} answers")


if __name__ == "__main__":
    run_program(main)
