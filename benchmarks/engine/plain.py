"""Is there a wrapper tax? Plain decoding by Outrider, llama-cpp-python and llama-server, in turn.

    python benchmarks/engine/plain.py MODEL.gguf --llama-server PATH --out plain.jsonl

All three decode the same prompt greedily with the same file and threads, one after another, over and
over; the time is per generated token, prompt excluded: Outrider's `decode_s`, the loop over
`Llama.generate` from its first token on, and the `timings` of llama-server's own response.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Row, Spread, append, argument_parser, describe, in_turn, run_program
from llama_server import LlamaServer
from outrider import LoadOptions, Request, SamplingParams, Session, read_out

PROMPT = (
    "Write a Python module that reads a CSV file of measurements, groups the rows by sensor, and prints "
    "mean, median and standard deviation for each. Explain each function in its docstring.\n"
)

Contestant = Callable[[int], float]
"""Decodes so many tokens and returns milliseconds per token."""


def outrider(model: Path, threads: int) -> Contestant:
    session = Session.load(model, context_length=1024, options=LoadOptions(threads=threads))
    prompt = session.encode(PROMPT)

    def decode(num_tokens: int) -> float:
        session.engine.reset()
        request = Request(
            prompt, SamplingParams(temperature=0), max_tokens=num_tokens, ignore_end=True, speculate=False
        )
        readout = read_out(session.engine.generate(request))
        return 1000 * readout.decode_s / readout.generated_tokens

    return decode


def llama_cpp_python(model: Path, threads: int) -> Contestant:
    from llama_cpp import Llama

    llama = Llama(
        str(model), n_ctx=1024, n_threads=threads, n_threads_batch=threads, n_batch=2048, verbose=False
    )
    prompt = llama.tokenize(PROMPT.encode())

    def decode(num_tokens: int) -> float:
        llama.reset()
        tokens = llama.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0)
        next(tokens)
        before = time.perf_counter()
        for _ in range(num_tokens):
            next(tokens)
        return 1000 * (time.perf_counter() - before) / num_tokens

    return decode


def llama_server(server: LlamaServer) -> Contestant:
    def decode(num_tokens: int) -> float:
        timings = server.complete(PROMPT, num_tokens, ignore_eos=True)["timings"]
        return float(timings["predicted_ms"] / timings["predicted_n"])

    return decode


def main() -> None:
    parser = argument_parser(__doc__, threads=2, tokens=64, rounds=9)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-server", type=Path, required=True)
    arguments = parser.parse_args()
    with LlamaServer(arguments.llama_server, arguments.model, arguments.threads, 1024) as server:
        contestants: dict[str, Contestant] = {
            "outrider": outrider(arguments.model, arguments.threads),
            "llama-cpp-python": llama_cpp_python(arguments.model, arguments.threads),
            "llama-server": llama_server(server),
        }
        rows = measure(contestants, arguments)
    summarise(rows, list(contestants))


def measure(contestants: dict[str, Contestant], arguments: argparse.Namespace) -> list[Row]:
    """A row of milliseconds per token for each round."""
    for decode in contestants.values():
        decode(8)  # warm
    rows: list[Row] = [{"kind": "round", "round": number} for number in range(arguments.rounds)]
    for number, name in in_turn(contestants, arguments.rounds, random.Random(0)):
        rows[number][name] = contestants[name](arguments.tokens)
        print(f"round {number}, {name}: {rows[number][name]:.2f} ms", flush=True)
    head = describe(arguments.model) | {"threads": arguments.threads, "tokens": arguments.tokens}
    arguments.out.unlink(missing_ok=True)
    append(arguments.out, head, *rows)
    return rows


def summarise(rows: list[Row], names: list[str]) -> None:
    for name in names:
        times = Spread.of(row[name] for row in rows)
        ratios = Spread.of(row["outrider"] / row[name] for row in rows)
        print(f"{name:<18} median {times.text('.2f')} ms a token; outrider / it: {ratios.text()}")


if __name__ == "__main__":
    run_program(main)
