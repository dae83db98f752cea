"""A coding agent's session of 20 turns, and its first token after a restart.

    python benchmarks/serve/agent.py MODEL.gguf --out agent.jsonl [--llama-server PATH] [--context 16384]

`agent.json` has the session: a beginning of some 8,000 tokens (rules, open files, tools), questions, edits,
calls and what the tools gave. The answers are the server's own: each goes into the next turn's prompt, as an
agent sends it. A turn that wants a call demands one. Outrider keeps its KV in a folder; after the last turn
it is ended with SIGTERM, started again on that folder, and asked one more question, which one with an empty
folder is asked, too. Contestants take turns; --only takes some of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Row, Spread, append, argument_parser, describe, read_rows, resume, run_program
from outrider.lab.bench.servers import Server
from serve.client import client_of, events
from serve.contestants import contestants, values_of

SAME = ("threads", "context", "seed", "models", "cpu")
PATIENCE_S = 600.0
SESSION = json.loads((Path(__file__).parent / "agent.json").read_text("utf-8"))

Message = dict[str, Any]


def main() -> None:
    parser = argument_parser(__doc__, rounds=1, threads=2, context=16384, seed=0)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-server", help="xllamacpp: the one in that package")
    parser.add_argument("--contestant", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--only", help="names of contestants, with commas")
    parser.set_defaults(draft=None, slots=1)
    arguments = parser.parse_args()
    head = describe(arguments.model) | {name: getattr(arguments, name) for name in SAME[:3]}
    done = {(row["round"], row["contestant"]) for row in resume(arguments.out, head, SAME)}
    for number in range(arguments.rounds):
        names = list(contestants(arguments).items())
        for name, command in names if number % 2 == 0 else reversed(names):
            if (number, name) not in done:
                rows = run_session(name, command, arguments)
                append(arguments.out, *({"round": number, "contestant": name} | row for row in rows))
    for line in report(read_rows(arguments.out)[1:]):
        print(line)


def run_session(name: str, command: str, arguments: argparse.Namespace) -> list[Row]:
    """All turns, and the one after a restart."""
    keeps = name.startswith("outrider")
    command += " --cache-dir {folder}" if keeps else ""
    messages: list[Message] = [{"role": "system", "content": SESSION["system"]}]
    rows: list[Row] = []

    @contextmanager
    def started(folder: str) -> Iterator[Server]:
        with Server(name, command, values_of(arguments) | {"folder": folder}) as server:
            asyncio.run(
                ask(server, [{"role": "user", "content": "Say hello."}], {"kind": "text", "max_tokens": 4})
            )
            yield server

    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as empty:
        with started(folder) as server:
            for turn in SESSION["turns"]:
                messages.append(_sent(turn, messages[-1]))
                answer, row = asyncio.run(ask(server, messages, turn))
                messages.append(answer)
                rows.append({"kind": "turn", "turn": len(rows), "wants": turn["kind"]} | row)
                print(f"{name}: turn {len(rows)}, {row['e2e_s']:.1f} s", file=sys.stderr, flush=True)
        files = [path.stat().st_size for path in Path(folder).iterdir() if path.is_file()]
        for place, there in (("kept", folder), ("anew", empty)) if keeps else ():
            with started(there) as server:
                _, row = asyncio.run(ask(server, [*messages, _sent(SESSION["after"], {})], SESSION["after"]))
            rows.append({"kind": "after", "from": place, "folder_bytes": sum(files)} | row)
    return rows


def _sent(turn: Row, last: Message) -> Message:
    """A turn of the user, or what a tool gave to the last message's call."""
    message = {"role": turn["role"], "content": turn["content"]}
    if turn["role"] == "tool":
        message["tool_call_id"] = (last.get("tool_calls") or [{"id": "none"}])[0]["id"]
    return message


