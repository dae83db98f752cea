"""`outrider serve` as a program: what it refuses before it loads anything, what it says, how it ends."""

import json
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from cli_helpers import COMMAND, PATIENCE_S, TEMPLATE, Call, environment, refused
from tiny_gguf import write_tiny

KEY = "a-key-of-twenty-four-chars"


@pytest.fixture
def run(outrider: Call) -> Call:
    return partial(outrider, "serve")


def test_what_is_wrong_is_found_before_a_model_is_loaded(run: Call, tmp_path: Path) -> None:
    missing = ("-m", str(tmp_path / "none.gguf"), "--port", "0")
    assert "it has no key" in refused(run("--host", "0.0.0.0"))
    keys = tmp_path / "keys.toml"
    keys.write_text("[[key]]\nname = 'anna'\nkey = 'short'\n")
    assert "a key has 16 to 512 characters" in refused(run(*missing, "--api-keys", str(keys)))
    assert "none.toml: no such file" in refused(run(*missing, "--api-keys", str(tmp_path / "none.toml")))
    cert = ("--tls-cert", str(keys), "--tls-key", str(keys))
    assert "certificate and key do not work" in refused(run(*missing, *cert))
    assert str(tmp_path / "absent") in refused(run(*missing, "--corpus", str(tmp_path / "absent")))
    assert "--policy: sometimes cannot be used" in refused(run(*missing, "--policy", "sometimes"))
    assert "--max-running: 0 cannot be used" in refused(run(*missing, "-np", "0"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"port {port}: the server cannot listen there (address already in use)" in refused(
            run(*missing[:2], "--port", port)
        )
    assert "none.gguf" in refused(run(*missing))


# As a process


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny(path, context_length=8192, layers=8, chat_template=TEMPLATE)
    return path


class Program:
    """The server as a process; `told` is what it said until it was ready."""

    def __init__(self, model: Path, *arguments: str, **variables: str) -> None:
        line = [
            *COMMAND,
            "serve",
            "-m",
            str(model),
            "-t",
            "1",
            "--port",
            "0",
            "--policy",
            "plain",
            *arguments,
        ]
        self.process = subprocess.Popen(line, stderr=subprocess.PIPE, env=environment(**variables), text=True)
        self.shown: list[str] = []

    def start(self) -> str:
        """Wait until it is ready; returns its address."""
        assert self.process.stderr is not None
        while not self.shown or not re.search(r"^ready|\"started\"", self.shown[-1]):
            line = self.process.stderr.readline()
            assert line, f"it ended: {self.shown}"
            self.shown.append(line)
        found = re.search(r"https?://[0-9.:]+", "".join(self.shown))
        assert found
        return found[0]

    def end(self) -> tuple[int, str]:
        """Wait for its end; returns its exit status and what it said after it was ready."""
        _, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, err


@pytest.fixture
def program(model: Path) -> Iterator[Callable[..., Program]]:
    started: list[Program] = []

    def start(*arguments: str, **variables: str) -> Program:
        started.append(Program(model, *arguments, **variables))
        return started[-1]

    yield start
    for one in started:
        with one.process as process:
            process.kill()


def post(address: str, max_tokens: int, **more: Any) -> Request:
    body = {"prompt": "the river", "max_tokens": max_tokens, "logit_bias": {}, **more}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    return Request(f"{address}/v1/completions", json.dumps(body).encode(), headers)


def test_it_serves_says_so_and_drains(program: Callable[..., Program]) -> None:
    server = program("--alias", "tiny", OUTRIDER_API_KEY=KEY, OUTRIDER_SERVICE_HOST="x")
    address = server.start()
    shown = "".join(server.shown)
    assert "OUTRIDER_SERVICE_HOST is not a setting" in shown
    for words in ("as tiny", "no draft model", "4 requests at once", "1 API key"):
        assert words in shown, words
    with pytest.raises(HTTPError) as error:
        urlopen(f"{address}/v1/models", timeout=PATIENCE_S)
    error.value.close()
    assert error.value.code == 401
    with urlopen(post(address, 4, model="tiny"), timeout=PATIENCE_S) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] >= 1
        assert "x-request-id" in answer.headers
    server.process.send_signal(signal.SIGTERM)
    status, log = server.end()
    assert status == 0, log
    assert "route=/v1/completions status=200" in log and "key=default" in log
    assert KEY not in shown + log and "river" not in log and "Traceback" not in log


def test_a_second_signal_ends_at_once_and_a_log_as_json_is_json_from_its_first_line_on(
    program: Callable[..., Program],
) -> None:
    options = ("--log-json", "--log-prompts", "--drain-timeout", "3600", "-c", "8192")
    server = program(*options, OUTRIDER_SERVICE_HOST="x")
    address = server.start()
    urlopen(post(address, 1), timeout=PATIENCE_S).close()
    with urlopen(post(address, 8000, stream=True, ignore_eos=True), timeout=PATIENCE_S) as answer:
        assert answer.readline().startswith(b"data: ")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.stderr is not None
        while "draining" not in server.shown[-1]:
            server.shown.append(server.process.stderr.readline())
            assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        status, log = server.end()
    assert status == 128 + signal.SIGTERM, log
    events = [json.loads(line) for line in server.shown]
    assert [event["event"] for event in events] == ["started", "request", "draining"]
    assert events[0]["address"].startswith(address) and events[0]["notices"]
    assert "the river" in events[1]["body"] and events[1]["route"] == "/v1/completions"


@pytest.mark.slow
def test_a_long_answer_is_cut_off_when_draining_takes_too_long(program: Callable[..., Program]) -> None:
    server = program("--drain-timeout", "0.3", "-c", "8192")
    address = server.start()
    with urlopen(post(address, 8000, stream=True, ignore_eos=True), timeout=PATIENCE_S) as answer:
        assert answer.readline().startswith(b"data: ")
        server.process.send_signal(signal.SIGTERM)
        rest = answer.read()
    status, log = server.end()
    assert status == 0, log
    assert b'"cancelled"' in rest and b"[DONE]" not in rest
    assert "Traceback" not in log
