"""Time to the first token of a long prompt: read anew, restored from memory, and from disk after a restart.

    python benchmarks/serve/restart.py MODEL.gguf --out restart.jsonl [--context 4608] [--beginning 4000]

Each round starts a server with an empty folder, asks with a beginning that nobody has asked with before, asks
something else, so that the KV of the first has to leave, asks again, ends the server with SIGTERM, starts it
again on the same folder, and asks a third time: each time with another question after the beginning.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Row, Spread, append, argument_parser, describe, read_rows, resume, run_program
from outrider.lab.bench.servers import Server
from serve.client import ask, client_of
from serve.questions import Question

SAME = ("threads", "context", "beginning", "models", "cpu")
_WORDS_PER_TOKEN = 0.8


def main() -> None:
    parser = argument_parser(__doc__, rounds=3, threads=2, context=4608, tokens=8, beginning=4000)
    parser.add_argument("model", type=Path)
    arguments = parser.parse_args()
    head = describe(arguments.model) | {name: getattr(arguments, name) for name in SAME[:3]}
    done = {row["round"] for row in resume(arguments.out, head, SAME)}
    for number in range(arguments.rounds):
        if number not in done:
            append(arguments.out, *run_round(number, arguments))
    for line in report(read_rows(arguments.out)[1:]):
        print(line)


def beginning(number: int, num_tokens: int) -> str:
    """A text that no other round begins with; about so many tokens."""
    count = int(num_tokens * _WORDS_PER_TOKEN)
    words = ["parser", "table", "value", "index", "stream", "server", "cache", "token", "record", "error"]
    text = " ".join(words[(i * i + 7 * i * number + i // 3) % len(words)] for i in range(count))
    return f"Log number {number}: {text}."


def run_round(number: int, arguments: argparse.Namespace) -> list[Row]:
    program = shlex.quote(str(Path(sys.executable).with_name("outrider")))
    command = f"{program} serve -m {{model}} --port {{port}} -t {{threads}} -tb {{threads}} -c {{context}}"
    command += " -np 1 --kept-sequences 0 --cache-ram 4096 --cache-dir {folder}"
    text = beginning(number, arguments.beginning)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        values = {"model": arguments.model, "threads": arguments.threads, "context": arguments.context}
        values["folder"] = folder

        def timed(server: Server, name: str, question: str) -> None:
            messages = ({"role": "user", "content": question},)
            row = asyncio.run(_ask(server, Question(name, "restart", messages), arguments.tokens))
            rows.append({"kind": "answer", "round": number, "from": name} | row)

        with Server("outrider", command, values) as server:
            timed(server, "warm-up", "Say hello.")
            timed(server, "read", f"{text}\nWhat is it about?")
            timed(server, "other", "Say hello again, please.")
            timed(server, "memory", f"{text}\nWhich word comes first?")
        size = sum(path.stat().st_size for path in Path(folder).glob("*.kv"))
        with Server("outrider", command, values) as server:
            timed(server, "warm-up", "Say hello to somebody else.")
            timed(server, "disk", f"{text}\nWhich word comes last?")
        rows[-1]["folder_bytes"] = size
    return rows


async def _ask(server: Server, question: Question, tokens: int) -> Row:
    async with client_of(server.address, 600) as client:
        return await ask(client, question, tokens, 600)


def report(rows: list[Row]) -> list[str]:
    """Medians and extremes of each way, and the ratios to reading within each round."""
    lines = []
    by_way = {way: {r["round"]: r for r in rows if r["from"] == way} for way in ("read", "memory", "disk")}
    for way, found in by_way.items():
        times = Spread.of(row["ttft_s"] for row in found.values()).text()
        ratio = Spread.of(by_way["read"][n]["ttft_s"] / row["ttft_s"] for n, row in found.items()).text(".1f")
        cached = Spread.of(row["cached_tokens"] for row in found.values()).text(".0f")
        prompt = Spread.of(row["prompt_tokens"] for row in found.values()).text(".0f")
        lines.append(f"{way}: first token {times} s, {ratio}x; {cached} of {prompt} tokens cached")
    sizes = Spread.of(row["folder_bytes"] / 1e6 for row in by_way["disk"].values()).text(".1f")
    return [*lines, f"folder: {sizes} MB"]


if __name__ == "__main__":
    run_program(main)
