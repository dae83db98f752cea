r"""A session of half an hour as a new user has it, as a script.

    python tests/new_user.py [CHAPTER ...]

works with the embedded model in a folder of its own, prints what was typed and what came, and ends with what
went wrong. Whatever is typed, there is no traceback; the exit status is the documented one; a refusal is one
message that names what was given, the reason and the way out; a file is written whole or not at all.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from urllib.request import Request, urlopen

from cli_helpers import COMMAND, Terminal, environment
from new_user_lines import ASKS, BROKEN_FILES, CHAT, FILES, FULL_DISK, GUIDES, PASTE, PIPES, Line
from outrider.models import cache_dir
from outrider.models.embedded import EMBEDDED_NAME, embedded_draft

PATIENCE_S = 300
BROKEN = ("Traceback", "Exception ignored", "GGML_ASSERT", "core dumped", "Segmentation fault", "Aborted")
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[()=>][A-Z0-9]?|\r")
Print = Callable[[str], None]


@dataclass
class Place:
    """Where the user works: a folder with models and files, `outrider` on the PATH, a cache of its own."""

    folder: Path
    say: Print = print
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        models, programs = self.cache / "models", self.folder / "bin"
        models.mkdir(parents=True)
        programs.mkdir()
        whole = cache_dir() / "models" / EMBEDDED_NAME
        draft = embedded_draft()
        assert draft is not None
        for link, to in ((models / EMBEDDED_NAME, whole), ("model.gguf", whole), ("draft.gguf", draft)):
            (self.folder / link).symlink_to(to)
        program = programs / "outrider"
        program.write_text(f'#!/bin/sh\nexec "{COMMAND[0]}" -m outrider "$@"\n')
        program.chmod(0o755)
        for name, content in FILES.items():
            (self.folder / name).write_text(content)
        with whole.open("rb") as source:
            (self.folder / "cut.gguf").write_bytes(source.read(3_000_000))
            source.seek(0)
            (self.folder / "half.gguf").write_bytes(source.read(40_000_000))

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    @property
    def environment(self) -> dict[str, str]:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        own = {"OUTRIDER_CACHE": str(self.cache), "PATH": path, "HF_HUB_OFFLINE": "1"}
        return environment(PROMPT_TOOLKIT_NO_CPR="1", OMP_NUM_THREADS="2", OMP_WAIT_POLICY="PASSIVE", **own)

    def check(self, good: bool, what: str) -> None:
        if not good:
            self.wrong.append(what)
            self.say(f"    !! {what}")

    def shown(self, text: str) -> None:
        """Print what came, and look for what must never come."""
        lines = CONTROL.sub("", text).splitlines()
        for line in lines if len(lines) <= 12 else [*lines[:6], f"… {len(lines) - 12} lines …", *lines[-6:]]:
            self.say(f"    {line[:160]}")
        for word in BROKEN:
            self.check(word not in text, f"{word} in what it shows")

    def run(self, line: Line) -> None:
        """Type a line into a shell, and compare what comes."""
        self.say(f"\n$ {line.typed}")
        shell = ["bash", "-o", "pipefail", "-c", line.typed]
        done = subprocess.run(
            shell, cwd=self.folder, env=self.environment, capture_output=True, timeout=PATIENCE_S, check=False
        )
        out, err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
        self.shown(out + err)
        allowed = (line.status,) if isinstance(line.status, int) else line.status
        self.check(done.returncode in allowed, f"{line.typed}: exit status {done.returncode}")
        said = " ".join((out + err).split())
        for part in line.says:
            self.check(part in said, f"{line.typed}: nothing about {part!r}")
        if done.returncode == 2:
            self.check_refusal(line.typed, err)
        for name in line.makes:
            self.check((self.folder / name).exists(), f"{line.typed}: no {name}")
        for name in line.makes_no:
            self.check(not (self.folder / name).exists(), f"{line.typed}: left {name} behind")

    def check_refusal(self, typed: str, err: str) -> None:
        if "Try 'outrider " in err:  # an option that there is not
            return
        errors = [line for line in err.splitlines() if line.startswith("error: ")]
        self.check(len(errors) == 1, f"{typed}: {len(errors)} error messages")
        # What was given, why not, and a sentence that says what to do instead.
        self.check(all(re.match(r"error: .+: .+\. .+\.$", one) for one in errors), f"{typed}: {errors}")


def guides(place: Place) -> None:
    """llama.cpp's command lines as guides have them."""
    for line in (*GUIDES, *PIPES):
        place.run(line)


