"""Clients that leave, over a real port."""

import json
import socket
import threading
from typing import Any

import pytest

from serving import live, serving, user


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
