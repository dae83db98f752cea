"""What gets through to the server's application, how the rest is refused, and what each API key may use."""

import asyncio
import hmac
import json
import logging
import math
import re
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr
from starlette.types import ASGIApp, Message

from guarded import LONG_S, Small, client, guarded
from outrider.core.errors import SettingError
from outrider.core.notices import collect_notices
from outrider.server.assembly import log_to_stderr, protect
from outrider.server.errors import Problem
from outrider.server.keys import ApiKey, Bucket, Caller, KeyRing, RateLimiter, digest_of, key_ring, read_keys
from outrider.server.settings import ServeSettings

ANNA, BEN, EVE = "anna-anna-anna-anna", "ben-ben-ben-ben-ben-ben", "eve-eve-eve-eve-eve-eve"


def owned(name: str, key: str, **limits: Any) -> ApiKey:
    return ApiKey(name=name, sha256=digest_of(key), **limits)


def ring(**limits: Any) -> KeyRing:
    return KeyRing([owned("anna", ANNA, **limits), owned("ben", BEN, admin=True)])


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


class Exchange:
    """One request, driven by hand: what the application asks for comes from a list, or never."""

    def __init__(self, app: ASGIApp, path: str, messages: Iterable[Message]) -> None:
        self.sent: list[Message] = []
        self._messages = list(messages)
        self._app = app
        headers = [(b"host", b"127.0.0.1")]
        given = {"method": "POST", "path": path, "query_string": b"", "headers": headers}
        self._scope = {"type": "http", **given}

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
    [("abc-1.2_3", True), ("x" * 64, True), *((bad, False) for bad in ("x" * 65, "a b", "a\x7fb", ""))],
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
    asks = client(
        protect(Small().app, ServeSettings(), ring(), observe_error=lambda *one: counted.append(one))
    )
    asks.post("/v1/echo/x")
    asks.get("/health", headers={"host": "evil.example"})
    assert counted == [(401, "missing_api_key"), (421, "unknown_host")]


# Keys, where they come from, and what each may use


def file(folder: Path, text: str, name: str = "keys.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    return path


class Hands:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def limiter(clock: Hands, **limits: int) -> RateLimiter:
    return RateLimiter(owned("anna", ANNA, **limits), clock)


def test_a_key_is_found_by_itself_alone() -> None:
    ring = KeyRing([owned("anna", ANNA), owned("ben", BEN)])
    assert [key and key.name for key in map(ring.find, (ANNA, BEN, EVE, "", ANNA[:-1], f"{ANNA} "))] == [
        "anna", "ben", None, None, None, None,
    ]  # fmt: skip
    assert ring and not KeyRing()
    assert KeyRing().find(ANNA) is None


@pytest.mark.parametrize("presented", [ANNA, BEN, EVE])
def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch, presented: str) -> None:
    compared: list[tuple[str, str]] = []
    genuine = hmac.compare_digest

    def counting(ours: str, theirs: str) -> bool:
        compared.append((ours, theirs))
        return genuine(ours, theirs)

    ring = KeyRing([owned("anna", ANNA), owned("ben", BEN), owned("c", "c" * 20)])
    monkeypatch.setattr(hmac, "compare_digest", counting)
    ring.find(presented)
    assert compared == [(key.sha256, digest_of(presented)) for key in ring.keys]


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ([("anna", ANNA), ("anna", BEN)], "API key anna: two keys have this name"),
        ([("anna", ANNA), ("ben", ANNA)], "API key ben: it is the same key as anna"),
    ],
)
def test_two_users_are_two_keys(keys: list[tuple[str, str]], complaint: str) -> None:
    with pytest.raises(SettingError, match=complaint):
        KeyRing([owned(name, key) for name, key in keys])


def test_keys_of_the_settings_are_their_owners() -> None:
    ring = key_ring(ServeSettings(api_key=[SecretStr(ANNA)]))
    assert list(ring.keys) == [owned("default", ANNA, admin=True)]
    ring = key_ring(ServeSettings(api_key=[SecretStr(ANNA), SecretStr(BEN)]))
    assert [key.name for key in ring.keys] == ["default-1", "default-2"]


def test_a_toml_file_of_keys(tmp_path: Path) -> None:
    path = file(
        tmp_path,
        f'''
        [[key]]
        name = "anna"
        key = "{ANNA}"
        requests_per_minute = 10
        tokens_per_minute = 1000
        concurrency = 2
        admin = true
        [[key]]
        name = "ben"
        sha256 = "{digest_of(BEN).upper()}"
        ''',
    )
    with collect_notices() as notices:
        ring = key_ring(ServeSettings(api_keys=path))
    assert ring.keys == (
        owned("anna", ANNA, requests_per_minute=10, tokens_per_minute=1000, concurrency=2, admin=True),
        owned("ben", BEN),
    )
    assert notices == []


def test_a_file_that_others_can_read_is_mentioned(tmp_path: Path) -> None:
    path = file(tmp_path, f'[[key]]\nname = "anna"\nkey = "{ANNA}"\n')
    path.chmod(0o644)
    with collect_notices() as notices:
        key_ring(ServeSettings(api_keys=path))
    assert "others on this machine can read the keys" in notices[0] and ANNA not in notices[0]
    path.write_text(f'[[key]]\nname = "anna"\nsha256 = "{"0" * 64}"\n')
    with collect_notices() as notices:
        key_ring(ServeSettings(api_keys=path))
    assert notices == []


