"""Chat completions, completions and the small endpoints, on a tiny model whose answers are given; who asks,
and what is counted."""

from collections.abc import Iterator
from typing import Any

import pytest
from openai.types import Completion as OpenAICompletion
from openai.types.chat import ChatCompletion
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from outrider.costs import CallCosts
from outrider.costs.curve import CallPoint
from outrider.policy.auto import AutoPolicy
from outrider.server.apis.chat import ChatRequest, plan_chat
from outrider.server.assembly import create_app
from outrider.server.keys import ApiKey, Caller, RateLimiter, digest_of
from outrider.server.page import page
from outrider.server.service import Service
from outrider.server.settings import ServeSettings
from serving import CHAT, RESPONSES, TEXT, Serving, events, serving, tiny_session, user

REPEATING = "one two three one two three one two three one two three"


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with serving() as running:
        yield running


def chat(served: Serving, text: str, **fields: Any) -> dict[str, Any]:
    """A whole answer to a message with `[[text]]` in it."""
    response = served.post(CHAT, messages=user(f"Say [[{text}]]"), **fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    ChatCompletion.model_validate(body)
    return body


def stream(served: Serving, text: str, **fields: Any) -> list[dict[str, Any]]:
    body = {"messages": user(f"Say [[{text}]]"), "stream": True, **fields}
    return events(served.post(CHAT, **body))


def complete(served: Serving, prompt: Any, **fields: Any) -> dict[str, Any]:
    response = served.post(TEXT, prompt=prompt, **fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    OpenAICompletion.model_validate(body)
    return body


# Chat


def test_sources_are_told_where_they_are_asked_for(served: Serving) -> None:
    chunks = stream(served, REPEATING, speculation={"show_sources": True})
    said = [chunk["outrider"] for chunk in chunks[1:] if "pieces" in chunk.get("outrider", {})]
    pieces = [piece for one in said for piece in one["pieces"]]
    assert "".join(text for text, _ in pieces) == REPEATING
    assert {source for _, source in pieces} == {"target", "lookup"}
    calls = [one["target_calls"] for one in said]
    assert calls == sorted(calls) and calls[0] == 1
    assert calls[-1] <= chunks[-1]["outrider"]["target_calls"]
    for name in ("generated_tokens", "draft_calls", "drafted_tokens", "accepted_tokens"):
        counts = [one[name] for one in said]
        assert counts == sorted(counts)
        assert counts[-1] <= chunks[-1]["outrider"][name]
    assert said[-1]["accepted_tokens"] > 0
    assert calls[-1] < said[-1]["generated_tokens"]


def test_choices_have_seeds_that_follow_each_other(served: Serving) -> None:
    body = ChatRequest.model_validate({"messages": user("abc"), "n": 2, "seed": 7})
    assert [one.sampling.seed for one in plan_chat(served.service, body, "").requests] == [7, 8]


# Log probabilities


def test_log_probabilities_of_half_characters_keep_their_bytes(served: Serving) -> None:
    scored = chat(served, "é", logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [one["bytes"] for one in scored] == [[0xC3], [0xA9]]
    assert [one["token"] for one in scored] == ["\ufffd", "\ufffd"]
    legacy = complete(served, "[[é!]]|", logprobs=1)["choices"][0]["logprobs"]
    assert legacy["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!"]


# Completions


def test_a_completion_needs_no_template() -> None:
    with serving(template=None) as served:
        assert complete(served, "[[ab]]|")["choices"][0]["text"] == "ab"
        refused = served.post(CHAT, messages=user("hi"))
        assert refused.status_code == 400
        assert "/v1/completions" in refused.json()["error"]["message"]


# Limits of the server


def test_the_servers_limits_hold() -> None:
    with serving(settings=ServeSettings(max_tokens=4, default_max_tokens=2)) as served:
        assert chat(served, "abcdef")["choices"][0]["message"]["content"] == "ab"
        assert chat(served, "abcdef", max_tokens=4)["choices"][0]["message"]["content"] == "abcd"
        refused = served.post(CHAT, messages=user("hi"), max_completion_tokens=5)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"


# The small endpoints


def test_the_model_is_listed_under_all_its_names() -> None:
    with serving(settings=ServeSettings(alias="other/name")) as served:
        body = served.client.get("/v1/models").json()
        assert [model["id"] for model in body["data"]] == ["other/name", "tiny"]
        one = served.client.get("/v1/models/tiny").json()
        assert (one["id"], one["root"], one["max_model_len"]) == ("tiny", "other/name", 2048)
        assert chat(served, "abc", model="tiny")["model"] == "other/name"


def test_tokens_of_texts_as_llama_cpp_and_vllm_have_them(served: Serving) -> None:
    def tokens(**asked: Any) -> Any:
        return served.post("/tokenize", **asked).json()

    assert tokens(content="abc") == {"tokens": [97, 98, 99], "count": 3, "max_model_len": 2048}
    assert tokens(prompt="abc", model="tiny")["tokens"] == [97, 98, 99]
    assert served.post("/detokenize", tokens=[97, 256, 98]).json()["content"] == "a<end>b"
    assert served.post("/detokenize", tokens=[]).json()["content"] == ""
    long = served.post("/tokenize", content="a" * 1_000_001).json()["error"]
    assert long["param"] == "content" and "more than 1,000,000 characters" in long["message"]
    assert served.post("/detokenize", tokens=[300]).json()["error"]["param"] == "tokens"
    assert tokens(content="a", prompt="b")["error"]["param"] == "content"


def test_usage_counts_what_the_tokenizer_counts(served: Serving) -> None:
    body = chat(served, "abcd")
    said = served.post("/tokenize", messages=user("Say [[abcd]]")).json()
    assert body["usage"]["prompt_tokens"] == said["count"] == len("user: Say [[abcd]]\n|")
    assert body["usage"]["completion_tokens"] == 5  # with the end token
    assert body["usage"]["total_tokens"] == said["count"] + 5


def test_the_account_adds_up(served: Serving) -> None:
    body = chat(served, REPEATING)
    account, usage = body["outrider"], body["usage"]
    assert account["policy"] == "fixed"
    assert account["generated_tokens"] == usage["completion_tokens"] == len(REPEATING) + 1
    assert account["tokens_per_target_call"] == account["generated_tokens"] / account["target_calls"] > 1
    assert account["accepted_tokens"] == sum(d["accepted_tokens"] for d in account["drafters"].values())
    assert (
        account["target_calls"] == account["generated_tokens"] - account["drafters"]["lookup"]["calls_saved"]
    )
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == account["accepted_tokens"]
    drafted = details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"]
    assert drafted == account["drafted_tokens"]
    assert account["draft_calls"] == account["forced_tokens"] == 0
    assert account["times"]["decode_s"] > 0


# Who asks, and what is counted


def client_of(served: Serving, name: str, **limits: Any) -> tuple[TestClient, Caller, RateLimiter]:
    """A client all of whose requests come from this key."""
    limiter = RateLimiter(ApiKey(name=name, sha256=digest_of(name), **limits))
    caller = Caller(limiter)

    async def known(scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["caller"] = caller
        await served.app(scope, receive, send)

    return TestClient(known), caller, limiter


def counted(served: Serving, name: str, **labels: str) -> float:
    """What a metric of the server is now."""
    return served.service.metrics.registry.get_sample_value(f"outrider_{name}_total", labels) or 0


def test_prompts_are_not_reused_across_keys(served: Serving) -> None:
    body = {"messages": user("Say [[abcdefghijklmnopqrstuvwxyz]]")}
    ours, others = client_of(served, "ours")[0], client_of(served, "others")[0]
    usages = [client.post(CHAT, json=body).json()["usage"] for client in (ours, ours, others, ours)]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert [tokens > 20 for tokens in cached] == [False, True, False, True] and cached[0] == cached[2] == 0


def test_a_key_pays_for_what_it_got(served: Serving) -> None:
    client, caller, meter = client_of(served, "payer", tokens_per_minute=1_000)
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


def test_what_ends_is_counted_with_its_key(served: Serving) -> None:
    client = client_of(served, "counted")[0]
    client.post(CHAT, json={"messages": user("Say [[abc]]"), "n": 2})
    client.post(RESPONSES, json={"input": "Say [[abc]]", "stream": True})
    assert counted(served, "requests_finished", finish_reason="stop", key="counted") == 3
    assert counted(served, "key_tokens", key="counted", kind="generation") == 3 * 4


def test_errors_are_counted() -> None:
    with serving() as served:
        served.post(CHAT, messages=[])
        served.client.get("/nowhere")
        served.model.fail_from_call = 2
        served.post(CHAT, messages=user("Say [[abc]]"), stream=True)
        for status, code in (("400", "invalid_value"), ("404", "not_found"), ("500", "backend_error")):
            assert counted(served, "errors", status=status, code=code) == 1


def test_metrics_are_shown(served: Serving) -> None:
    for path in ("/metrics", "/health"):  # as benchmarks find out what there is
        assert served.client.head(path).status_code == 200
    shown = served.client.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert shown.headers["content-type"].startswith("application/openmetrics-text")
    assert "outrider_generation_tokens_total" in shown.text


def test_the_page_is_at_the_root(served: Serving) -> None:
    assert served.client.get("/").status_code == 404
    shown = TestClient(create_app(served.service, page=True)).get("/")
    assert (shown.content, shown.headers["content-type"]) == (page().body, "text/html; charset=utf-8")


def test_a_bug_is_an_error_of_the_server(served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(served.service, "prepared", broken)
    response = served.post(CHAT, messages=user("hi"))
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "ZeroDivision" not in response.text
    assert counted(served, "errors", status="500", code="internal_error") == 1


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
