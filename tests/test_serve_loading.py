"""The port while the models are being loaded."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from http.client import HTTPConnection

import pytest

from outrider.cli import serve as command
from outrider.core.errors import SettingError
from outrider.server.configuration import read_configuration
from outrider.server.running import Loading, bind, close
from outrider.server.settings import ServeSettings


@pytest.fixture
def sockets() -> Iterator[list[socket.socket]]:
    bound = bind("127.0.0.1", 0)
    yield bound
    close(bound)


def ask(port: int, method: str = "GET", path: str = "/health") -> tuple[int, str, dict[str, str]]:
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, body="{}" if method == "POST" else None)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text, dict(response.headers)


def test_every_request_is_answered_with_what_is_being_done(sockets: list[socket.socket]) -> None:
    port = sockets[0].getsockname()[1]
    with Loading(sockets, ServeSettings()) as loading:
        for method, path in (("GET", "/health"), ("POST", "/v1/chat/completions"), ("DELETE", "/x")):
            status, text, headers = ask(port, method, path)
            error = json.loads(text)["error"]
            assert status == 503 and headers["retry-after"]
            assert (error["code"], error["type"]) == (503, "unavailable_error")
            assert error["message"].startswith("Loading model: the server is loading the models")
        loading.doing = "waiting"
        assert "is waiting" in ask(port)[1]
        assert ask(port, "HEAD")[:2] == (503, "")


def test_a_client_that_sends_nothing_keeps_nobody_waiting(sockets: list[socket.socket]) -> None:
    port = sockets[0].getsockname()[1]
    with Loading(sockets, ServeSettings()), socket.create_connection(("127.0.0.1", port)) as silent:
        assert ask(port)[0] == 503
        silent.sendall(b"GET /hea")
        assert ask(port)[0] == 503


def test_the_port_is_open_before_the_models_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers = []

    def load(*_: object) -> None:
        answers.append(ask(port))
        raise SettingError("model", "it cannot be loaded", "Take another.")

    monkeypatch.setattr(command, "load_pair", load)
    with pytest.raises(SettingError, match="cannot be loaded"):
        command.serve(read_configuration({"port": port}, {}))
    assert [answer[0] for answer in answers] == [503]
    with pytest.raises(ConnectionRefusedError):
        ask(port)
