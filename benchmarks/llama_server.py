"""A server as a process on a free loopback port, and llama.cpp's own server in particular."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import httpx

ANSWER_PATIENCE_S = 1800
START_PATIENCE_S = 300.0
END_PATIENCE_S = 30.0


class Server:
    """A running server; a context manager that ends it with all that it started.

    It counts as started when `/health` answers 200. Raises OSError with the end of its log when that takes
    too long.

    Args:
        name: What messages call it.
        command: A shell-like line in which `{port}` and the names of `values` are filled in.
        values: What is filled in.
    """

    def __init__(self, name: str, command: str, values: Mapping[str, object]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.name = name
        self.address = f"http://127.0.0.1:{port}"
        words = [word.format(**values, port=port) for word in shlex.split(command)]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, it lives as long as the process
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is ours to answer, and its group can be ended as a whole
        )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        deadline = time.monotonic() + START_PATIENCE_S
        while self.is_alive and time.monotonic() < deadline:
            with suppress(httpx.HTTPError):
                # the loopback has no proxy
                if httpx.get(self.address + "/health", timeout=2, trust_env=False).status_code == 200:
                    return
            time.sleep(0.2)
        raise OSError(f"{self.name} does not start. The end of its log:\n{self.end_of_log()}")

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_s(self) -> float:
        """Processor time used so far, by all its threads and by children that have ended. Made for Linux."""
        times = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[11:15]
        return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")

    def end_of_log(self) -> str:
        """The last lines that it wrote, on either stream."""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(self._log.tell() - 10_000, 0))
        return b"\n".join(self._log.read().splitlines()[-20:]).decode(errors="replace")

    def close(self) -> None:
        """End the process and what it started; ending it twice is harmless."""
        if self._log.closed:
            return
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(END_PATIENCE_S)
        except subprocess.TimeoutExpired:
            pass
        finally:  # an interrupt while waiting, or children that outlived it
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._log.close()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):  # nobody is left; macOS says so of zombies
            os.killpg(self._process.pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()


class LlamaServer(Server):
    """A running llama-server with one slot; a context manager that ends it.

    `arguments` follow model, context and threads. Raises OSError when it does not start.
    """

    def __init__(
        self, program: Path, model: Path, threads: int, context: int, arguments: Sequence[str] = ()
    ) -> None:
        fixed = ["-np", "1", "--host", "127.0.0.1", "--port", "{port}"]
        words = ["{program}", "-m", "{model}", "-c", str(context), "-t", str(threads), "-tb", str(threads)]
        command = shlex.join([*words, *fixed, *arguments])
        super().__init__("llama-server", command, {"program": program, "model": model})

    def complete(self, prompt: str | Sequence[int], num_tokens: int, **settings: Any) -> dict[str, Any]:
        """The answer to a text or to tokens, greedy and from a cold cache, as the server gives it."""
        body = {
            "prompt": prompt,
            "n_predict": num_tokens,
            "temperature": 0,
            "cache_prompt": False,
            **settings,
        }
        request = urllib.request.Request(f"{self.address}/completion", json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_PATIENCE_S) as response:
                answer: dict[str, Any] = json.load(response)
        except OSError as error:
            raise RuntimeError(f"llama-server does not answer ({error}):\n{self.end_of_log()}") from error
        return answer


def server_words(program: str) -> list[str]:
    """The command of a llama-server, or of the one in xllamacpp."""
    own = Path(__file__).with_name("peer.py").resolve()
    return [sys.executable, str(own)] if program == "xllamacpp" else [program]


def offers(program: Path) -> list[str]:
    """The kinds of speculation that this build of the server knows, as its help lists them."""
    # ik_llama.cpp's ends with status 1 after its help.
    help_ = subprocess.run([str(program), "--help"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"--spec-type ([a-z0-9,-]+)", help_)
    return found[1].split(",") if found else []


def version(program: Path) -> str:
    """What the server says it is."""
    done = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).strip()
