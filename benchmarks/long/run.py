"""Long conversations and shared beginnings: what is read again, how long it takes, and what drafts gain.

    python benchmarks/long/run.py MODEL --out rows.jsonl [--llama-server PATH] [--tokens 32000] [--part agent]

MODEL is a GGUF file, or a random one: `tiny` or `wide`, hybrids, or `pair`, a target with its draft. Parts:

agent   a session of 20 turns that grows to `--tokens`: files of this repository are read, edited and
        written again. Outrider's run records the answers; the others are sent the same messages. Then
        (rows of `speculation`) answers with drafts and plainly, in turn, after 1,000, 8,000 and all tokens
cold    some of these turns asked of a server that has just started: are the texts the same?
shared  a system prompt of 2,000 tokens under 8 conversations, in turn and at once; n = 4 over 1,500
killed  the session, with a server that is killed before the eleventh turn and started again
draft   what it takes to save and restore the KV of a draft model (or of MODEL), and to read it again

A prompt's `read` tokens are those that were evaluated for it; `new` those that neither the prompt before nor
its answer had.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Row, Spread, append, argument_parser, describe, resume, run_program, table
from llama_server import Server, server_words
from outrider import Pair
from outrider.costs.calibrate import CallTimer

ROOT = Path(__file__).parents[2]
TURNS, KILLED_TURN, REST_S, PATIENCE_S = 20, 10, 6.0, 1800.0
PARTS = ("agent", "cold", "shared", "killed", "draft")
SAME = ("tokens", "answer", "threads", "models", "cpu")
MARKS = (1_000, 8_000)
"""tokens of prompts after which drafts are tried, beside the longest"""
RULES = (
    "You are the coding agent of a small team. You are given files, and you write them again with what was "
    "asked, and with nothing else changed. You answer with code, in one block, and without any comment. "
)
QUESTIONS = {
    "copies": "Write the last file again, from its first line on, with nothing changed.",
    "new": "Tell a story about a lighthouse keeper, in plain words, without any code.",
}

Message = dict[str, Any]


class Contestant:
    def __init__(self, name: str, given: Any, slots: int = 1, more: str = "") -> None:
        self.name = Path(name).name
        context = given.tokens + 1_024 if slots == 1 else 4_096
        shared = f"-m {{model}} --port {{port}} -t {given.threads} -tb {given.threads}"
        if name == "outrider":
            words = f"{shlex.join([sys.executable, '-m', 'outrider'])} serve {shared} -c {context}"
            words += f" --max-running {slots} {'-md {draft}' if given.draft else ''} {given.serve} {more}"
        else:
            words = f"{shlex.join(server_words(name))} {shared} --host 127.0.0.1 -np {slots}"
            words += f" -c {slots * context} {'--spec-type ngram-mod' if name == 'xllamacpp' else ''}"
        self._command = words
        self._values = {"model": given.model, "draft": given.draft}

    def start(self) -> Server:
        """It, warm."""
        server = Server(self.name, self._command, self._values)
        ask(server, [{"role": "user", "content": "Say hello."}], 4)
        return server


def main() -> None:
    parser = argument_parser(__doc__, threads=2, tokens=32_000, answer=160, rounds=3)
    parser.add_argument("model")
    parser.add_argument("--draft", type=Path, help="Outrider's draft model")
    parser.add_argument(
        "--llama-server", action="append", help="a program (the one in the package xllamacpp)"
    )
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--serve", default="", help="more options of `outrider serve`")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make(given, Path(folder))
        head = describe(given.model, given.draft) | {name: getattr(given, name) for name in SAME[:3]}
        rows = resume(given.out, head, SAME)
        for part in given.part or PARTS:
            if not any(row["part"] == part for row in rows):
                for row in globals()[part](given, rows):
                    rows.append({"part": part} | row)
                    append(given.out, rows[-1])
    for line in report(rows):
        print(line)


def make(given: Any, folder: Path) -> None:
    """The random models, where they are asked for."""
    if given.model not in ("tiny", "wide", "pair"):
        given.model = Path(given.model)
        return
    sys.path.insert(0, str(ROOT / "tests"))
    from tiny import Sizes
    from tiny_gguf import BEGIN, END, write_tiny

    template = f"{{% for m in messages %}}{BEGIN}{{{{ m.role }}}}\n{{{{ m.content }}}}{END}\n{{% endfor %}}"
    made: dict[str, Any] = {
        "arch": "llama" if given.model == "pair" else "qwen35",
        "sizes": Sizes() if given.model == "tiny" else Sizes.wide(512),
        "context_length": 65_536,
        "repeating": True,
        "letters": "".join(map(chr, range(33, 127))) + "\u0120\u010a\u0109",  # and blank, new line, tab
        "chat_template": template + f"{BEGIN}assistant{{{{ '\\n' }}}}",  # Jinja drops a last new line
    }
    if given.model == "pair":
        given.draft = write_tiny(folder / "draft.gguf", **made, layers=1)
    given.model = write_tiny(folder / f"{given.model}.gguf", **made, layers=12 * (given.model == "pair"))


# The session


def contents(rate: float, given: Any) -> Iterator[Message]:
    """The system prompt, then what the user says in each turn, where a token has `rate` characters."""
    folder = ROOT / "src" / "outrider"
    paths = [*sorted((folder / "engine").glob("*.py")), *sorted((folder / "server").glob("*.py"))]
    sources = [path.read_bytes().decode("ascii", "ignore") for path in paths if path.stat().st_size > 2_500]
    each = given.tokens / (TURNS + 1)
    yield {"role": "system", "content": (RULES * 40)[: int(each * rate)]}
    for number in range(TURNS):
        piece = (sources[number % len(sources)] * 9)[: int((each - given.answer - 100) * rate)]
        name = next(word for word in reversed(piece.split()) if word.isidentifier() and len(word) > 4)
        what = f"Write it again from its first line on, with `{name}` renamed to `{name}_{number}`."
        yield {"role": "user", "content": f"File {number}:\n```python\n{piece}\n```\n{what}"}


def recorded(rows: Sequence[Row], given: Any) -> list[list[Message]]:
    """The messages of each turn, with the answers that were recorded."""
    own = [row for row in rows if row["part"] == "agent" and row["contestant"] == "outrider"]
    if not own:
        sys.exit("the session is not recorded yet: begin with --part agent")
    system, *asked = contents(own[0]["rate"], given)
    messages, turns = [system], []
    for user, row in zip(asked, own, strict=True):
        messages = [*messages, user]
        turns.append(messages)
        messages = [*messages, {"role": "assistant", "content": row["text"]}]
    return turns


def rate_of(server: Server) -> float:
    """Characters of a token."""
    text = Path(__file__).read_text("utf-8")
    body = {"content": text, "add_special": False}
    answer = httpx.post(f"{server.address}/tokenize", json=body, timeout=PATIENCE_S, trust_env=False)
    return len(text) / len(answer.json()["tokens"])


def ask(server: Server, messages: Sequence[Message], max_tokens: int, **more: Any) -> Row:
    """The answers to a conversation and what they took."""
    body = {"messages": list(messages), "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}, **more}
    text, first_s, usage, timings, start_s = "", None, Row(), Row(), perf_counter()
    url = f"{server.address}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=PATIENCE_S, trust_env=False) as response:
        for line in response.iter_lines():
            event = json.loads(line[6:]) if line.startswith("data: {") else {}
            usage, timings = event.get("usage") or usage, event.get("timings") or timings
            for choice in event.get("choices", ()):
                if choice.get("delta", {}).get("content"):
                    first_s = first_s or perf_counter()
                    text += choice["delta"]["content"]
    end_s = perf_counter()
    if not usage:
        raise OSError(f"{server.name} gave no usage:\n{server.end_of_log()}")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    read = timings.get("prompt_n", usage["prompt_tokens"] - cached)
    counts = {"prompt": usage["prompt_tokens"], "read": read, "tokens": usage["completion_tokens"]}
    return {"ttft_s": (first_s or end_s) - start_s, "wall_s": end_s - start_s, **counts, "text": text}


def peak_bytes(server: Server) -> int:
    status = Path(f"/proc/{server.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


# The parts


def agent(given: Any, rows: Sequence[Row]) -> Iterator[Row]:
    contestant = Contestant("outrider", given)
    server = contestant.start()
    try:
        rate, messages, sizes = rate_of(server), list[Message](), list[int]()
        for message in contents(rate, given):
            messages.append(message)
            if message["role"] == "user":
                row = ask(server, messages, given.answer)
                sizes.append(row["prompt"])
                yield {"contestant": "outrider", "rate": rate, **row, "peak_bytes": peak_bytes(server)}
                messages.append({"role": "assistant", "content": row["text"]})
        marks = [next((i for i, size in enumerate(sizes) if size >= mark), 0) for mark in MARKS]
        turns = recorded(rows, given)
        yield from speculation(server, [turns[-1], *(turns[i] for i in reversed(marks))], given)
    finally:
        server.close()
    for name in given.llama_server or ["xllamacpp"]:
        with Contestant(name, given).start() as server:
            for messages in recorded(rows, given):
                row = ask(server, messages, given.answer)
                yield {"contestant": server.name, **row, "peak_bytes": peak_bytes(server)}


def cold(given: Any, rows: Sequence[Row]) -> Iterator[Row]:
    turns = recorded(rows, given)
    with Contestant("outrider", given).start() as server:
        for turn in (1, TURNS // 4):
            row = ask(server, turns[turn], given.answer, cache_prompt=False)
            texts = [row["text"] for row in rows if row["part"] == "agent" and "rate" in row]
            yield {"turn": turn, **row, "is_equal": row["text"] == texts[turn]}


def speculation(server: Server, turns: Sequence[Sequence[Message]], given: Any) -> Iterator[Row]:
    """Answers with and without drafts after these turns, the longest first."""
    for messages, kind in product(turns, QUESTIONS):
        for number, policy in product(range(given.rounds), ("warm", "plain", "auto")):
            question = {"role": "user", "content": f"{QUESTIONS[kind]} This is request {number}."}
            how, most = ("plain", 1) if policy == "warm" else (policy, 96)
            row = ask(server, [*messages[:-1], question], most, speculation={"policy": how})
            turn = len(messages) // 2 - 1
            yield {"part": "speculation", "turn": turn, "kind": kind, "policy": policy, **row}


def shared(given: Any, rows: Sequence[Row]) -> Iterator[Row]:
    rate = next(row["rate"] for row in rows if "rate" in row)

    def asked(server: Server, name: str, tokens: int, *, at_once: bool, **more: Any) -> Iterator[Row]:
        system = {"role": "system", "content": f"{name}. {(RULES * 90)[: int(tokens * rate)]}"}
        users = [{"role": "user", "content": f"Question {i}: what comes first?"} for i in range(8)]
        with ThreadPoolExecutor(8 if at_once else 1) as pool:
            users = users[:1] if "n" in more else users
            found = list(pool.map(lambda user: ask(server, [system, user], 16, **more), users))
        return ({"kind": name, "contestant": server.name, **row} for row in found)

    for name in ("outrider", *(given.llama_server or ["xllamacpp"])):
        with Contestant(name, given, slots=8).start() as server:
            yield from asked(server, "one after another", 2_000, at_once=False)
            yield from asked(server, "at once", 2_000, at_once=True)
            yield from asked(server, "n = 4", 1_500, at_once=False, n=4)


def killed(given: Any, rows: Sequence[Row]) -> Iterator[Row]:
    turns = recorded(rows, given)
    with tempfile.TemporaryDirectory() as folder:
        contestant = Contestant("outrider", given, more=f"--cache-dir {folder}")
        server = contestant.start()
        try:
            for turn, messages in enumerate(turns[:KILLED_TURN]):
                yield {"turn": turn, **ask(server, messages, given.answer)}
            time.sleep(REST_S)
            os.killpg(server.pid, signal.SIGKILL)
            server.close()
            server = contestant.start()
            yield {"turn": KILLED_TURN, **ask(server, turns[KILLED_TURN], given.answer)}
        finally:
            server.close()


def draft(given: Any, rows: Sequence[Row]) -> Iterator[Row]:
    del rows
    pair, size = Pair.load(given.draft or given.model, "none"), MARKS[-1] + 64
    try:
        model = pair.target.open(size, max_sequences=1, capacity_tokens=size)
        timer = CallTimer(model, "last", perf_counter, Random(0))
        for mark in MARKS:
            times, before = [perf_counter()], timer.model.length(0)
            while (missing := mark - timer.model.length(0)) > 0:
                timer.fill(missing)
            times.append(perf_counter())
            state = model.save(0)
            times.append(perf_counter())
            model.truncate(0, 0)
            model.restore(0, state)
            took_s = [later - earlier for earlier, later in pairwise([*times, perf_counter()])]
            size = sum(part.nbytes for part in state.parts)
            yield {"tokens": mark, "read": mark - before, "bytes": size} | dict(
                zip(("read_s", "save_s", "restore_s"), took_s, strict=True)
            )
    finally:
        pair.close()


# What came out, for people


def report(rows: Sequence[Row]) -> Iterator[str]:
    parts = {part: [row for row in rows if row["part"] == part] for part in (*PARTS, "speculation")}
    header = ["session", "last prompt", "read / new", "total", "first token", "p95", "peak memory"]
    yield from table(header, map(_session, _grouped(parts["agent"], "contestant").values()))
    equal = [row["is_equal"] for row in parts["cold"]]
    yield f"{sum(equal)} of {len(equal)} texts are those of a cold server\n"
    lines = []
    for (kind, _), group in _grouped(parts["speculation"], "kind", "turn").items():
        pairs = [[row for row in group if row["policy"] == policy] for policy in ("auto", "plain")]
        ratios = [a["tokens"] / a["wall_s"] * b["wall_s"] / b["tokens"] for a, b in zip(*pairs, strict=True)]
        same = sum(a["text"] == b["text"] for a, b in zip(*pairs, strict=True))
        lines.append([f"{kind} after {group[0]['prompt']} tokens", Spread.of(ratios).text(".2f"), str(same)])
    yield from table(["drafts over plain", "speed", "equal texts"], lines)
    lines = []
    for key, group in _grouped(parts["shared"], "kind", "contestant").items():
        lines.append([*key, *(str(sum(row[name] for row in group)) for name in ("prompt", "read"))])
    yield from table(["shared", "server", "prompt tokens", "read"], lines)
    for row in parts["killed"][-2:]:
        first = f"first token after {row['ttft_s']:.2f} s"
        yield f"turn {row['turn']}: {row['prompt']} tokens, {row['read']} read, {first}"
    for row in parts["draft"]:
        yield ", ".join(f"{name} {value:.3f}" for name, value in row.items() if name != "part")


def _grouped(rows: Sequence[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def _session(rows: Sequence[Row]) -> list[str]:
    pairs = zip(rows, [{"prompt": 0, "tokens": 0}, *rows], strict=False)
    new = sum(row["prompt"] - last["prompt"] - last["tokens"] for row, last in pairs)
    first_s = sorted(row["ttft_s"] for row in rows)
    return [
        rows[0]["contestant"], str(rows[-1]["prompt"]), f"{sum(row['read'] for row in rows) / new:.3f}",
        f"{sum(row['wall_s'] for row in rows):.1f} s", f"{first_s[len(rows) // 2]:.2f} s",
        f"{first_s[int(len(rows) * 0.95)]:.2f} s", f"{rows[-1]['peak_bytes'] / 1e9:.2f} GB",
    ]  # fmt: skip


if __name__ == "__main__":
    run_program(main)
