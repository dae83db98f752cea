"""llama.cpp's own server as a process: start it, ask it, and see that it is quiet when nobody asks."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

START_PATIENCE_S = 300
ANSWER_PATIENCE_S = 1800


class LlamaServer:
    """A running llama-server with one slot; a context manager that ends it.

    `arguments` follow model, context and threads. Raises RuntimeError with the end of its log when it
    does not start.
    """

    def __init__(
        self, program: Path, model: Path, threads: int, context: int, arguments: Sequence[str] = ()
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._address = f"http://127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, it lives as long as the process
        command = [str(program), "-m", str(model), "-c", str(context)]
        command += ["-t", str(threads), "-tb", str(threads), "-np", "1"]
        command += ["--host", "127.0.0.1", "--port", str(port), *arguments]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT
        )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        deadline = time.monotonic() + START_PATIENCE_S
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self._address}/health", timeout=2):
                    return
            except OSError:
                time.sleep(0.2)
        raise RuntimeError(f"llama-server does not start:\n{self._end_of_log()}")

    def _end_of_log(self) -> str:
        self._log.seek(0)
        return b"\n".join(self._log.read().splitlines()[-20:]).decode(errors="replace")

    def complete(self, prompt: str | Sequence[int], num_tokens: int, **settings: Any) -> dict[str, Any]:
        """The answer to a text or to tokens, greedy and from a cold cache, as the server gives it."""
        body = {
            "prompt": prompt,
            "n_predict": num_tokens,
            "temperature": 0,
            "cache_prompt": False,
            **settings,
        }
        request = urllib.request.Request(f"{self._address}/completion", json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_PATIENCE_S) as response:
                answer: dict[str, Any] = json.load(response)
        except OSError as error:
            raise RuntimeError(f"llama-server does not answer ({error}):\n{self._end_of_log()}") from error
        return answer

    def cpu_s(self) -> float:
        """Processor time used so far, by all its threads."""
        times = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End the process; ending it twice is harmless."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def offers(program: Path) -> list[str]:
    """The kinds of speculation that this build of the server knows, as its help lists them."""
    help_ = subprocess.run([str(program), "--help"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"--spec-type ([a-z0-9,-]+)", help_)
    return found[1].split(",") if found else []


def version(program: Path) -> str:
    """What the server says it is."""
    done = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=True)
    return (done.stdout + done.stderr).strip()