def broken(place: Place) -> None:
    """Files that are not what they should be, and a cache of which every entry is damaged."""
    for line in BROKEN_FILES:
        place.run(line)
    whole = Line('outrider run -m model.gguf -p "The sky is" -n 16 --temp 0')
    place.run(whole)
    for damage in (b"", b"{", b"[" * 20_000, b"\xff\x00" * 50):
        for path in place.cache.rglob("*"):
            if path.is_file() and not path.is_symlink() and "models" not in path.parts:
                path.write_bytes(damage)
        place.say(f"\n(every file of the cache is now {damage[:12]!r})")
        place.run(whole)


@contextmanager
def full_folder(place: Place) -> Iterator[None]:
    """A file system that is full, where one can be mounted; else files of the shell are limited."""
    folder = place.folder / "full"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        yield
        return
    try:
        (folder / "filler").write_bytes(bytes(4096))
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def full_disk(place: Place) -> None:
    """A disk on which there is no room for what is to be written."""
    place.run(Line("outrider run -m model.gguf -n 4 hi"))  # what calls cost is known from here on
    with full_folder(place):
        is_full = (place.folder / "full" / "filler").exists()
        for line in FULL_DISK:
            limit = "" if is_full else "ulimit -f 0; "
            place.run(Line(limit + line.typed, line.status, line.says))
        names = sorted(path.name for path in (place.folder / "full").rglob("*") if path.is_file())
        rest = [name for name in names if name not in ("filler", "answer.txt")]
        place.check(not rest, f"left on the full disk: {rest}")


def chat(place: Place) -> None:
    """A conversation in a terminal: a paste, commands, Ctrl-C in an answer and at the prompt."""
    line = ["chat", "-m", "model.gguf", "-n", "24", "--temp", "0", "-c", "8192"]
    place.say(f"\n$ outrider {' '.join(line)}")
    with in_terminal(place, line) as program:
        program.wait_for(ASKS)
        for typed, answer in CHAT:
            place.say(f"\n> {typed[:60]!r}{'…' if len(typed) > 60 else ''} ({len(typed)} characters)")
            program.type(typed)
            place.shown(program.wait_for(answer) if answer else "")
            place.shown(program.wait_for(ASKS) if typed[-1] == "\r" or answer else "")
        program.type("\x04")
        place.check(program.close() == 0, "chat does not end with 0 at Ctrl-D")
    for name, expected in (("paste.json", "uaua"), ("talk.json", "suaua")):
        messages = json.loads((place.folder / name).read_text())["messages"]
        roles = "".join(message["role"][0] for message in messages)
        place.check(roles == expected, f"{name} has messages of {roles}")
        place.check(name != "paste.json" or messages[2]["content"] == PASTE, "the paste was changed")
    with in_terminal(place, [*line[:3], "--ignore-eos", "-n", "2000"]) as program:
        program.wait_for(ASKS)
        program.type("Tell me a long story.\r")
        program.wait_for("story")
        program.wait_for_more(300)
        place.say("\n(Ctrl-C in an answer)")
        program.type("\x03")
        place.shown(program.wait_for("interrupted]"))
        program.wait_for(ASKS)
        program.type("\x03\x03")
        place.shown(program.wait_for("interrupted"))
        place.check(program.close() == 130, "chat does not end with 130 at Ctrl-C")
        place.shown(program.shown)


@contextmanager
def in_terminal(place: Place, line: Sequence[str]) -> Iterator[Terminal]:
    here = Path.cwd()
    os.chdir(place.folder)
    try:
        program = Terminal(line, place.environment, PATIENCE_S)
    finally:
        os.chdir(here)
    try:
        yield program
    finally:
        program.kill()


