"""What gets through to the server's application, and how the rest is refused."""

import asyncio
import json
import logging
import re
from collections.abc import Coroutine, Iterable
from typing import Any

import pytest
from starlette.types import ASGIApp, Message

from guarded import LONG_S, Small, client, guarded
from outrider.server.guard import protect
from outrider.server.keys import ApiKey, KeyRing, digest_of
from outrider.server.logs import log_to_stderr
from outrider.server.settings import ServeSettings

ANNA, BEN = "anna-anna-anna-anna", "ben-ben-ben-ben-ben-ben"


def ring(**limits: Any) -> KeyRing:
    anna = ApiKey(name="anna", sha256=digest_of(ANNA), **limits)
    return KeyRing([anna, ApiKey(name="ben", sha256=digest_of(BEN), admin=True)])


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def check_problem(response: Any, status: int, code: str) -> str:
    """The refusal's message; its shape is OpenAI's."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert "x-request-id" in response.headers
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    return str(error["message"])


# Keys


def test_a_key_opens_and_its_name_gets_through() -> None:
    asks = client(guarded(ring()))
    for headers in (bearer(ANNA), {"x-api-key": ANNA}, {"Authorization": f"bearer  {ANNA}"}):
        assert asks.post("/v1/echo/x", headers=headers, content=b"12").json() == {
            "caller": "anna",
            "bytes": 2,
        }


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "missing_api_key"),
        ({"Authorization": "Basic YTpi"}, "missing_api_key"),
        ({"Authorization": "Bearer "}, "invalid_api_key"),
        (bearer(ANNA[:-1]), "invalid_api_key"),
        (bearer("anna"), "invalid_api_key"),
        ({"x-api-key": ANNA.upper()}, "invalid_api_key"),
        ({"Authorization": "Bearer wrong", "x-api-key": ANNA}, "invalid_api_key"),
    ],
)
def test_without_an_accepted_key_nothing_gets_through(headers: dict[str, str], code: str) -> None:
    small = Small()
    asks = client(guarded(ring(), small))
    response = asks.post("/v1/echo/x", headers=headers, content=b"12")
    message = check_problem(response, 401, code)
    assert response.headers["www-authenticate"] == "Bearer"
    assert small.seen == [] and ANNA not in message
    assert asks.get("/nowhere").status_code == 401


@pytest.mark.parametrize(
    ("path", "settings", "statuses"),
    [
        ("/health", {}, (200, 200, 200)),
        ("/", {}, (200, 200, 200)),
        ("/", {"page": False}, (401, 200, 200)),
        ("/metrics", {}, (401, 403, 200)),
        ("/metrics", {"metrics_open": True}, (200, 200, 200)),
    ],
)
def test_what_is_open_to_nobody_to_keys_and_to_admins(
    path: str, settings: dict[str, Any], statuses: tuple[int, ...]
) -> None:
    asks = client(guarded(ring(), **settings))
    found = tuple(asks.get(path, headers=headers).status_code for headers in ({}, bearer(ANNA), bearer(BEN)))
    assert found == statuses


@pytest.mark.parametrize(
    "path", ["//", "/health/", "/metrics/", "/HEALTH", "/health/../v1/echo/x", "/health?", ""]
)
def test_a_path_that_is_almost_open_is_not(path: str) -> None:
    exchange = Exchange(guarded(ring(), metrics_open=True), path, [WHOLE])
    drive(exchange.run())
    assert (exchange.status, exchange.code) == (401, "missing_api_key")


# Limits of a key


def test_requests_a_minute_are_limited_and_named() -> None:
    asks = client(guarded(ring(requests_per_minute=2)))
    for _ in range(2):
        assert asks.post("/v1/echo/x", headers=bearer(ANNA)).status_code == 200
    refused = asks.post("/v1/echo/x", headers=bearer(ANNA))
    check_problem(refused, 429, "rate_limit_exceeded")
    assert refused.json()["error"]["type"] == "requests"
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert asks.get("/", headers=bearer(ANNA)).status_code == 200
    assert asks.post("/v1/echo/x", headers=bearer(BEN)).status_code == 200


def test_tokens_a_minute_are_limited_in_the_route() -> None:
    asks = client(guarded(ring(tokens_per_minute=100)))
    spend = "/v1/spend?prompt=40&longest=40&used={}"
    assert asks.post(spend.format(20), headers=bearer(ANNA)).status_code == 200
    refused = asks.post(spend.format(20), headers=bearer(ANNA))
    check_problem(refused, 429, "rate_limit_exceeded")
    assert refused.json()["error"]["type"] == "tokens"
    assert 1 <= int(refused.headers["retry-after"]) <= 24


class Exchange:
    """One request, driven by hand: what the application asks for comes from a list, or never."""

    def __init__(self, app: ASGIApp, path: str, messages: Iterable[Message] = (), **headers: str) -> None:
        self.sent: list[Message] = []
        self._messages = list(messages)
        self._app = app
        given = [
            (b"host", b"127.0.0.1"),
            *((k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()),
        ]
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": given,
        }

    async def run(self) -> None:
        await self._app(self._scope, self._receive, self._send)

    async def _receive(self) -> Message:
        if not self._messages:
            await asyncio.Event().wait()
        return self._messages.pop(0)

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int | None:
        return next((m["status"] for m in self.sent if m["type"] == "http.response.start"), None)

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.sent)

    @property
    def code(self) -> Any:
        return json.loads(self.body)["error"]["code"]

    def header(self, name: str) -> str | None:
        headers = {k: v for m in self.sent for k, v in m.get("headers", ())}
        return headers[name.encode()].decode() if name.encode() in headers else None


WHOLE: Message = {"type": "http.request", "body": b"{}", "more_body": False}
PART: Message = {"type": "http.request", "body": b"x" * 1000, "more_body": True}
LEFT: Message = {"type": "http.disconnect"}


def drive(work: Coroutine[Any, Any, None]) -> None:
    """Run it to its end, which must come."""
    asyncio.run(asyncio.wait_for(work, LONG_S))


# Bodies and times


def test_a_body_of_the_largest_size_gets_through_in_one_piece() -> None:
    small = Small()
    asks = client(guarded(None, small, max_body=2000))
    assert asks.post("/v1/echo/x", content=iter([b"a" * 1999, b"b"])).json()["bytes"] == 2000
    assert small.seen == [b"a" * 1999 + b"b"]
    check_problem(asks.post("/v1/echo/x", content=iter([b"a" * 1999, b"bc"])), 413, "body_too_large")


def test_a_body_that_comes_too_slowly_is_cut_off() -> None:
    small = Small()
    exchange = Exchange(guarded(None, small, client_timeout=0.01), "/v1/echo/x", [PART])
    drive(exchange.run())
    assert (exchange.status, exchange.code, small.seen) == (408, "body_timeout", [])
    assert exchange.header("connection") == "close"


def test_a_client_that_leaves_midway_is_not_answered() -> None:
    small = Small()
    exchange = Exchange(guarded(None, small), "/v1/echo/x", [PART, LEFT])
    drive(exchange.run())
    assert exchange.sent == [] and small.seen == []


def test_a_body_that_is_compressed_is_refused() -> None:
    response = client(guarded()).post("/v1/echo/x", content=b"", headers={"content-encoding": "gzip"})
    check_problem(response, 415, "unsupported_encoding")


def test_a_request_that_takes_too_long_is_ended() -> None:
    small = Small()
    response = client(guarded(None, small, timeout=0.05)).post("/v1/slow")
    check_problem(response, 504, "timeout")
    assert response.headers["x-should-retry"] == "false"
    assert small.ended == ["/v1/slow"]


def test_a_stream_that_takes_too_long_ends_with_an_event_that_says_so() -> None:
    small = Small()
    response = client(guarded(None, small, timeout=0.05)).post("/v1/stream")
    first, last = response.text.strip().split("\n\n")
    assert first == "data: first"
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
    assert small.ended == ["/v1/stream"]


def test_another_answer_that_takes_too_long_stays_without_its_end() -> None:
    small = Small()
    exchange = Exchange(guarded(None, small, timeout=0.05), "/v1/stream", [WHOLE])
    exchange._scope["query_string"] = b"kind=text/plain"
    drive(exchange.run())
    assert exchange.status == 200 and exchange.sent[-1]["more_body"] is True
    assert small.ended == ["/v1/stream"]


def test_a_timeout_of_the_applications_own_is_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    async def odd(*_: Any) -> None:
        raise TimeoutError("not ours")

    exchange = Exchange(protect(odd, ServeSettings(), KeyRing()), "/", [WHOLE])
    drive(exchange.run())
    assert (exchange.status, exchange.code) == (500, "internal_error")
    assert "not ours" in caplog.text


# Names and origins


@pytest.mark.parametrize(
    ("host", "settings", "is_served"),
    [
        ("127.0.0.1:8080", {}, True),
        ("localhost", {}, True),
        ("LOCALHOST:1", {}, True),
        ("[::1]:8080", {}, True),
        ("evil.example", {}, False),
        ("127.0.0.1.evil.example", {}, False),
        ("evil.example@127.0.0.1", {}, False),
        ("127.0.0.1/evil.example", {}, False),
        ("localhost.evil.example:8080", {}, False),
        *((name, {}, False) for name in ("[", "[::1", "a]b", "x:y:z", "a" * 5_000, "@", "/")),
        ("llm.example", {"allowed_host": ["llm.example"]}, True),
        ("127.0.0.1", {"allowed_host": ["llm.example"]}, True),
        ("evil.example", {"host": "0.0.0.0", "no_auth": True}, True),
        ("evil.example", {"host": "0.0.0.0", "no_auth": True, "allowed_host": ["llm.example"]}, False),
        ("LLM.example:443", {"host": "0.0.0.0", "no_auth": True, "allowed_host": ["llm.example"]}, True),
    ],
)
def test_only_names_of_the_server_are_answered(host: str, settings: dict[str, Any], is_served: bool) -> None:
    response = client(guarded(None, **settings)).get("/health", headers={"host": host})
    if is_served:
        assert response.status_code == 200
    else:
        assert "--allowed-host" in check_problem(response, 421, "unknown_host")


@pytest.mark.parametrize(
    ("origin", "settings", "is_served"),
    [
        ("http://127.0.0.1:8080", {}, True),
        ("http://127.0.0.1:3000", {}, False),
        ("https://evil.example", {}, False),
        ("null", {}, False),
        ("", {}, False),
        ("https://a.example", {"cors_origin": ["https://a.example"]}, True),
        ("https://b.example", {"cors_origin": ["https://a.example"]}, False),
        ("http://a.example", {"cors_origin": ["https://a.example"]}, False),
        ("https://b.example", {"cors_origin": ["*"]}, True),
        ("https://llm.example", {"allowed_host": ["llm.example"]}, True),
    ],
)
def test_only_pages_of_the_server_may_use_it(origin: str, settings: dict[str, Any], is_served: bool) -> None:
    small = Small()
    response = client(guarded(None, small, **settings)).post("/v1/echo/x", headers={"origin": origin})
    allowed = response.headers.get("access-control-allow-origin")
    assert (allowed in (origin, "*")) == (is_served and "cors_origin" in settings)
    if is_served:
        assert response.status_code == 200
    else:
        assert "--cors-origin" in check_problem(response, 403, "cross_origin")
        assert small.seen == []


FORM = "application/x-www-form-urlencoded"


@pytest.mark.parametrize(
    ("body", "headers", "seen_as"),
    [
        (b'{"a": 1}', {}, None),
        (b' \n{"a"', {"content-type": "Application/X-WWW-Form-Urlencoded; charset=utf-8"}, None),
        (b"a=1", {}, FORM),
        (b"%7B%22a%22%3A1%7D", {}, FORM),  # a form's own text of {"a":1}
        (b'{"a": 1}', {"content-type": "text/plain"}, "text/plain"),
        (b'{"a": 1}', {"content-type": "multipart/form-data"}, "multipart/form-data"),
        (b'{"a": 1}', {"origin": "http://127.0.0.1:8080"}, FORM),
        (b'{"a": 1}', {"sec-fetch-site": "none"}, FORM),
        (b'{"a": 1}', {"sec-fetch-site": "cross-site"}, FORM),
        (b'{"a": 1}', {"origin": "https://a.example"}, FORM),
    ],
)
def test_json_that_curl_calls_a_form_has_no_type(
    body: bytes, headers: dict[str, str], seen_as: str | None
) -> None:
    """A page may send a form to any server without asking before: nothing of a browser is taken for JSON."""
    small = Small()
    asks = client(guarded(None, small, cors_origin=["https://a.example"]))
    assert asks.post("/v1/echo/x", content=body, headers={"content-type": FORM} | headers).status_code == 200
    assert (small.seen, small.kinds) == ([body], [seen_as])


def test_an_allowed_page_can_read_refusals_and_ask_beforehand() -> None:
    asks = client(guarded(ring(), cors_origin=["https://a.example"]))
    origin = {"origin": "https://a.example"}
    refused = asks.post("/v1/echo/x", headers=origin)
    check_problem(refused, 401, "missing_api_key")
    assert refused.headers["access-control-allow-origin"] == "https://a.example"
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    assert asks.options("/v1/echo/x", headers=origin | asked).status_code == 200
    assert asks.options("/v1/echo/x", headers=asked | {"origin": "https://b.example"}).status_code == 400


# What every answer carries


def test_headers_that_keep_browsers_in_check() -> None:
    for response in (client(guarded()).get("/health"), client(guarded(ring())).post("/v1/echo/x")):
        assert response.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert response.headers["x-frame-options"] == "DENY"
        assert response.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        ("abc-1.2_3", True),
        ("x" * 64, True),
        ("x" * 65, False),
        ("a b", False),
        ("a\x7fb", False),
        ("", False),
    ],
)
def test_request_ids(given: str, is_kept: bool) -> None:
    found = client(guarded()).get("/health", headers={"x-request-id": given}).headers["x-request-id"]
    assert found == given if is_kept else re.fullmatch(r"[0-9a-f]{32}", found)


# The log


def logged(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    fields: dict[str, Any] = vars(caplog.records[-1])["fields"]
    return fields


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    logging.getLogger("outrider").propagate = True
    caplog.set_level(logging.INFO, "outrider")
    return caplog


def test_the_log_has_route_key_and_tokens_but_nothing_that_was_written(log: pytest.LogCaptureFixture) -> None:
    asks = client(guarded(ring()))
    response = asks.post("/v1/echo/secret?q=secret", headers=bearer(ANNA), content=b"secret")
    fields = logged(log)
    assert (fields.pop("duration_s") >= 0) and fields.pop("id") == response.headers["x-request-id"]
    assert fields == {
        "method": "POST", "route": "/v1/echo/{name}", "status": 200, "key": "anna",
        "prompt_tokens": 0, "completion_tokens": 0,
    }  # fmt: skip
    asks.post("/v1/spend?prompt=3&longest=9&used=4", headers=bearer(ANNA))
    assert (logged(log)["prompt_tokens"], logged(log)["completion_tokens"]) == (3, 4)
    asks.get("/secret", headers=bearer("secret-secret-secret"))
    assert (logged(log)["status"], logged(log)["route"], logged(log)["key"]) == (401, "-", "")
    assert "secret" not in "".join(str(vars(record)) for record in log.records)


def test_a_client_that_leaves_is_logged_as_such(log: pytest.LogCaptureFixture) -> None:
    small = Small()
    exchange = Exchange(guarded(None, small), "/v1/stream", [WHOLE, LEFT])
    drive(exchange.run())
    assert logged(log)["client_left"] is True
    assert small.ended == ["/v1/stream"]


def test_a_defect_is_answered_and_logged_with_the_requests_id(log: pytest.LogCaptureFixture) -> None:
    response = client(guarded()).get("/fails")
    assert response.status_code == 500 and "a defect" not in response.text
    failed = next(record for record in log.records if record.exc_info)
    assert vars(failed)["fields"]["id"] == response.headers["x-request-id"]
    assert "a defect" in log.text


@pytest.mark.parametrize("as_json", [True, False])
def test_how_the_log_is_written(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    log_to_stderr(as_json=as_json)
    try:
        asks = client(guarded(log_prompts=True))
        asks.post("/v1/echo/x", content=b'two\nlines "and" more')
        asks.get("/fails")
        lines = capsys.readouterr().err.splitlines()
    finally:
        logging.getLogger("outrider").handlers = []
    if as_json:
        events = [json.loads(line) for line in lines]
        assert [event["event"] for event in events] == ["request", "failed", "request"]
        assert events[0]["body"] == 'two\nlines "and" more' and events[0]["status"] == 200
        assert "ValueError: a defect" in events[1]["exception"]
    else:
        assert "route=/v1/echo/{name} status=200" in lines[0]
        assert lines[0].endswith(r'body="two\nlines \"and\" more"')
        assert "ValueError: a defect" in lines[-2]


def test_refusals_are_counted() -> None:
    counted: list[tuple[int, str]] = []
    app = protect(
        Small().app,
        ServeSettings(),
        ring(),
        observe_error=lambda status, code: counted.append((status, code)),
    )
    asks = client(app)
    asks.post("/v1/echo/x")
    asks.get("/health", headers={"host": "evil.example"})
    assert counted == [(401, "missing_api_key"), (421, "unknown_host")]
