"""What KV that is kept of other requests costs the calls of one, and what copying it out costs instead.

    python benchmarks/serve/kept.py MODEL.gguf --out kept.jsonl

Sequences of a context for 16 are filled until so many tokens are kept; then another one reads 400 tokens and
decodes 6, several times. "save" and "restore" copy these 400 out of the context and back. Medians in seconds,
on ik_llama.cpp and on llama.cpp, one after the other: nothing else may run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Row, append, argument_parser, describe, resume, run_program
from outrider.backends.gguf import LoadOptions, Weights
from outrider.backends.gguf.model import GgufModel
from outrider.core.data import Span

KEPT = (0, 1024, 2048, 4096)
READ, CHUNK, TIMES = 400, 256, 5


def main() -> None:
    parser = argument_parser(__doc__, threads=2, seed=0)
    parser.add_argument("model", type=Path)
    arguments = parser.parse_args()
    resume(arguments.out, describe(arguments.model) | {"threads": arguments.threads}, ["models", "threads"])
    for backend in ("ik", "llama.cpp"):
        options = LoadOptions(threads=arguments.threads, threads_batch=arguments.threads, backend=backend)
        weights = Weights(arguments.model, options)
        rng = np.random.default_rng(arguments.seed)
        tokens = rng.integers(1000, min(weights.vocabulary.size, 100_000), 1024).tolist()
        model = weights.open(4096, max_sequences=16, capacity_tokens=32768)
        for number, kept in enumerate(KEPT):
            fill(model, tokens, number + 1, kept - (KEPT[number - 1] if number else 0))
            row = {"kind": "kept", "backend": backend, "flash_attention": model.flash_attention, "kept": kept}
            append(arguments.out, row | measure(model, tokens[:READ]))
        weights.close()


def fill(model: GgufModel, tokens: list[int], sequence: int, count: int) -> None:
    """Let sequences from this one on store so many tokens."""
    for first in range(0, count, len(tokens)):
        read(model, sequence * 2 + first // len(tokens), tokens[: count - first])


def read(model: GgufModel, sequence: int, tokens: list[int]) -> None:
    model.truncate(sequence, 0)
    for start in range(0, len(tokens), CHUNK):
        model.decode([Span(sequence, tuple(tokens[start : start + CHUNK]), start, 1)])


def measure(model: GgufModel, tokens: list[int]) -> Row:
    """Medians of what a sequence takes beside those that are kept."""
    times: dict[str, list[float]] = {}

    def timed(what: str, do: Callable[..., object], *given: object) -> None:
        before = perf_counter()
        do(*given)
        times.setdefault(what, []).append(perf_counter() - before)

    for _ in range(TIMES):
        timed("read", read, model, 0, tokens)
        for i in range(6):
            timed("token", model.decode, [Span(0, (5,), len(tokens) + i, 1)])
        model.truncate(0, len(tokens))
        timed("save", model.save, 0)
        saved = model.save(0)
        model.truncate(0, 0)
        timed("restore", model.restore, 0, saved)
    return {f"{what}_s": median(found) for what, found in times.items()}


if __name__ == "__main__":
    run_program(main)
