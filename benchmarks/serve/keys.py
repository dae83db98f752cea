"""Does the time to the first token say what another key has asked?

    python benchmarks/serve/keys.py MODEL.gguf --out keys.jsonl [--rounds 15] [--beginning 600]

In each round a key asks about a text. Then another one asks about that text and about one that nobody has
asked about, in an order that changes, and the first asks about its own again. KV is kept in the cache, in
memory and on disk, and texts are remembered.
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
from serve.restart import beginning

SAME = ("threads", "context", "beginning", "models", "cpu")
KEYS = {"first": "the-key-of-the-first-one", "second": "the-key-of-the-second-one"}
PATIENCE_S = 300.0


def main() -> None:
    parser = argument_parser(__doc__, rounds=15, threads=2, context=2048, tokens=4, beginning=600)
    parser.add_argument("model", type=Path)
    arguments = parser.parse_args()
    head = describe(arguments.model) | {name: getattr(arguments, name) for name in SAME[:3]}
    if not resume(arguments.out, head, SAME):
        append(arguments.out, *asyncio.run(measure(arguments)))
    for line in report(read_rows(arguments.out)[1:]):
        print(line)


async def measure(arguments: argparse.Namespace) -> list[Row]:
    program = shlex.quote(str(Path(sys.executable).with_name("outrider")))
    command = f"{program} serve -m {{model}} --port {{port}} -t {{threads}} -tb {{threads}} -c {{context}}"
    command += " --api-keys {keys} --cache-ram 2048 --cache-dir {folder} --remember"
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.toml"
        keys.write_text("".join(f'[[key]]\nname = "{name}"\nkey = "{key}"\n' for name, key in KEYS.items()))
        values = {"model": arguments.model, "threads": arguments.threads, "context": arguments.context}
        with Server("outrider", command, values | {"keys": keys, "folder": Path(folder) / "kv"}) as server:
            for number in range(arguments.rounds + 1):
                asked = [("first", "new", 2 * number), ("second", "another's", 2 * number)]
                asked.insert(1 + number % 2, ("second", "nobody's", 2 * number + 1))
                for key, text, which in [*asked, ("first", "own", 2 * number)]:
                    row = await _ask(server, key, beginning(which, arguments.beginning), arguments.tokens)
                    rows.append({"kind": "answer", "round": number, "asked": text} | row)
    return [row for row in rows if row["round"]]  # the first round is the warm-up


async def _ask(server: Server, key: str, text: str, tokens: int) -> Row:
    question = Question("keys", "keys", ({"role": "user", "content": f"{text}\nWhat is it about?"},))
    async with client_of(server.address, PATIENCE_S) as client:
        client.headers["Authorization"] = f"Bearer {KEYS[key]}"
        return await ask(client, question, tokens, PATIENCE_S)


def report(rows: list[Row]) -> list[str]:
    """Medians and extremes of each kind, and the ratios to a text that nobody has asked about."""
    lines, by_round = [], dict[str, dict[int, Row]]()
    for row in rows:
        by_round.setdefault(row["asked"], {})[row["round"]] = row
    for text, found in by_round.items():
        times = Spread.of(row["ttft_s"] for row in found.values()).text()
        ratio = Spread.of(row["ttft_s"] / by_round["nobody's"][n]["ttft_s"] for n, row in found.items())
        cached = Spread.of(row["cached_tokens"] for row in found.values()).text(".0f")
        prompt = Spread.of(row["prompt_tokens"] for row in found.values()).text(".0f")
        lines.append(f"{text}: first token {times} s, {ratio.text()}x; {cached} of {prompt} tokens cached")
    return lines


if __name__ == "__main__":
    run_program(main)