async def ask(server: Server, messages: list[Message], turn: Row) -> tuple[Message, Row]:
    """The answer, as it goes into the next prompt, and what it took."""
    body = {
        "messages": messages,
        "tools": SESSION["tools"],
        "tool_choice": "required" if turn["kind"] == "call" else "auto",
        "parallel_tool_calls": False,
        "max_tokens": turn["max_tokens"],
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text, calls, counts = "", dict[int, Message](), Row()
    start_s, first_s = perf_counter(), None
    async with (
        client_of(server.address, PATIENCE_S) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        if response.status_code != 200:
            sys.exit(f"{server.name}: {response.status_code} {(await response.aread()).decode()[:500]}")
        async for event in events(response.aiter_lines()):
            for choice in event.get("choices", ()):
                delta = choice["delta"]
                if first_s is None and (delta.get("content") or delta.get("tool_calls")):
                    first_s = perf_counter()
                text += delta.get("content") or ""
                for part in delta.get("tool_calls") or ():
                    _grow(calls, part)
                counts["finish"] = choice.get("finish_reason") or counts.get("finish")
            counts |= _counts(event)
    row = {"ttft_s": (first_s or perf_counter()) - start_s, "e2e_s": perf_counter() - start_s, **counts}
    answer: Message = {"role": "assistant", "content": text}
    if calls:
        answer["tool_calls"] = [_whole(call) for call in calls.values()]
    return answer, row


def _grow(calls: dict[int, Message], part: Row) -> None:
    empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
    call, given = calls.setdefault(part["index"], empty), part.get("function", {})
    call["id"] += part.get("id") or ""
    for name in ("name", "arguments"):
        call["function"][name] += given.get(name) or ""


def _whole(call: Message) -> Message:
    """A call that the limit of tokens cut off goes back without arguments."""
    try:
        json.loads(call["function"]["arguments"])
    except ValueError:
        call["function"]["arguments"] = "{}"
    return call


def _counts(event: Row) -> Row:
    """Tokens of the prompt, those that were not read, and the answer's; target calls where they are said."""
    usage, found = event.get("usage"), Row()
    if usage:
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        found |= {"prompt_tokens": usage["prompt_tokens"], "cached_tokens": cached}
        found |= {"tokens": usage["completion_tokens"]}
    if usage and "outrider" in event:
        found["target_calls"] = event["outrider"]["target_calls"]
    if "cache_n" in event.get("timings", {}):  # llama-server's
        found["cached_tokens"] = event["timings"]["cache_n"]
    return found


def report(rows: list[Row]) -> list[str]:
    """For each contestant its turns, in medians over the rounds, and its restarts."""
    lines = []
    for name in dict.fromkeys(row["contestant"] for row in rows):
        own = [row for row in rows if row["contestant"] == name]
        turns = [row for row in own if row["kind"] == "turn"]
        lines.append(f"{name}: turn, wants, prompt tokens, read anew, first token (s), whole (s), tokens")
        for number in sorted({row["turn"] for row in turns}):
            same = [row for row in turns if row["turn"] == number]
            prompt, tokens = same[0]["prompt_tokens"], same[0]["tokens"]
            new = prompt - same[0]["cached_tokens"]
            times = ", ".join(Spread.of(row[key] for row in same).text() for key in ("ttft_s", "e2e_s"))
            lines.append(f"  {number + 1}, {same[0]['wants']}, {prompt}, {new}, {times}, {tokens}")
        sums = {
            key: Spread.of(sum(r[key] for r in turns if r["round"] == n) for n in {r["round"] for r in turns})
            for key in ("e2e_s", "tokens", "prompt_tokens", "cached_tokens")
        }
        lines.append("  all: " + ", ".join(f"{key} {value.text('.1f')}" for key, value in sums.items()))
        after = {row["from"]: row for row in own if row["kind"] == "after"}
        for place, row in after.items():
            lines.append(
                f"  after a restart, {place}: first token {row['ttft_s']:.2f} s, {row['cached_tokens']} of "
                f"{row['prompt_tokens']} tokens cached, folder {row['folder_bytes'] / 1e6:.0f} MB"
            )
    return lines


if __name__ == "__main__":
    run_program(main)
