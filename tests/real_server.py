"""`outrider serve` with the embedded model as a process, for clients that talk to it over the loopback."""

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from prometheus_client.parser import text_string_to_metric_families

from cli_helpers import COMMAND, PATIENCE_S, environment
from outrider.backends.gguf.options import LoadOptions
from outrider.core.params import SamplingParams
from outrider.models.embedded import EMBEDDED_NAME
from outrider.models.hub import cache_dir

MODEL = cache_dir() / "models" / EMBEDDED_NAME
REASON = "`outrider run` fetches the model; tests do not"

NAME = "smol"
KEY = "the-key-of-the-tests-itself"
CONTEXT = 1024
"""of a request to the server that tests share"""
ONE_AT_ONCE = "the-key-for-one-request-at-once"
GREEDY = SamplingParams(temperature=0, top_k=0, top_p=1, min_p=0)

OPTIONS = LoadOptions(threads=1, flash_attention="on", backend="llama.cpp", extra_buffer_types=False)
"""Leave nothing to be tried out: the library and its kernels do not depend on a clock."""
ARGUMENTS = ("-t", "1", "-fa", "on", "--backend", "llama.cpp", "--no-repack", "--no-bitwise")
"""The same on the command line."""

KEYS = f"""
[[key]]
name = "tests"
key = "{KEY}"
admin = true

[[key]]
name = "one"
key = "{ONE_AT_ONCE}"
concurrency = 1
"""


@dataclass(frozen=True, slots=True)
class RealServer:
    """A server that runs, at `address`."""

    address: str

    @property
    def base_url(self) -> str:
        return f"{self.address}/v1"

    def post(self, path: str, key: str = KEY, **body: Any) -> Any:
        """What a request is answered."""
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        asked = Request(f"{self.address}{path}", json.dumps(body, ensure_ascii=False).encode(), headers)
        with urlopen(asked, timeout=PATIENCE_S) as answer:
            return json.load(answer)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        asked = Request(f"{self.address}/metrics", headers={"Authorization": f"Bearer {KEY}"})
        with urlopen(asked, timeout=PATIENCE_S) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        assert samples, f"there is no metric {name}"
        return sum(s.value for s in samples if labels.items() <= s.labels.items())

    def becomes(self, value: float, name: str, **labels: str) -> bool:
        """Whether a metric has a value, now or soon."""
        end_s = time.monotonic() + PATIENCE_S
        while self.metric(name, **labels) != value:
            if time.monotonic() > end_s:
                return False
            time.sleep(0.02)
        return True

    def is_idle(self) -> bool:
        """Whether nothing is generated any more, now or soon."""
        return self.becomes(0, "outrider_num_requests_running")


@contextmanager
def real_server(
    folder: Path, *arguments: str, model: Path = MODEL, keys: str = KEYS, end: int = signal.SIGTERM
) -> Iterator[RealServer]:
    """Start it on a free port. It is ended with this signal, and must end well. `folder` is for its files."""
    keys_file, log = folder / "keys.toml", folder / "log"
    keys_file.write_text(keys)
    line = [*COMMAND, "serve", "-m", str(model), "--alias", NAME, "--port", "0"]
    line += ["--api-keys", str(keys_file)]
    with log.open("w") as said:
        process = subprocess.Popen([*line, *arguments], stderr=said, env=environment())
    try:
        yield RealServer(_address(process, log))
        process.send_signal(end)
        assert process.wait(PATIENCE_S) == (0 if end == signal.SIGTERM else -end), log.read_text()
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in log.read_text(), log.read_text()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Where it listens, as soon as it is ready."""
    end_s = time.monotonic() + 4 * PATIENCE_S  # the first start with a model measures what calls cost
    while not re.search(r"^ready", log.read_text(), re.MULTILINE):
        assert process.poll() is None and time.monotonic() < end_s, log.read_text()
        time.sleep(0.05)
    found = re.search(r"^address +(http://[0-9.:]+)", log.read_text(), re.MULTILINE)
    assert found
    return found[1]