@contextmanager
def server(place: Place, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`outrider serve` on a free port, once it is ready; its process and its address."""
    line = ["serve", "-m", "model.gguf", "--port", "0", "-np", "4", "-c", "4096", *options]
    log = place.folder / "serve.log"
    place.say(f"\n$ outrider {' '.join(line)}")
    with log.open("w") as reported:
        process = subprocess.Popen(
            [*COMMAND, *line], cwd=place.folder, env=place.environment, stdout=reported, stderr=reported
        )
    try:
        end_s = time.monotonic() + PATIENCE_S
        while "\nready" not in log.read_text():
            assert process.poll() is None and time.monotonic() < end_s, log.read_text()
            time.sleep(0.1)
        found = re.search(r"^address +(http://[0-9.:]+)", log.read_text(), re.MULTILINE)
        assert found
        yield process, found[1]
    finally:
        process.kill()
        process.wait()
        place.shown(log.read_text())


def _post(address: str, path: str, body: object) -> Request:
    headers = {"Content-Type": "application/json"}
    return Request(address + path, json.dumps(body).encode(), headers)


def _question(text: str, **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 24, **fields}


def _events(address: str, body: object, pause_s: float = 0.0) -> list[str]:
    """The data of a stream's events, read slowly where `pause_s` says so."""
    with urlopen(_post(address, "/v1/chat/completions", body), timeout=PATIENCE_S) as answer:
        found = []
        for line in answer:
            if line.startswith(b"data: "):
                found.append(line[6:].decode().strip())
                time.sleep(pause_s)
    return found


def serve(place: Place) -> None:
    """A server with three kinds of clients at once, one of them slow; one leaves; then it is ended."""
    from concurrent.futures import ThreadPoolExecutor

    import openai

    with server(place) as (process, address), ThreadPoolExecutor(4) as threads:
        slow = threads.submit(_events, address, _question("Name ten rivers.", stream=True), 0.1)
        sources = {"speculation": {"show_sources": True}, "stream_options": {"include_usage": True}}
        page = threads.submit(_events, address, _question("What is a tide?", stream=True, **sources))
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
        answer = client.chat.completions.create(
            model="model", messages=[{"role": "user", "content": "Say hello."}], max_tokens=12
        )
        place.say(f"    openai: {answer.choices[0].message.content!r}")
        place.check(bool(answer.choices[0].message.content), "the openai client got nothing")
        with urlopen(address + "/", timeout=PATIENCE_S) as html:
            place.check(b"<title>Outrider" in html.read(), "there is no page")
        *_, account, end = page.result()
        place.say(f"    the page's account: {account[:150]}")
        place.check(end == "[DONE]" and "target_calls" in account, f"the page got {account} {end}")
        place.check(slow.result()[-1] == "[DONE]", "the slow client's answer was cut off")
        leave(address)
        process.send_signal(signal.SIGTERM)
        place.check(process.wait(PATIENCE_S) == 0, "serve does not end with 0 at SIGTERM")


def leave(address: str) -> None:
    """A client that asks for a long answer and goes away."""
    host, port = address.removeprefix("http://").split(":")
    body = json.dumps(_question("Tell me a story.", stream=True, max_tokens=1000)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        connection.recv(100)


def signals(place: Place, rounds: int = 12) -> None:
    """SIGINT and SIGTERM at random times, of starts and answers."""
    random = Random(7)
    commands = (
        [
            "run",
            "-m",
            "model.gguf",
            "-n",
            "400",
            "--ignore-eos",
            "--trace",
            "trace.jsonl",
            "Tell me a story.",
        ],
        ["run", "-m", "model.gguf", "-n", "400", "--ignore-eos", "--json", "Tell me a story."],
        ["serve", "-m", "model.gguf", "--port", "0"],
        ["costs", "-m", "model.gguf"],
    )
    for number in range(rounds):
        line, sent = commands[number % len(commands)], random.choice((signal.SIGINT, signal.SIGTERM))
        after_s = random.choice((0.6, 1.0, 2.0, 4.0, 8.0)) * random.uniform(0.5, 1.5)
        place.say(f"\n$ outrider {' '.join(line)}   ({sent.name} after {after_s:.2f} s)")
        process = subprocess.Popen(
            [*COMMAND, *line], cwd=place.folder, env=place.environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        time.sleep(after_s)
        process.send_signal(sent)
        out, err = (data.decode(errors="replace") for data in process.communicate(timeout=PATIENCE_S))
        place.shown(err)
        allowed = {0, -sent, 128 + sent}
        place.check(
            process.returncode in allowed, f"{line[0]}: exit status {process.returncode} at {sent.name}"
        )
        if "--json" in line and out.strip():
            json.loads(out)
        trace = place.folder / "trace.jsonl"
        if trace.exists():
            for record in trace.read_text().splitlines():
                json.loads(record)
            trace.unlink()
    rest = [path.name for path in place.cache.rglob("*") if ".tmp" in path.name or path.name.startswith(".")]
    place.check(not rest, f"left in the cache: {rest}")


CHAPTERS: dict[str, Callable[[Place], None]] = {
    one.__name__: one for one in (guides, chat, serve, broken, full_disk, signals)
}


def main(names: Sequence[str]) -> int:
    """Go through the chapters, all of them where none is named; 1 where something went wrong."""
    wrong = []
    for name in names or CHAPTERS:
        print(f"\n=== {name}: {CHAPTERS[name].__doc__}")
        with TemporaryDirectory(prefix="outrider-user-") as folder:
            place = Place(Path(folder), lambda text: print(text, flush=True))
            CHAPTERS[name](place)
            wrong += [f"{name}: {what}" for what in place.wrong]
    print(f"\n{len(wrong)} things went wrong", *wrong, sep="\n- ")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
