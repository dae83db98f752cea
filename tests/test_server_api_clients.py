"""Real clients over a real port: OpenAI's for Python, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from serving import Serving, live, serving, user
from test_server_api_structured import HERMES


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with serving(template=HERMES, max_running=4) as running:
        yield running


@pytest.fixture(scope="module")
def address(served: Serving) -> Iterator[str]:
    with live(served.app) as address:
        yield address


def test_many_at_once(address: str, served: Serving) -> None:
    async def ask(client: AsyncOpenAI, i: int) -> str:
        answer = await client.chat.completions.create(
            model="tiny", messages=user(f"[[{'word ' * i}{i}]]"), temperature=0  # type: ignore[arg-type]
        )  # fmt: skip
        return answer.choices[0].message.content or ""

    async def ask_all() -> list[str]:
        async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(8)))

    assert asyncio.run(ask_all()) == [f"{'word ' * i}{i}" for i in range(8)]
    assert any(len(spans) > 1 for spans in served.model.calls), "nothing shared a call"
    assert served.idle()


def test_who_waits_too_long_in_line_is_sent_away() -> None:
    with serving(max_running=1, max_waiting=1, call_s=0.02) as slow, live(slow.app) as address:

        def ask(_: int) -> int:
            with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
                try:
                    client.completions.create(model="tiny", prompt="[[abcdefghijkl]]|")
                except openai.RateLimitError as error:
                    assert int(error.response.headers["retry-after"]) >= 1
                    assert error.code == "queue_full"
                    return 429
                return 200

        with ThreadPoolExecutor(6) as pool:
            statuses = list(pool.map(ask, range(6)))
        assert set(statuses) == {200, 429}
        assert slow.idle()


# Clients that leave


def send(address: str, path: str, **body: Any) -> socket.socket:
    """A request on a connection that is the caller's to drop."""
    host, _, port = address.removeprefix("http://").partition(":")
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    connection = socket.create_connection((host, int(port)))
    connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    return connection


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_is_not_generated_for(path: str, stream: bool) -> None:
    endless = "x" * 1500
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": user(f"[[{endless}]]"), "n": 2},
        "/v1/completions": {"prompt": f"[[{endless}]]|", "max_tokens": 1500},
        "/v1/responses": {"input": f"[[{endless}]]"},
    }
    with serving(call_s=0.01, drafters=[], context_tokens=4096) as slow, live(slow.app) as address:
        with send(address, path, stream=stream, **bodies[path]) as connection:
            reached = threading.Event()
            for _ in range(1000):
                if slow.worker.state().running and len(slow.model.calls) > 5:
                    reached.set()
                    break
                reached.wait(0.005)
            assert reached.is_set(), "it never ran"
            if stream:
                assert b"200 OK" in connection.recv(1000)
        assert slow.idle(5), "it went on without anybody"
        assert len(slow.model.calls) < 1000


def test_a_client_that_leaves_the_line_leaves_no_trace() -> None:
    body = {"prompt": f"[[{'x' * 200}]]|", "max_tokens": 200}
    with serving(max_running=1, call_s=0.01, drafters=[]) as slow, live(slow.app) as address:
        with send(address, "/v1/completions", **body), send(address, "/v1/completions", **body):
            for _ in range(1000):
                state = slow.worker.state()
                if state.running and state.waiting:
                    break
                threading.Event().wait(0.005)
            assert (state.running, state.waiting) == (1, 1)
        assert slow.idle(5)
        answer = slow.post("/v1/completions", prompt="[[abc]]|")
        assert answer.json()["choices"][0]["text"] == "abc"
