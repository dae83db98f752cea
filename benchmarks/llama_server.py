"""llama.cpp's own server as a process: start it, ask it, and see that it is quiet when nobody asks."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.lab.bench.servers import Server

ANSWER_PATIENCE_S = 1800


class LlamaServer(Server):
    """A running llama-server with one slot; a context manager that ends it.

    `arguments` follow model, context and threads. Raises ContestantError with the end of its log when it
    does not start.
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
