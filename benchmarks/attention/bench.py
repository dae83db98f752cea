"""What calls cost with flash attention and without it, by context.

    python benchmarks/attention/bench.py MODEL.gguf… --out results.jsonl [--contexts 8,200,600]

A row for each model and context: medians in ms of calls over 1, 2, 4 and 8 tokens, in turn with and without,
and of reading the context. Rows that are there are not measured again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Row, append, argument_parser, describe, resume, run_program
from outrider.backends.gguf import GgufModel, LoadOptions, Weights
from outrider.core.data import Span

SIZES = (1, 2, 4, 8)
WAYS = ("on", "off")


def main() -> None:
    parser = argument_parser(__doc__, rounds=12, threads=2)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--contexts", default="8,200,600", help="tokens, separated by commas")
    arguments = parser.parse_args()
    contexts = [int(part) for part in arguments.contexts.split(",")]
    head = describe(*arguments.models) | {"threads": arguments.threads}
    rows = resume(arguments.out, head, ("threads", "cpu"))
    done = {(row["model"], row["context"]) for row in rows}
    for path in arguments.models:
        missing = [context for context in contexts if (path.stem, context) not in done]
        if missing:
            measure(path, missing, arguments)


def measure(path: Path, contexts: list[int], arguments: argparse.Namespace) -> None:
    weights = Weights(path, LoadOptions(threads=arguments.threads))
    models = {
        way: weights.open(
            max(contexts) + 64, options=LoadOptions(threads=arguments.threads, flash_attention=way)
        )
        for way in WAYS
    }
    for context in contexts:
        append(
            arguments.out, {"kind": "context", "model": path.stem} | row_of(models, context, arguments.rounds)
        )
    weights.close()


def row_of(models: dict[str, GgufModel], context: int, rounds: int) -> Row:
    read, times = {}, {way: {size: list[float]() for size in SIZES} for way in models}
    for way, model in models.items():
        model.truncate(0, 0)
        read[way] = decode(model, context, 1)
    for _ in range(rounds):
        for way, model in models.items():
            for size in SIZES:
                times[way][size].append(decode(model, size, size))
                model.truncate(0, context)
    calls = {way: {size: median(found) for size, found in sizes.items()} for way, sizes in times.items()}
    return {"context": context, "rounds": rounds, "read_ms": read, "call_ms": calls}


def decode(model: GgufModel, num_tokens: int, rows: int) -> float:
    """Milliseconds of a call after what the model holds."""
    start = model.length(0)
    tokens = tuple(1000 + (7 * (start + i)) % 3000 for i in range(num_tokens))
    before = perf_counter()
    model.decode([Span(0, tokens, start, rows)])
    return (perf_counter() - before) * 1e3


if __name__ == "__main__":
    run_program(main)
