"""Half an hour of mixed requests from four clients: does memory stay flat, does anything leak or fail?

    python benchmarks/serve/soak.py MODEL.gguf --out soak.json [--minutes 30] [--server COMMAND]

The clients stream answers, leave in the middle of them and before their first token, ask for JSON that a
schema limits, ask several choices at once, and send what must be refused. Memory of the process, requests
that run and wait are sampled all the while. Afterwards the server is left alone: then nothing may run or
wait, and it has to answer again. The summary is JSON; the exit status is 1 where something is wrong:

- an answer of status 500 or more, none at all, finished JSON that is none, a bad request that is taken,
- memory that grew by more than 2 % after the warm-up,
- requests that still run or wait when nobody asks.

With `--names` each request goes to one of several models. `--minutes 1` tries it out. `--server` is any
server's command, `{port}`, `{model}`, `{threads}`, `{slots}`, `{context}` and `{total_context}` filled
in. Made for Linux.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Row, argument_parser, describe, run_program
from outrider.lab.bench.servers import Server
from serve.abuse import KINDS, Visitor
from serve.client import client_of
from serve.contestants import contestants, values_of
from serve.metrics import running_and_waiting
from serve.processes import rss_bytes
from serve.questions import load_questions

WARM_UP_SHARE = 0.2
GROWTH_LIMIT = 0.02
QUIET_PATIENCE_S = 60


def main() -> None:
    arguments = parse()
    command = arguments.server or contestants(arguments)["outrider"]
    with Server("the server", command, values_of(arguments)) as server:
        found = asyncio.run(soak(server, arguments))
        found |= left_behind(server)
    # Of a server of several models the memory depends on which are loaded: its peaks are compared.
    of = max if arguments.names else median
    found |= {"growth": growth([sample["rss_bytes"] for sample in found["samples"]], of)}
    found |= {"problems": problems(found)}
    whole = describe(arguments.model) | {"kind": "soak", "minutes": arguments.minutes} | found
    arguments.out.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in found.items() if name != "samples"}, indent=1))
    sys.exit(1 if found["problems"] else 0)


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__, threads=2, context=4096, tokens=48, seed=0)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--server", metavar="COMMAND", help="another server than Outrider's")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--patience", type=float, default=120.0, help="seconds that a request may take")
    parser.add_argument("--names", nargs="+", default=(), help="models of a server of several, asked in turn")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between samples")
    parser.set_defaults(llama_server=None, contestant=[], only=None)
    return parser.parse_args()


async def soak(server: Server, arguments: argparse.Namespace) -> Row:
    """Let the clients at it and take samples; what came of the requests by kind, and the first errors."""
    deadline = time.monotonic() + 60 * arguments.minutes
    ended: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    questions = load_questions()

    async def visit(number: int) -> None:
        async with client_of(server.address, arguments.patience) as client:
            rng = random.Random(arguments.seed * 1000 + number)
            visitor = Visitor(client, questions, rng, arguments.tokens, arguments.patience, arguments.names)
            while time.monotonic() < deadline and server.is_alive:
                kind = rng.choice(KINDS)
                complaint = await visitor.visit(kind)
                ended[kind] += 1
                if complaint:
                    errors[f"{kind}: {complaint}"] += 1
                    await asyncio.sleep(0.1)  # a server that refuses everything is not to be flooded

    async with asyncio.TaskGroup() as group:
        for number in range(arguments.clients):
            group.create_task(visit(number))
        samples = group.create_task(watch(server, deadline, arguments.every))
    return {
        "requests": dict(ended),
        "num_errors": errors.total(),
        "errors": dict(errors.most_common(20)),
        "samples": samples.result(),
    }


async def watch(server: Server, deadline: float, every_s: float) -> list[Row]:
    """Memory and load of the server, every so often until the deadline."""
    start_s, samples = time.monotonic(), list[Row]()
    while time.monotonic() < deadline and server.is_alive:
        await asyncio.sleep(every_s)
        _, text = await asyncio.to_thread(server.get, "/metrics")
        running, waiting = running_and_waiting(text)
        samples.append(
            {
                "at_s": round(time.monotonic() - start_s, 1),
                "rss_bytes": rss_bytes(server),
                "own_bytes": rss_bytes(server, own=True),
                "loaded": await asyncio.to_thread(loaded_models, server),
                "running": running,
                "waiting": waiting,
            }
        )
    return samples


def loaded_models(server: Server) -> list[str]:
    """The models that are loaded, by their names; none where the server does not say."""
    status, text = server.get("/v1/models")
    found = json.loads(text)["data"] if status == 200 else []
    return [model["id"] for model in found if model.get("status", {}).get("value") == "loaded"]


def left_behind(server: Server) -> Row:
    """What still runs when nobody has asked for a while, and whether the server is well."""
    deadline = time.monotonic() + QUIET_PATIENCE_S
    running, waiting = running_and_waiting(server.get("/metrics")[1])
    while (running or waiting) and time.monotonic() < deadline:
        time.sleep(0.5)
        running, waiting = running_and_waiting(server.get("/metrics")[1])
    alive = server.is_alive
    return {
        "left_running": running,
        "left_waiting": waiting,
        "health": server.get("/health")[0],
        "log": "" if alive else server.end_of_log(),
    }


def growth(rss_bytes: Sequence[int], of: Callable[[Sequence[int]], float] = median) -> float | None:
    """How much the memory grew after the warm-up: the last fifth of what follows it over the first, the
    medians or what else `of` makes of them, less 1. None for too few samples."""
    after = rss_bytes[int(len(rss_bytes) * WARM_UP_SHARE) :]
    part = len(after) // 5
    return of(after[-part:]) / of(after[:part]) - 1 if part else None


def problems(found: Row) -> list[str]:
    """What is wrong, for people; empty where all went well."""
    said = []
    if found["num_errors"]:
        said.append(f"{found['num_errors']} requests did not end as they should")
    if found["growth"] is None:
        said.append("too few samples to judge the memory by: give more --minutes")
    elif found["growth"] > GROWTH_LIMIT:
        said.append(f"memory grew by {found['growth']:.1%} after the warm-up")
    for name in ("left_running", "left_waiting"):
        if found[name] is None:
            said.append("/metrics does not say what runs and waits")
        elif found[name]:
            said.append(f"{found[name]:.0f} requests are {name.replace('_', ' ')}")
    if found["health"] != 200:
        said.append(f"/health answers {found['health']} afterwards")
    if missing := [kind for kind in KINDS if not found["requests"].get(kind)]:
        said.append(f"nothing was tried of {', '.join(missing)}")
    return said


if __name__ == "__main__":
    run_program(main)
