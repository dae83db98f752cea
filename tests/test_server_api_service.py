"""What routes share: who asks, and what is counted."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.core.data import Completion, Update
from outrider.costs import CallCosts
from outrider.costs.curve import CallPoint
from outrider.policy.auto import AutoPolicy
from outrider.server.assembly import create_app
from outrider.server.keys import ApiKey, Caller, RateLimiter, digest_of
from outrider.server.page import page
from outrider.server.service import Service
from serving import Serving, serving, tiny_session, user

CHAT = "/v1/chat/completions"


class Counted:
    """Stands where the metrics stand."""

    def __init__(self) -> None:
        self.completions: list[tuple[Completion, str]] = []
        self.errors: list[tuple[int, str]] = []

    def observe_request(
        self, completion: Completion, *, queued_s: float = 0.0, key: str = "", speedup: float | None = None
    ) -> None:
        assert queued_s >= 0 and speedup is None
        self.completions.append((completion, key))

    def observe_steps(self, updates: Sequence[Update]) -> None: ...

    def observe_error(self, status: int, code: str) -> None:
        self.errors.append((status, code))

    def render(self, accept: str = "") -> tuple[bytes, str]:
        return f"asked for {accept}".encode(), "text/plain; version=0.0.4"


class Known:
    """Every request comes from this caller."""

    def __init__(self, app: ASGIApp, caller: Caller) -> None:
        self._app = app
        self._caller = caller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["caller"] = self._caller
        await self._app(scope, receive, send)


@pytest.fixture
def meter() -> Counted:
    return Counted()


@pytest.fixture
def served(meter: Counted) -> Iterator[Serving]:
    with serving(metrics=meter) as running:
        yield running


def client_of(served: Serving, name: str, **limits: Any) -> tuple[TestClient, Caller, RateLimiter]:
    meter = RateLimiter(ApiKey(name=name, sha256=digest_of(name), **limits))
    caller = Caller(meter)
    return TestClient(Known(served.app, caller)), caller, meter


def test_prompts_are_not_reused_across_keys(served: Serving) -> None:
    body = {"messages": user("Say [[abcdefghijklmnopqrstuvwxyz]]")}
    ours, others = client_of(served, "ours")[0], client_of(served, "others")[0]

    def cached(client: TestClient) -> Any:
        return client.post(CHAT, json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(ours) == 0
    assert cached(ours) > 20
    assert cached(others) == 0
    assert cached(ours) > 20


def test_a_key_pays_for_what_it_got(served: Serving) -> None:
    client, caller, meter = client_of(served, "ours", tokens_per_minute=1_000)
    body = {"messages": user("Say [[abcdef]]"), "max_tokens": 100, "n": 2}
    usage = client.post(CHAT, json=body).json()["usage"]
    assert caller.used.completion_tokens == usage["completion_tokens"] == 14
    assert caller.used.prompt_tokens == 2 * usage["prompt_tokens"]  # each choice reads it
    assert meter.tokens is not None
    assert round(meter.tokens.level) in range(
        1_000 - 14 - caller.used.prompt_tokens, 1_000 - caller.used.prompt_tokens
    )
    refused = client.post(CHAT, json=body | {"max_tokens": 990, "n": 1})
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert served.idle()


def test_what_ends_is_counted_with_its_key(served: Serving, meter: Counted) -> None:
    client = client_of(served, "ours")[0]
    client.post(CHAT, json={"messages": user("Say [[abc]]"), "n": 2})
    client.post("/v1/responses", json={"input": "Say [[abc]]", "stream": True})
    assert [(completion.text, key) for completion, key in meter.completions] == [("abc", "ours")] * 3
    assert meter.errors == []


def test_errors_are_counted(served: Serving, meter: Counted) -> None:
    served.post(CHAT, messages=[])
    served.client.get("/nowhere")
    served.model.fail_from_call = 2
    served.post(CHAT, messages=user("Say [[abc]]"), stream=True)
    assert meter.errors == [(400, "invalid_value"), (404, "not_found"), (500, "backend_error")]


def test_metrics_are_shown(served: Serving) -> None:
    for path in ("/metrics", "/health"):  # as benchmarks find out what there is
        assert served.client.head(path).status_code == 200
    shown = served.client.get("/metrics", headers={"accept": "text/x"})
    assert (shown.text, shown.headers["content-type"]) == ("asked for text/x", "text/plain; version=0.0.4")


def test_the_page_is_at_the_root(served: Serving) -> None:
    assert served.client.get("/").status_code == 404
    shown = TestClient(create_app(served.service, page=True)).get("/")
    assert (shown.content, shown.headers["content-type"]) == (page().body, "text/html; charset=utf-8")


def test_a_bug_is_an_error_of_the_server(served: Serving, meter: Counted) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    served.service.noticed = broken  # type: ignore[assignment,method-assign]
    response = served.post(CHAT, messages=user("hi"))
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "ZeroDivision" not in response.text
    assert meter.errors == [(500, "internal_error")]


def test_costs_and_the_speedup_are_said() -> None:
    costs = CallCosts([CallPoint(n, 0.001 + 0.0001 * n) for n in (1, 2, 4, 8, 16, 32)])
    with serving(policy=AutoPolicy(costs), call_s=0.002) as served:
        status = served.client.get("/outrider/status").json()
        assert len(status["calls_s"]) == 32 and status["calls_s"] == sorted(status["calls_s"])
        assert status["plain_token_s"] == status["calls_s"][0] == pytest.approx(0.0011)
        assert status["policy"] == "auto"
        account = served.post(CHAT, messages=user("Say [[one two one two one two]]")).json()["outrider"]
        estimate = account["estimated_speedup"]
        # Whether so short an answer shows it depends on the clock: it is a number or a reason.
        assert (estimate is None) == isinstance(account["estimated_speedup_unknown"], str)
        assert estimate is None or estimate["low"] < estimate["speedup"] < estimate["high"]
        assert account["policy"] == "auto"


def test_a_notice_goes_when_its_cause_goes() -> None:
    with tiny_session() as (session, _):
        session.notices = ["measured on a busy machine", "no draft model"]
        service = Service(session)
        client = TestClient(create_app(service))
        assert client.get("/outrider/status").json()["notices"] == session.notices
        session.notices = ["no draft model", "schema: an answer's own"]
        assert client.get("/outrider/status").json()["notices"] == ["no draft model"]
        service.close()
