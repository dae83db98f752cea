"""What calls of a model take on this device, and plain decoding against a bare loop of `llama_decode`.

    python benchmarks/gpu/calls.py FILE.gguf… --out rows.jsonl [--seconds 8] [--card h100]

For each file a row `calls`: calls over 1 to 64 tokens as `outrider costs` measures them on a GPU, single
tokens in runs of equal calls and the others right after these. A row `orders`: what each call takes in calls
of several sizes after each other. Then a row `plain`: seconds a token of the same greedy text by the engine
and by a loop of nothing but `llama_decode` and argmax, in turns.
"""

from __future__ import annotations

import ctypes
import random
import sys
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Row, Spread, append, argument_parser, describe, in_turn, resume, run_program
from outrider import Engine, Request, SamplingParams
from outrider.backends.gguf.context import LlamaBatch
from outrider.backends.gguf.libraries import device_names
from outrider.backends.gguf.model import GgufModel, Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.core.data import Span
from outrider.costs.calibrate import CallTimer, calibrate, ordinary_tokens
from outrider.lab.plan.catalogue import catalogue
from outrider.lab.plan.shapes import find_shape

GREEDY = SamplingParams(temperature=0)


def bare_s(model: GgufModel, prompt: tuple[int, ...], num_tokens: int) -> float:
    library, context = model.weights.library, model.native_context
    native, batch = library.functions, LlamaBatch(library.Batch, len(prompt))
    spans, started = [Span(0, prompt, 0, 1)], 0.0
    for position in range(len(prompt), len(prompt) + num_tokens + 1):
        native.llama_decode(context, batch.fill(spans))
        logits = (ctypes.c_float * model.vocabulary.size).from_address(native.llama_get_logits(context))
        spans = [Span(0, (int(np.ctypeslib.as_array(logits).argmax()),), position, 1)]
        started = started or perf_counter()
    seconds = (perf_counter() - started) / num_tokens
    native.llama_memory_seq_rm(library.memory(context), 0, -1, -1)
    return seconds


def engine_s(model: GgufModel, prompt: tuple[int, ...], num_tokens: int) -> float:
    engine, started = Engine(model), 0.0
    engine.submit(Request(prompt, GREEDY, num_tokens + 1, ignore_end=True, cache_prompt=False))
    while engine.step():
        started = started or perf_counter()
    seconds = (perf_counter() - started) / num_tokens
    model.truncate(0, 0)
    return seconds


ORDERS = (1, 1, 1, 4, 1, 1, 1), (4, 4, 4, 4), (4, 6, 4, 6), (8, 8, 8), (1, 1, 1, 6, 6, 1, 1)


def orders(model: GgufModel, rounds: int) -> Row:
    """Median seconds of each call, by their sizes."""
    found: Row = {}
    with CallTimer(model, "all", perf_counter, random.Random(0)) as timer:
        for sizes in ORDERS:
            times = [[timer.call_s(size) for size in sizes] for _ in range(rounds)]
            found[" ".join(map(str, sizes))] = [median(each) for each in zip(*times, strict=True)]
    return found


def measured(path: Path, library: str, seconds: float, num_tokens: int, rounds: int) -> list[Row]:
    times = dict[str, list[float]]()
    with closing(Weights(path, LoadOptions(library=library))) as weights:
        with closing(weights.open(2048)) as model:
            ways = {"bare": partial(bare_s, model), "engine": partial(engine_s, model)}
            in_order = orders(model, 3 * rounds)
            costs = calibrate(model, seconds=seconds, on_gpu=True)
            prompt = tuple(ordinary_tokens(model.vocabulary, random.Random(2))[:64])
            for _, way in in_turn(ways, rounds, random.Random(3)):
                times.setdefault(way, []).append(ways[way](prompt, num_tokens))
        about = {"model": path.stem, "library": weights.library_line, "devices": list(device_names())}
    calls = {"shape": asdict(find_shape(str(path), catalogue())), "costs": costs.as_json()}
    plain = {way: Spread.of(values)._asdict() for way, values in times.items()}
    kinds = {"calls": calls, "orders": in_order, "plain": plain}
    return [{"kind": kind, **about, **row} for kind, row in kinds.items()]


def main() -> None:
    parser = argument_parser(__doc__, tokens=96, rounds=5)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--seconds", type=float, default=8.0, help="of measuring calls, for each file (8)")
    parser.add_argument("--llama-library", default="", help="the library to use")
    parser.add_argument("--card", default="", help="the card's name in `outrider plan --on`")
    given = parser.parse_args()
    rows = resume(given.out, describe() | {"card": given.card}, ["card"])
    done = {row["model"] for row in rows if row["kind"] == "plain"}
    for path in (path for path in given.files if path.stem not in done):
        append(given.out, *measured(path, given.llama_library, given.seconds, given.tokens, given.rounds))


if __name__ == "__main__":
    run_program(main)
