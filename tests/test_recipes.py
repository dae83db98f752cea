"""What docs/examples and docs/cluster.md put in front of several servers, with OpenAI's client through it."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import openai
import pytest

from cli_helpers import PATIENCE_S, ROOT
from real_server import ARGUMENTS, CONTEXT, KEY, MODEL, NAME, REASON, RealServer, real_server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.exists(), reason=REASON),
]
TURNS = 3


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealServer]]:
    folders = [tmp_path_factory.mktemp(name) for name in ("one", "two")]
    given = (*ARGUMENTS, "-c", str(CONTEXT))
    with real_server(folders[0], *given) as one, real_server(folders[1], *given) as other:
        yield [one, other]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def in_front(command: Sequence[str], port: int, log: Path) -> Iterator[openai.OpenAI]:
    """A program that listens on this port, and a client through it."""
    with log.open("w") as to:
        program = subprocess.Popen(command, stdout=to, stderr=to)
    try:
        end_s = time.monotonic() + 2 * PATIENCE_S
        while not answers(port):
            assert program.poll() is None and time.monotonic() < end_s, log.read_text()
            time.sleep(0.1)
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0) as client:
            yield client
    finally:
        program.terminate()
        program.wait(PATIENCE_S)


def answers(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/health", timeout=PATIENCE_S) as said:
            return int(said.status) == 200
    except (URLError, OSError):
        return False


def converse(client: openai.OpenAI, number: int) -> list[tuple[int, int]]:
    """Of every turn the tokens of its prompt, and those whose KV was there. No two conversations begin alike,
    which is all that a router by prefixes knows them by."""
    things = ", ".join(f"thing {n}" for n in range(100 * number, 100 * number + 40))
    talk: list[dict[str, str]] = [{"role": "user", "content": f"{number} is the first of these: {things}"}]
    found = []
    for turn in range(TURNS):
        parts, usage = [], None
        stream = client.chat.completions.create(  # type: ignore[call-overload]
            model=NAME, messages=talk, max_tokens=6, temperature=0, stream=True,
            stream_options={"include_usage": True}, extra_headers={"x-session-id": f"{number}"},
        )  # fmt: skip
        for chunk in stream:
            parts += [choice.delta.content or "" for choice in chunk.choices]
            usage = chunk.usage or usage
        assert usage is not None and any(parts)
        found.append((usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens))
        talk += [
            {"role": "assistant", "content": "".join(parts)},
            {"role": "user", "content": f"And point {turn}?"},
        ]
    return found


def check(client: openai.OpenAI, servers: Sequence[RealServer]) -> None:
    """Conversations stay where their KV is, and both servers have some."""
    before = [server.metric("outrider_prompt_tokens_total") for server in servers]
    for number in range(8):
        _, *later = converse(client, number)
        assert all(cached > prompt / 2 for prompt, cached in later)
    after = [server.metric("outrider_prompt_tokens_total") for server in servers]
    assert all(a > b for a, b in zip(after, before, strict=True))
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": "Hello"}]
        )


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_nginx_keeps_a_conversation_on_one_server(two: list[RealServer], tmp_path: Path) -> None:
    port = free_port()
    text = (ROOT / "docs/examples/nginx.conf").read_text()
    text = text.replace("127.0.0.1:8080", f"127.0.0.1:{port}")
    for old, server in zip(("127.0.0.1:8081", "127.0.0.1:8082"), two, strict=True):
        text = text.replace(old, server.address.removeprefix("http://"))
    assert len(set(re.findall(r"127\.0\.0\.1:\d+", text))) == 3
    config = tmp_path / "nginx.conf"
    config.write_text(f"daemon off; pid {tmp_path}/pid; error_log stderr;\n{text}")
    with in_front(["nginx", "-p", str(tmp_path), "-c", str(config)], port, tmp_path / "log") as client:
        check(client, two)


@pytest.mark.skipif(shutil.which("vllm-router") is None, reason="vllm-router is not installed")
def test_vllm_router_keeps_a_conversation_on_one_server(two: list[RealServer], tmp_path: Path) -> None:
    port = free_port()
    urls = [server.address for server in two]
    command = [
        "vllm-router",
        "--port",
        str(port),
        "--policy",
        "consistent_hash",
        "--prometheus-port",
        str(free_port()),
    ]
    with in_front([*command, "--worker-urls", *urls], port, tmp_path / "log") as client:
        check(client, two)
