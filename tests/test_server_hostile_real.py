"""The real program with the real embedded model among hostile clients: raw sockets, broken off at any
moment. Nothing may stay behind, and what is answered afterwards is what was answered before."""

import contextlib
import json
import random
import socket
import struct
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError

import pytest

from cli_helpers import PATIENCE_S
from real_server import KEY, MODEL, REASON, RealServer, real_server

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not MODEL.exists(), reason=REASON)]

DISCONNECTS = 1_000
WARM = 200
SEED = 7


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    arguments = ("-t", "1", "-c", "1024", "--client-timeout", "5", "--cache-ram", "0")
    with real_server(tmp_path_factory.mktemp("hostile"), *arguments) as running:
        yield running


def asking(server: RealServer, **body: Any) -> bytes:
    """A request as it goes over the wire."""
    content = json.dumps(body).encode()
    host = server.address.removeprefix("http://")
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def opened(server: RealServer) -> socket.socket:
    host, _, port = server.address.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def reset(sock: socket.socket) -> None:
    """Leave without a word."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def greedy(server: RealServer) -> str:
    """What the model says to a question; always the same, before the near-tie that its 18th token is."""
    messages = [{"role": "user", "content": "Count to ten."}]
    answer = server.post("/v1/chat/completions", messages=messages, temperature=0, max_tokens=12)
    text: str = answer["choices"][0]["message"]["content"]
    return text


def is_clean(server: RealServer) -> bool:
    """Whether nothing runs or waits any more."""
    return server.is_idle() and server.becomes(0, "outrider_num_requests_waiting")


def memory_bytes(server: RealServer) -> float:
    return server.metric("process_resident_memory_bytes")


def break_off(server: RealServer, chance: random.Random) -> None:
    """One client that leaves at some moment between its first byte and the last of its answer."""
    many = [{"role": "user", "content": "Tell me of the sea. " * chance.choice([1, 40])}]
    sent = asking(
        server,
        messages=many,
        max_tokens=chance.choice([1, 300]),
        stream=chance.random() < 0.6,
        n=chance.choice([1, 1, 3]),
    )
    sock = opened(server)
    match chance.choice(["nothing", "head", "body", "sent", "sent", "read", "read", "twice"]):
        case "nothing":
            pass
        case "head":
            sock.sendall(sent[: chance.randrange(1, sent.index(b"\r\n\r\n"))])
        case "body":
            sock.sendall(sent[: chance.randrange(sent.index(b"\r\n\r\n") + 4, len(sent))])
        case "sent":
            sock.sendall(sent)
        case "read":
            sock.sendall(sent)
            with contextlib.suppress(TimeoutError):
                sock.settimeout(chance.choice([0.01, 0.05, 0.2]))
                sock.recv(chance.choice([1, 200, 4096]))
        case "twice":
            sock.sendall(sent + sent)
    if chance.random() < 0.7:
        reset(sock)
    else:
        sock.close()


def test_a_thousand_clients_that_vanish_leave_nothing_behind(server: RealServer) -> None:
    before, chance = greedy(server), random.Random(SEED)
    for _ in range(WARM):
        break_off(server, chance)
    assert is_clean(server)
    warm_bytes = memory_bytes(server)
    for _ in range(DISCONNECTS - WARM):
        break_off(server, chance)
    assert is_clean(server)
    assert memory_bytes(server) < 1.1 * warm_bytes
    assert greedy(server) == before


@pytest.mark.parametrize("what", ["a", " ", "1", "\n", "!", "<|im_end|>", "\U0001f600", "a\u0301", "\0"])
def test_texts_that_are_hard_to_tokenize_are_answered(server: RealServer, what: str) -> None:
    text = what * (3_000_000 // len(json.dumps(what, ensure_ascii=False).encode()))
    bodies: dict[str, dict[str, Any]] = {
        "/tokenize": {"content": text},
        "/v1/completions": {"prompt": text},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}]},
    }
    for path, body in bodies.items():
        try:
            server.post(path, **body)
        except HTTPError as error:
            assert error.code in (400, 413)
            error.close()
    assert greedy(server)
