"""A stand-in for the Hugging Face hub: the few HTTP answers that its client needs, on loopback."""

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import unquote, urlsplit

TOKEN = "hf_open_sesame"


@dataclass
class Repository:
    """A repository's files, and who may see them."""

    files: dict[str, bytes]
    access: str = "public"
    """"public", "private" (hidden without TOKEN) or "gated" (listed, refused without TOKEN)"""

    @property
    def commit(self) -> str:
        """A commit id that changes when a file does."""
        content = "".join(f"{name}{_sha256(data)}" for name, data in sorted(self.files.items()))
        return hashlib.sha1(content.encode()).hexdigest()


@dataclass(frozen=True)
class Asked:
    """A request that came in. `from_byte` is where its range starts, None without one."""

    method: str
    path: str
    from_byte: int | None
    token: str | None


@dataclass
class Hub:
    """The stand-in: what it holds, what it was asked, and the tricks it plays.

    `interrupt` is called once, after `interrupt_after` bytes of a download were sent, and then
    the connection breaks. `status` answers everything.
    """

    endpoint: str
    repositories: dict[str, Repository]
    asked: list[Asked] = field(default_factory=list)
    interrupt: Callable[[], None] | None = None
    interrupt_after: int = 0
    status: int | None = None

    def downloads(self) -> list[Asked]:
        """The requests for a file's content."""
        return [asked for asked in self.asked if asked.method == "GET" and "/resolve/" in asked.path]


@contextmanager
def serve(repositories: dict[str, Repository]) -> Iterator[Hub]:
    """Run a hub that holds `repositories` until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_port}", repositories)
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    errors: ClassVar = {"GatedRepo": 403, "RepoNotFound": 401, "EntryNotFound": 404, "RevisionNotFound": 404}

    @property
    def hub(self) -> Hub:
        return self.server.hub  # type: ignore[attr-defined,no-any-return]

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *args: object) -> None:
        """Say nothing: the tests read `Hub.asked`."""

    def _answer(self) -> None:
        path, token = unquote(urlsplit(self.path).path), self.headers.get("Authorization")
        span = re.match(r"bytes=(\d+)-", self.headers.get("Range") or "")
        token = token.removeprefix("Bearer ") if token else None
        self.hub.asked.append(Asked(self.command, path, int(span[1]) if span else None, token))
        listing = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path)
        content = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        match = listing or content
        repository = self.hub.repositories.get(match[1]) if match else None
        hidden = repository and repository.access == "private" and token != TOKEN
        if self.hub.status:
            self._send(self.hub.status, {}, b"")
        elif match is None or repository is None or hidden:
            self._refuse("RepoNotFound")
        elif match[2] not in (None, "main", repository.commit):
            self._refuse("RevisionNotFound")
        elif listing:
            self._list(match[1], repository)
        elif repository.access == "gated" and token != TOKEN:
            self._refuse("GatedRepo")
        elif match[3] not in repository.files:
            self._refuse("EntryNotFound", {"X-Repo-Commit": repository.commit})
        else:
            self._deliver(repository, repository.files[match[3]], int(span[1]) if span else 0)

    def _list(self, name: str, repository: Repository) -> None:
        siblings = [{"rfilename": file, "size": len(data)} for file, data in repository.files.items()]
        body = json.dumps({"id": name, "sha": repository.commit, "siblings": siblings, "tags": []})
        self._send(200, {"Content-Type": "application/json"}, body.encode())

    def _refuse(self, code: str, headers: dict[str, str] | None = None) -> None:
        self._send(self.errors[code], {"X-Error-Code": code, **(headers or {})}, b"")

    def _deliver(self, repository: Repository, data: bytes, start: int) -> None:
        headers = {"ETag": f'"{_sha256(data)}"', "X-Repo-Commit": repository.commit, "Accept-Ranges": "bytes"}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._send(206 if start else 200, headers, data[start:])

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        interrupt = self.hub.interrupt
        if interrupt is not None and len(body) > self.hub.interrupt_after:
            self.hub.interrupt = None
            self.wfile.write(body[: self.hub.interrupt_after])
            self.wfile.flush()
            interrupt()
            self.close_connection = True
            return
        self.wfile.write(body)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
