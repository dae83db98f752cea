"""The HTTP server: slow and rude clients, sockets, TLS, draining."""

import asyncio
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from guarded import Small, guarded
from outrider.core.errors import SettingError
from outrider.server.running import Drain, Server, address_of, bind, check_tls
from outrider.server.settings import ServeSettings

PATIENCE_S = 20.0
HEAD = "{} HTTP/1.1\r\nHost: 127.0.0.1\r\n"


def until(holds: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end_s, f"still waiting for: {what}"
        time.sleep(0.005)


class Running:
    """A server in a thread of its own, and connections to it."""

    def __init__(self, server: Server, sockets: list[socket.socket]) -> None:
        self.server = server
        self.port: int = sockets[0].getsockname()[1]
        self.thread = threading.Thread(target=server.run, args=(sockets,), daemon=True)
        self.opened: list[socket.socket] = []

    def connect(self, *lines: str, body: bytes = b"") -> socket.socket:
        """A new connection, on which these header lines were sent and their end; none: nothing was sent."""
        made = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)
        self.opened.append(made)
        if lines:
            made.sendall(
                (HEAD.format(lines[0]) + "".join(f"{line}\r\n" for line in lines[1:]) + "\r\n").encode()
            )
        made.sendall(body)
        return made

    def is_well(self) -> bool:
        """Whether requests are answered."""
        return received(self.connect("GET /health", "Connection: close")).startswith(b"HTTP/1.1 200")

    @property
    def num_connections(self) -> int:
        return len(self.server.server_state.connections)


def received(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    data = b""
    try:
        while chunk := connection.recv(65536):
            data += chunk
    except ConnectionError:
        pass
    return data


def status(answer: bytes) -> int:
    return int(answer.split()[1])


@contextmanager
def running(small: Small | None = None, drain: Drain | None = None, **settings: Any) -> Iterator[Running]:
    given = {"drain_timeout": 5.0, **settings}
    server = Server(guarded(None, small, **given), ServeSettings(**given), drain=drain)
    run = Running(server, bind("127.0.0.1", 0))
    run.thread.start()
    try:
        until(lambda: server.started, "the start")
        yield run
    finally:
        for opened in run.opened:
            opened.close()
        if not server.should_exit:
            server.handle_exit(signal.SIGTERM, None)
        run.thread.join(PATIENCE_S)
        assert not run.thread.is_alive()


# Slow clients


def test_headers_that_never_come_close_the_connection() -> None:
    with running(client_timeout=0.1) as run:
        assert received(run.connect()) == b""
        assert received(run.connect(body=b"GET /health HT")) == b""
        assert run.is_well()


@pytest.mark.parametrize("num_bytes", [0, 1])
def test_an_answer_that_is_hardly_read_is_given_up(num_bytes: int) -> None:
    small = Small()
    with running(small, client_timeout=0.2) as run:
        connection = run.connect("GET /large")

        def has_ended() -> bool:
            with suppress(ConnectionError):
                connection.recv(num_bytes)
            return small.ended == ["/large"]

        until(has_ended, "the answer's end")
        until(lambda: run.num_connections == 0, "the connection's end")
        assert run.is_well()


# Rude clients


def test_more_connections_than_allowed_are_refused() -> None:
    with running(max_connections=2) as run:
        run.connect("GET /health")
        run.connect("GET /health")
        until(lambda: run.num_connections == 2, "two connections")
        assert status(received(run.connect("GET /health"))) == 503
        run.opened[0].close()
        until(lambda: run.num_connections == 1, "one connection")
        assert run.is_well()


def test_a_body_that_breaks_midway_ends_the_request() -> None:
    small = Small()
    with running(small) as run:
        chunked = run.connect(
            "POST /v1/echo/x", "Transfer-Encoding: chunked", body=b"2\r\nab\r\nnonsense\r\n"
        )
        assert status(received(chunked)) == 400
        assert run.is_well() and small.seen == []
        until(lambda: not run.server.server_state.tasks, "the request's end")


def test_a_body_that_is_refused_and_never_ends_is_cut_off() -> None:
    with running(max_body=1024, client_timeout=0.1) as run:
        connection = run.connect("POST /v1/echo/x", f"Content-Length: {2**40}", body=bytes(1000))
        assert connection.recv(65536).startswith(b"HTTP/1.1 413")
        with pytest.raises(ConnectionError):
            for _ in range(round(PATIENCE_S / 0.02)):
                connection.sendall(b"more")
                time.sleep(0.02)


def test_clients_that_vanish_leave_nothing_behind() -> None:
    small = Small()
    with running(small) as run:
        for i in range(60):
            body = (b"{}", b"{", b"")[i % 3]
            run.connect("POST /v1/stream", "Content-Length: 2", body=body)
            if i % 2:  # reset rather than closed
                run.opened[-1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            run.opened[-1].close()
        until(lambda: run.num_connections == 0, "the connections' end")
        assert run.is_well()
        until(lambda: not run.server.server_state.tasks, "the requests' end")


# Beginning and ending


def test_who_comes_before_the_server_has_started_waits() -> None:
    """As while the models are being loaded."""
    ready: list[bool] = []
    server = Server(guarded(), ServeSettings(), ready=lambda: ready.append(True))
    run = Running(server, bind("127.0.0.1", 0))
    early = run.connect("GET /health", "Connection: close")
    assert ready == []
    run.thread.start()
    assert received(early).endswith(b"ok") and ready == [True]
    early.close()
    run.server.handle_exit(signal.SIGTERM, None)
    run.thread.join(PATIENCE_S)


def test_draining_lets_running_requests_end_and_accepts_nothing_new() -> None:
    drained: list[float] = []
    release = asyncio.Event()
    small = Small()

    async def drain(timeout_s: float) -> None:
        drained.append(timeout_s)
        await asyncio.sleep(0.2)
        release.set()

    @small.app.post("/v1/held")
    async def held() -> str:
        await release.wait()
        return "whole"

    with running(small, drain, drain_timeout=7) as run:
        connection = run.connect("POST /v1/held", "Content-Length: 0")
        idle = run.connect("GET /health")
        until(lambda: len(run.server.server_state.tasks) == 1 and run.num_connections == 2, "the request")
        run.server.handle_exit(signal.SIGTERM, None)
        until(lambda: drained == [7.0], "the draining")
        with pytest.raises(ConnectionError):
            run.connect()
        assert received(connection).endswith(b'"whole"')
        assert received(idle).startswith(b"HTTP/1.1 200")


# Sockets


def test_all_addresses_of_a_name_have_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(_host: str, port: int, **_: object) -> list[Any]:
        hosts = ("127.0.0.2", "127.0.0.1", "203.0.113.1")  # the last is not an address of this machine
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in hosts]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    sockets = bind("localhost", 0)
    addresses = [opened.getsockname() for opened in sockets]
    for opened in sockets:
        opened.close()
    assert [host for host, _ in addresses] == ["127.0.0.1", "127.0.0.2"]
    assert len({port for _, port in addresses}) == 1


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "https://127.0.0.1"), ("::1", "https://[::1]")])
def test_addresses_as_people_type_them(host: str, shown: str) -> None:
    try:
        [opened] = bind(host, 0)
    except SettingError:
        pytest.skip("a machine without IPv6")
    with opened:
        assert address_of([opened], tls=True) == f"{shown}:{opened.getsockname()[1]}"


