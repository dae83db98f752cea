"""From which names and pages the server may be used: a page from elsewhere must not reach it by stealth.

A name that an attacker owns can be pointed at 127.0.0.1 (DNS rebinding): so a server on loopback answers
only to names of loopback. And a page may send requests to any address, though it cannot read the answers:
so what names another page's origin is refused, unless that origin is allowed.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.server.problems import Problem
from outrider.server.settings import is_loopback

__all__ = ["HostCheck"]


class HostCheck:
    """Refuses foreign names and origins.

    `host` is where the server listens, `allowed_hosts` are further names of it, `origins` those of
    pages that may use it ("*": all). Beyond loopback names are checked only if some are given.
    """

    def __init__(
        self, app: ASGIApp, host: str, allowed_hosts: Collection[str] = (), origins: Collection[str] = ()
    ) -> None:
        self._app = app
        self._names = {name.lower() for name in (host.strip("[]"), *allowed_hosts)}
        self._named = {name.lower() for name in allowed_hosts}
        self._origins = {origin.lower() for origin in origins}
        self._checks_names = is_loopback(host) or bool(allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on. Raises Problem."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            self._check_host(headers.get("host"))
            self._check_origin(headers.get("origin"), headers.get("host"))
        await self._app(scope, receive, send)

    def _check_host(self, host: str | None) -> None:
        # Without the header it is no browser that asks, and only browsers can be misled.
        if host is None or not self._checks_names:
            return
        name = _hostname(host)
        if name is None or (name not in self._names and not is_loopback(name)):
            message = (
                f"the host {host[:100]!r} is none of this server's names. Use its address, or start it with "
                "--allowed-host and this name."
            )
            raise Problem(421, message, code="unknown_host")

    def _check_origin(self, origin: str | None, host: str | None) -> None:
        if origin is None or "*" in self._origins or origin.lower() in self._origins:
            return
        place = origin.partition("://")[2].lower()
        if place and (place == (host or "").lower() or _hostname(place) in self._named):
            return
        message = (
            f"pages of {origin[:100]!r} may not use this server. Start it with --cors-origin and this origin "
            "if they should."
        )
        raise Problem(403, message, code="cross_origin")


def _hostname(host: str) -> str | None:
    """The name of a Host header, without the port; None where it is none."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
