"""Total tokens/s and latencies of several servers under the same load, taking turns.

    python benchmarks/serve/load.py MODEL.gguf --llama-server PATH --out load.jsonl \
        [--draft DRAFT.gguf] [--prompts MORE.jsonl…] [--rounds 3]

In every round each server is started again, all of them at once, and idle ones are seen to be idle. Then
each load goes to each server in turn, servers in shuffled order: a mixed load of chats, code, edits, JSON
with a schema and summaries from 1, 2, 4 and 8 clients, then edits, JSON and calls of tools alone from one. A
client asks its next question when the last is answered: greedy, streamed, over loopback. No process is asked
the same twice. Rows that `--out` holds already are not measured again.

A row is one load on one server in one round: `wall_s`, `requests` with their times and tokens, and what
the server took of processor and memory. Made for Linux. README.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version as installed
from pathlib import Path
from time import perf_counter

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Row, append, argument_parser, describe, resume, run_program, turn
from llama_server import Server, version
from serve.client import ask, client_of
from serve.contestants import check_idle, check_memory, contestants, values_of
from serve.processes import cpu_s, rss_bytes
from serve.questions import Load, Question, deal, load_questions, loads, tool_questions

SAME = ("threads", "slots", "context", "tokens", "requests", "alone", "seed", "models", "cpu")
"""What all rows of a file share."""
HELLO = Question("hello", "chat", ({"role": "user", "content": "Say hello, and nothing else."},))


Key = tuple[object, ...]


def main() -> None:
    arguments = parse()
    chosen = contestants(arguments)
    head = describe_run(arguments, chosen)
    done = {key_of(row) for row in resume(arguments.out, head, SAME)}
    check_memory(len(chosen), arguments)
    deadline = time.monotonic() + 60 * arguments.minutes
    questions = load_questions(arguments.prompts) + tool_questions()
    all_loads = loads(arguments.clients, arguments.requests, arguments.alone)
    for round_ in range(arguments.rounds):
        hands = deal(questions, all_loads, round_, arguments.seed)
        jobs = [(load, hand) for load, hand in zip(all_loads, hands, strict=True)]
        for row in run_round(round_, jobs, chosen, done, arguments, deadline):
            append(arguments.out, row)
            print(line_of(row), flush=True)
    print(f"python {Path(__file__).with_name('report.py')} {arguments.out}")


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__, tokens=96, rounds=3, threads=2, context=4096, seed=0)
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "--llama-server",
        help="its plain and its speculative settings take part; xllamacpp: the one in that package",
    )
    parser.add_argument("--draft", type=Path, help="a draft model, for every contestant that can use one")
    parser.add_argument(
        "--contestant",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="one more; {port} {model} {draft} {threads} {slots} {context} {total_context} are filled in",
    )
    parser.add_argument("--only", metavar="NAMES", help="of the contestants only these, separated by commas")
    parser.add_argument("--prompts", type=Path, nargs="*", default=[], help="further questions, JSON lines")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--requests", type=int, default=16, help="of a mixed load")
    parser.add_argument("--alone", type=int, default=8, help="requests of the edits, the JSON and the tools")
    parser.add_argument("--slots", type=int, default=8, help="parallel sequences of every server")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds that a request may take")
    parser.add_argument("--minutes", type=float, default=600.0, help="no load is begun after so long")
    parser.add_argument("--lock", type=Path, help="a file to hold (flock) during each load")
    return parser.parse_args()


def describe_run(arguments: argparse.Namespace, chosen: Mapping[str, str]) -> Row:
    """The head of the results: on what, and how, they are measured. Paths are cut to their last part."""
    models = [model for model in (arguments.model, arguments.draft) if model]
    commands = {
        name: " ".join(Path(part).name if Path(part).is_absolute() else part for part in shlex.split(command))
        for name, command in chosen.items()
    }
    same = {name: getattr(arguments, name) for name in SAME if hasattr(arguments, name)}
    program = arguments.llama_server
    llama = f"xllamacpp {installed(program)}" if program == "xllamacpp" else program and version(program)
    return describe(*models) | same | {"llama_server": llama, "commands": commands}


def key_of(row: Row) -> Key:
    return row["contestant"], row["round"], row["load"], row["clients"]


def line_of(row: Row) -> str:
    errors = [request["error"] for request in row["requests"] if "error" in request]
    speed = sum(request.get("tokens", 0) for request in row["requests"]) / row["wall_s"]
    said = f"round {row['round']}, {row['load']} from {row['clients']}, {row['contestant']}: "
    said += f"{speed:.1f} tokens/s in {row['wall_s']:.0f} s"
    return said + (f", {len(errors)} errors, as {errors[0]}" if errors else "")


def run_round(
    round_: int,
    jobs: Sequence[tuple[Load, Sequence[Question]]],
    chosen: Mapping[str, str],
    done: set[Key],
    arguments: argparse.Namespace,
    deadline: float,
) -> Iterator[Row]:
    """One row for each load and server that is not done yet; servers start again, and end with the round."""
    open_keys = {(n, round_, load.name, load.clients) for load, _ in jobs for n in chosen} - done
    if not open_keys or time.monotonic() > deadline:
        return
    shuffle = random.Random(arguments.seed + round_)
    values = values_of(arguments)
    with ExitStack() as stack:
        servers = {n: stack.enter_context(Server(n, c, values)) for n, c in chosen.items()}
        for server in servers.values():
            for _ in range(2):
                warm = asyncio.run(run_load(server, [HELLO], 1, 16, arguments.patience))
                if "error" in warm[0]:
                    raise RuntimeError(f"{server.name} does not answer: {warm[0]['error']}")
        check_idle(servers.values())
        for load, hand in jobs:
            for name in shuffle.sample(list(servers), len(servers)):
                key = (name, round_, load.name, load.clients)
                if key in open_keys and time.monotonic() < deadline:
                    with turn(arguments.lock):
                        yield measure(servers[name], round_, load, hand, arguments)


def measure(
    server: Server, round_: int, load: Load, hand: Sequence[Question], arguments: argparse.Namespace
) -> Row:
    before_s, start_s = cpu_s(server), perf_counter()
    requests = asyncio.run(run_load(server, hand, load.clients, arguments.tokens, arguments.patience))
    wall_s = perf_counter() - start_s
    if not server.is_alive:
        raise RuntimeError(f"{server.name} has died:\n{server.end_of_log()}")
    for request in requests:
        request["start_s"] -= start_s
    return {
        "kind": "load",
        "contestant": server.name,
        "round": round_,
        "load": load.name,
        "clients": load.clients,
        "wall_s": wall_s,
        "cpu_s": cpu_s(server) - before_s,
        "rss_bytes": rss_bytes(server),
        "requests": requests,
    }


async def run_load(
    server: Server, questions: Sequence[Question], clients: int, max_tokens: int, patience_s: float
) -> list[Row]:
    """So many clients ask all questions; each takes the next one when it has its answer."""
    left, rows = iter(questions), list[Row]()

    async def work(client: httpx.AsyncClient) -> None:
        for question in left:
            rows.append(await ask(client, question, max_tokens, patience_s))

    async with client_of(server.address, patience_s) as client, asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(work(client))
    return rows


if __name__ == "__main__":
    run_program(main)