def record(fields: str) -> str:
    return f'[[key]]\nname = "anna"\n{fields}\n'


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "key: it is missing"),
        ("key = []", "key: it has to be an array with at least 1 item"),
        ("[[key]", "it is not valid TOML"),
        ("[key]\nname = 'a'", "key: it has to be an array"),
        ("keys = 3\n" + record(f'key = "{ANNA}"'), "keys: it is not known"),
        (record(""), "key[1].sha256: it is missing"),
        (record(f'key = "{ANNA}"\nsha256 = "{"0" * 64}"'), "key[1]: it has both"),
        (record('key = "short"'), "key[1]: a key has 16 to 512 characters"),
        (record(f'key = "{ANNA} {ANNA}"'), "key[1]: a key is printable ASCII"),
        (record(f'key = "{ANNA}ä"'), "key[1]: a key is printable ASCII"),
        (record('sha256 = "12"'), "key[1].sha256: it has to be text with pattern"),
        (record(f'key = "{ANNA}"\nconcurrency = 0'), "key[1].concurrency: it has to be 1 or more"),
        (record(f'key = "{ANNA}"\nconcurrency = "2"'), "key[1].concurrency: it has to be a whole number"),
        (record(f'key = "{ANNA}"\ntokens = 2'), "key[1].tokens: it is not known"),
        (f'[[key]]\nkey = "{ANNA}"\n', "key[1].name: it is missing"),
        (
            record(f'key = "{ANNA}"').replace("anna", "an na", 1),
            "key[1].name: it has to be text with pattern",
        ),
        (record("key = 3"), "key[1]: a key is printable ASCII"),
    ],
)
def test_a_file_of_keys_that_is_wrong_is_named_without_the_key(
    tmp_path: Path, text: str, complaint: str
) -> None:
    path = file(tmp_path, text)
    with pytest.raises(SettingError) as error:
        read_keys(path)
    assert str(error.value).removeprefix(str(path)).lstrip(":, ").startswith(complaint)
    assert ANNA not in str(error.value)


@given(
    per_minute=st.integers(1, 1000),
    tries=st.lists(st.tuples(st.floats(0, 50), st.integers(1, 1000)), max_size=60),
)
def test_no_minute_has_more_than_a_full_bucket_and_what_flows_in(
    per_minute: int, tries: list[tuple[float, int]]
) -> None:
    clock = Hands()
    bucket = Bucket(per_minute, clock)
    taken: list[tuple[float, int]] = []
    for pause_s, amount in tries:
        clock.now_s += pause_s
        wait_s = bucket.wait_s(amount)
        assert math.isinf(wait_s) == (amount > per_minute)
        if wait_s == 0:
            bucket.take(amount)
            taken.append((clock.now_s, amount))
    for i, (start_s, _) in enumerate(taken):
        for j in range(i, len(taken)):
            used = sum(amount for _, amount in taken[i : j + 1])
            assert used <= per_minute * (1 + (taken[j][0] - start_s) / 60) + 1e-6


@given(per_minute=st.integers(1, 1000), used=st.integers(0, 5000), amount=st.integers(1, 1000))
def test_who_waits_as_long_as_told_is_served(per_minute: int, used: int, amount: int) -> None:
    clock = Hands()
    bucket = Bucket(per_minute, clock)
    bucket.take(used)
    wait_s = bucket.wait_s(amount)
    if math.isfinite(wait_s):
        clock.now_s += wait_s + 1e-6
        assert bucket.wait_s(amount) == 0


def refused(act: Callable[[], object]) -> Problem:
    with pytest.raises(Problem) as error:
        act()
    assert (error.value.status, error.value.code) == (429, "rate_limit_exceeded")
    return error.value


def test_requests_a_minute() -> None:
    clock = Hands()
    meter = limiter(clock, requests_per_minute=2)
    for _ in range(2):
        with meter.request():
            pass
    error = refused(meter.request().__enter__)
    assert error.type == "requests" and error.headers == {"Retry-After": "30"}
    clock.now_s += 29
    assert refused(meter.request().__enter__).headers == {"Retry-After": "1"}
    clock.now_s += 1.01
    with meter.request():
        pass


def test_tokens_are_reserved_ahead_and_corrected_after() -> None:
    clock = Hands()
    meter = limiter(clock, tokens_per_minute=100)
    caller = Caller(meter)
    with caller.reserved(30, 50) as bill:
        error = refused(caller.reserved(10, 11).__enter__)
        assert error.type == "tokens" and error.headers == {"Retry-After": "1"}
        bill.prompt_tokens = 30
        bill.completion_tokens += 5
    assert meter.tokens is not None and meter.tokens.level == 65
    assert (caller.used.prompt_tokens, caller.used.completion_tokens) == (30, 5)
    refused(caller.reserved(60, 6).__enter__)
    with caller.reserved(60, 5):
        pass  # it never ran: nothing is charged
    assert meter.tokens.level == 65


def test_an_answer_of_unknown_length_may_overdraw_and_later_ones_wait() -> None:
    clock = Hands()
    meter = limiter(clock, tokens_per_minute=100)
    caller = Caller(meter)
    with caller.reserved(50, 4000) as bill:
        bill.prompt_tokens, bill.completion_tokens = 50, 150
    assert refused(caller.reserved(1, 1).__enter__).headers == {"Retry-After": "62"}
    clock.now_s += 61.3
    with caller.reserved(1, 1):
        pass


def test_a_prompt_that_never_fits_is_refused_for_good() -> None:
    caller = Caller(limiter(Hands(), tokens_per_minute=100))
    error = refused(caller.reserved(101, 1).__enter__)
    assert error.headers == {"X-Should-Retry": "false"} and "101 tokens" in error.message


def test_without_limits_nothing_is_refused() -> None:
    caller = Caller()
    assert caller.name == ""
    with caller.reserved(10**9, 10**9) as bill:
        bill.completion_tokens = 7
    assert caller.used.completion_tokens == 7