# TLS


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate, its key, the key under a passphrase, and another key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates, and is not there")
    folder = tmp_path_factory.mktemp("tls")
    for line in (
        "req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 2 -subj /CN=127.0.0.1"
        " -addext subjectAltName=IP:127.0.0.1",
        "genpkey -algorithm RSA -pkeyopt rsa_keygen_bits:2048 -out other.pem",
        "rsa -aes256 -in key.pem -out secret.pem -passout pass:words",
    ):
        subprocess.run(["openssl", *line.split()], cwd=folder, check=True, capture_output=True)
    return folder


def test_https(pems: Path) -> None:
    check_tls(pems / "cert.pem", pems / "key.pem")
    with running(tls_cert=pems / "cert.pem", tls_key=pems / "key.pem") as run:
        context = ssl.create_default_context(cafile=pems / "cert.pem")
        with urlopen(f"https://127.0.0.1:{run.port}/health", context=context) as answer:
            assert answer.read() == b"ok"
        assert b"HTTP/1.1 200" not in received(run.connect("GET /health", "Connection: close"))


@pytest.mark.parametrize(
    ("cert", "key", "reason"),
    [
        ("none.pem", "key.pem", "no such file or directory"),
        ("cert.pem", "other.pem", "key values mismatch"),
        ("cert.pem", "secret.pem", ""),
        ("key.pem", "key.pem", ""),
    ],
)
def test_files_that_are_of_no_use_are_named(pems: Path, cert: str, key: str, reason: str) -> None:
    with pytest.raises(SettingError) as error:
        check_tls(pems / cert, pems / key)
    said = f"{pems}/{cert}, {pems}/{key}: certificate and key do not work ({reason}"
    assert str(error.value).startswith(said)
