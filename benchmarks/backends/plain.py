"""Plain decoding against a bare loop over the same library, weights and context, in turn.

    python benchmarks/backends/plain.py MODEL.gguf --out plain.jsonl [--library NAME=FILE]…

The bare loop does what any program must: it puts the token into a llama_batch that exists already, calls
`llama_decode`, and takes the greatest of the logits. Both read the same prompt first, which is not counted,
and go on for as many tokens. `own_s` is what Outrider does outside of model calls: sampling, text, records.
With `--bitwise` it decodes in calls of equal sizes; the bare loop does not.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Row, Spread, append, argument_parser, describe, in_turn, run_program
from outrider import LoadOptions, Request, SamplingParams, Session, Span, read_out
from outrider.backends.bitwise import BitwiseModel
from outrider.backends.gguf.model import GgufModel

PROMPT = (
    "Write a Python module that reads a CSV file of measurements, groups the rows by sensor, and prints "
    "mean, median and standard deviation for each. Explain each function in its docstring.\n"
)


class Pair:
    """A library's two ways of decoding, on contexts of their own over the same weights."""

    def __init__(self, arguments: argparse.Namespace, library: str | None) -> None:
        options = LoadOptions(threads=arguments.threads, library=library or "")
        self.session = Session.load(
            arguments.model, "none", context_length=1024, options=options, bitwise=arguments.bitwise
        )
        self.prompt = self.session.encode(PROMPT)
        target = self.session.target
        if isinstance(target, BitwiseModel):
            target = target.inner
        assert isinstance(target, GgufModel)
        self.model = target
        self.title = self.model.weights.library.title

    def outrider(self, num_tokens: int) -> Row:
        """Seconds a token, and what of it is neither a model call nor sampling."""
        self.session.engine.reset()
        sampling = SamplingParams(temperature=0)
        request = Request(self.prompt, sampling, max_tokens=num_tokens, ignore_end=True, speculate=False)
        completion = self.session.engine.generate(request)
        steps = [record for record in completion.records if record.kind == "decode"]
        own_s = sum(record.total_s - record.read_s - record.verify_s for record in steps)
        readout = read_out(completion)
        return {"token_s": readout.decode_s / num_tokens, "own_s": own_s / num_tokens}

    def bare(self, num_tokens: int) -> Row:
        model, functions = self.model, self.model._library.functions
        self.session.engine.reset()
        model.truncate(0, 0)
        model.decode([Span(0, self.prompt[:-1], 0, 0)])
        context, token, start = model._native.pointer, self.prompt[-1], len(self.prompt) - 1
        batch: Any = model._batch.fill([Span(0, (token,), start, 1)])
        before = time.perf_counter()
        for position in range(start, start + num_tokens):
            batch.token[0], batch.pos[0] = token, position
            if functions.llama_decode(context, batch):
                raise SystemExit("the bare loop failed")
            logits = functions.llama_get_logits(context)
            values = (ctypes.c_float * model.vocabulary.size).from_address(logits)
            token = int(np.ctypeslib.as_array(values).argmax())
        seconds = time.perf_counter() - before
        model._lengths[0] = start + num_tokens
        model.truncate(0, 0)
        return {"token_s": seconds / num_tokens}


def main() -> None:
    parser = argument_parser(__doc__, threads=2, tokens=64, rounds=9)
    parser.add_argument("model", type=Path)
    parser.add_argument("--library", action="append", metavar="NAME=FILE", dest="libraries")
    parser.add_argument("--bitwise", action=argparse.BooleanOptionalAction, default=False)
    arguments = parser.parse_args()
    files = dict(given.split("=", 1) for given in arguments.libraries or ())
    pairs = {name: Pair(arguments, file) for name, file in (files or {"auto": None}).items()}
    append(arguments.out, describe(arguments.model) | {"kind": "head", "tokens": arguments.tokens})
    for name, pair in pairs.items():
        for way in (pair.bare, pair.outrider):
            way(8)  # warm
        rows: list[Row] = [
            {"kind": "round", "library": name, "title": pair.title, "round": number}
            for number in range(arguments.rounds)
        ]
        for number, way in in_turn((pair.bare, pair.outrider), arguments.rounds, random.Random(0)):
            rows[number][way.__name__] = way(arguments.tokens)
        append(arguments.out, *rows)
        summarise(name, rows)


def summarise(name: str, rows: list[Row]) -> None:
    ratio = Spread.of(row["outrider"]["token_s"] / row["bare"]["token_s"] for row in rows)
    own = median(row["outrider"]["own_s"] / row["outrider"]["token_s"] for row in rows)
    token_s = median(row["outrider"]["token_s"] for row in rows)
    print(
        f"{name:<12} {1000 * token_s:.2f} ms a token; over the bare loop {ratio.text()}; own time {own:.1%}",
        flush=True,
    )


if __name__ == "__main__":
    run_program(main)
