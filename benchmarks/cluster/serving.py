"""`outrider serve --ray local` with the embedded model: what replicas read anew, what routing adds, a replica
that is killed, more replicas and fewer. Appends a row for each to --out.

    python benchmarks/cluster/serving.py --out benchmarks/cluster/serving.jsonl [--only affinity]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import openai

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import append, describe
from outrider.models import cache_dir
from outrider.models.embedded import EMBEDDED_NAME

MODEL = cache_dir() / "models" / EMBEDDED_NAME
OUTRIDER = Path(sys.executable).with_name("outrider")
COMMON = ("-t", "1", "-fa", "on", "--backend", "llama.cpp", "--no-repack", "--port", "0", "-c", "1024",
          "--alias", "any")  # fmt: skip
HANGS_S = 90.0


@contextmanager
def server(*arguments: str) -> Iterator[str]:
    """Its address, once it is ready; it has to end well when it is asked to."""
    with TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with log.open("w") as to:
            program = subprocess.Popen([OUTRIDER, "serve", *COMMON, *arguments], stderr=to, stdout=to)
        try:
            while not re.search(r"^ready", log.read_text(), re.MULTILINE):
                if program.poll() is not None:
                    raise SystemExit(log.read_text()[-3000:])
                time.sleep(0.2)
            found = re.search(r"(http://[0-9.:]+)/v1", log.read_text())
            assert found
            yield found[1]
            program.send_signal(signal.SIGTERM)
            assert program.wait(60) == 0, log.read_text()[-3000:]
        finally:
            program.kill()


def client(address: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=HANGS_S)


async def affinity(is_random: bool, more: tuple[str, ...], conversations: int = 20, turns: int = 10) -> Any:
    """Conversations that take turns, four requests at once; what of their prompts was read anew."""
    with server("--ray", "local", "--replicas", "2", *more) as address:
        asked, texts = client(address), _documents(conversations)
        talks: list[list[Any]] = [[{"role": "user", "content": text}] for text in texts]
        read = whole = 0
        for turn in range(turns):
            for at in range(0, conversations, 4):
                group = talks[at : at + 4]
                answers = await asyncio.gather(*(_ask(asked, talk, is_random) for talk in group))
                for talk, (said, prompt, cached) in zip(group, answers, strict=True):
                    whole, read = whole + prompt, read + prompt - cached
                    talk.append({"role": "assistant", "content": said})
                    talk.append({"role": "user", "content": f"And what of point {turn + 1}?"})
        return {"requests": conversations * turns, "prompt_tokens": whole, "read_anew": read}


async def _ask(asked: openai.AsyncOpenAI, talk: list[Any], is_random: bool) -> tuple[str, int, int]:
    headers = {"x-session-id": uuid.uuid4().hex} if is_random else {}
    answer = await asked.chat.completions.create(
        model="any", messages=talk, max_tokens=8, temperature=0, extra_headers=headers
    )
    usage = answer.usage
    assert usage is not None
    details = usage.prompt_tokens_details
    cached = (details.cached_tokens or 0) if details else 0
    return answer.choices[0].message.content or "", usage.prompt_tokens, cached


def _documents(count: int) -> list[str]:
    words = ["river", "boat", "stone", "cloud", "market", "letter", "winter", "garden", "signal", "copper"]
    return [
        f"Note {n}. " + " ".join(words[(n * 7 + i * i + i // 5) % len(words)] for i in range(150))
        for n in range(count)
    ]


async def routing(pairs: int = 80) -> Any:
    """Seconds to the first token of the same short question, of a server and of one replica, in turn."""
    with server() as plain, server("--ray", "local", "--replicas", "1") as routed:
        asked = {"plain": client(plain), "routed": client(routed)}
        taken: dict[str, list[float]] = {name: [] for name in asked}
        for number in range(pairs + 5):
            for name in (*asked,) if number % 2 else (*reversed(asked),):
                began = time.perf_counter()
                stream = await asked[name].chat.completions.create(
                    model="any", messages=[{"role": "user", "content": "Say hello."}], max_tokens=4,
                    temperature=0, stream=True,
                )  # fmt: skip
                async for chunk in stream:
                    if chunk.choices and chunk.choices[0].delta.content:
                        taken[name].append(time.perf_counter() - began)
                        break
                async for _ in stream:
                    pass
        kept = {name: sorted(seconds[5:]) for name, seconds in taken.items()}
        added = [b - a for a, b in zip(taken["plain"][5:], taken["routed"][5:], strict=True)]
        quartiles = [round(value, 5) for value in statistics.quantiles(added, n=4)]
        medians = {f"{name}_s": round(statistics.median(seconds), 5) for name, seconds in kept.items()}
        return {"pairs": pairs, **medians, "added_quartiles_s": quartiles}


async def _streamed(asked: openai.AsyncOpenAI, number: int, tokens: int = 48) -> str:
    """How a request ended."""
    count = 0
    try:
        async with asyncio.timeout(HANGS_S):
            stream = await asked.chat.completions.create(
                model="any", messages=[{"role": "user", "content": f"Question {number}: tell me a story."}],
                max_tokens=tokens, temperature=0, stream=True,
            )  # fmt: skip
            finish = None
            async for chunk in stream:
                count += 1
                finish = chunk.choices[0].finish_reason if chunk.choices else finish
            return "whole" if finish else "cut off without a word"
    except TimeoutError:
        return "hangs"
    except openai.APIStatusError as error:
        return f"status {error.status_code} {error.code}"
    except openai.APIError as error:
        return f"error event {error.code} {'after' if count else 'before'} its first token"


def _replicas() -> list[int]:
    """The processes of the replicas."""
    found = subprocess.run(["pgrep", "-f", "ray::ServeReplica:outrider"], capture_output=True, text=True)
    return [int(line) for line in found.stdout.split()]


async def killed(requests: int = 16) -> Any:
    """One of two replicas is killed while it answers."""
    with server("--ray", "local", "--replicas", "2", "--max-running", "4") as address:
        asked = client(address)
        await asyncio.gather(*(_streamed(asked, n, 2) for n in range(4)))
        first, *_ = _replicas()
        running = [asyncio.ensure_future(_streamed(asked, n)) for n in range(requests)]
        await asyncio.sleep(1.5)
        os.kill(first, signal.SIGKILL)
        ends = Counter(await asyncio.gather(*running))
        later = Counter([await _streamed(asked, 100 + n, 8) for n in range(10)])
        return {"requests": requests, "ends": ends, "later": later}


async def drained(streams: int = 4) -> Any:
    """SIGTERM with streams in flight: each has to end whole. The answers fit into the sockets meanwhile."""
    with server("--ray", "local", "--replicas", "2") as address:
        asked = client(address)
        running = [asyncio.create_task(_streamed(asked, n, 300)) for n in range(streams)]
        await asyncio.sleep(1.5)
        in_flight = sum(not task.done() for task in running)
    return {"requests": streams, "in_flight": in_flight, "ends": Counter(await asyncio.gather(*running))}


async def scaled() -> Any:
    """From one replica to two under load, and back when it is over: four long streams run all the time, so
    the replica that is to end has some."""
    with server("--ray", "local", "--replicas", "1:2", "--max-running", "4") as address:
        asked, ends, numbers, seen = client(address), Counter[str](), count(), [1]

        async def talk(tokens: int, goes_on: Callable[[], bool]) -> None:
            while goes_on():
                ends[await _streamed(asked, next(numbers), tokens)] += 1

        end = time.monotonic() + 240
        crowd = [asyncio.ensure_future(talk(48, lambda: len(seen) == 1)) for _ in range(12)]
        crowd += [asyncio.ensure_future(talk(160, lambda: len(seen) < 3)) for _ in range(4)]
        while len(seen) < 3 and time.monotonic() < end:
            await asyncio.sleep(0.5)
            if (now := len(_replicas())) != seen[-1]:
                seen.append(now)
        await asyncio.gather(*crowd)
        return {"replicas": seen, "requests": ends.total(), "ends": ends}


async def measure(only: str | None) -> AsyncIterator[dict[str, Any]]:
    memory = ("--cache-ram", "2048")
    for name, make in {
        "affinity": lambda: affinity(False, ()),
        "random": lambda: affinity(True, ()),
        "affinity, memory for all": lambda: affinity(False, memory),
        "random, memory for all": lambda: affinity(True, memory),
        "routing": routing,
        "killed": killed,
        "drained": drained,
        "scaled": scaled,
    }.items():
        if only in (None, name):
            yield {"case": name, **await make()}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only")
    options = parser.parse_args()
    if not options.out.exists():
        append(options.out, describe(MODEL))
    async for row in measure(options.only):
        print(json.dumps(row), flush=True)
        append(options.out, row)


if __name__ == "__main__":
    asyncio.run(main())
