"""Chat completions, completions and the small endpoints, on a tiny model that says what it is told."""

from collections.abc import Iterator
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from outrider.server.settings import ServeSettings
from serving import Serving, events, serving, user

REPEATING = "one two three one two three one two three one two three"


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with serving() as running:
        yield running


def chat(served: Serving, text: str, **fields: Any) -> dict[str, Any]:
    """A whole answer to a message with `[[text]]` in it."""
    response = served.post("/v1/chat/completions", messages=user(f"Say [[{text}]]"), **fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    ChatCompletion.model_validate(body)
    return body


def stream(served: Serving, text: str, **fields: Any) -> list[dict[str, Any]]:
    body = {"messages": user(f"Say [[{text}]]"), "stream": True, **fields}
    return events(served.post("/v1/chat/completions", **body))


def content(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(
        choice["delta"].get("content") or ""
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index
    )


def complete(served: Serving, prompt: Any, **fields: Any) -> dict[str, Any]:
    response = served.post("/v1/completions", prompt=prompt, **fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    Completion.model_validate(body)
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


def test_choices_have_seeds_that_follow_each_other() -> None:
    with serving() as served:
        submitted = []
        submit = served.worker.submit

        async def listen(request: Any, *others: Any) -> Any:
            submitted.append(request)
            return await submit(request, *others)

        served.worker.submit = listen  # type: ignore[method-assign, assignment]
        chat(served, "abc", n=2, seed=7)
        assert [request.sampling.seed for request in submitted] == [7, 8]


def test_an_answer_can_be_sent_back(served: Serving) -> None:
    message = chat(served, "abc")["choices"][0]["message"]
    returned = {**message, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    messages = [*user("Say [[abc]]"), returned, *user("And [[def]]")]
    response = served.post("/v1/chat/completions", messages=messages)
    assert response.json()["choices"][0]["message"]["content"] == "def"
    assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


# Log probabilities


def test_log_probabilities_of_half_characters_keep_their_bytes(served: Serving) -> None:
    scored = chat(served, "é", logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [one["bytes"] for one in scored] == [[0xC3], [0xA9]]
    assert [one["token"] for one in scored] == ["\ufffd", "\ufffd"]
    legacy = complete(served, "[[é!]]|", logprobs=1)["choices"][0]["logprobs"]
    assert legacy["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
    assert legacy["text_offset"] == [0, 0, 1]


# Completions


def test_a_completion_needs_no_template() -> None:
    with serving(template=None) as served:
        assert complete(served, "[[ab]]|")["choices"][0]["text"] == "ab"
        refused = served.post("/v1/chat/completions", messages=user("hi"))
        assert refused.status_code == 400
        assert "/v1/completions" in refused.json()["error"]["message"]


# Limits of the server


def test_the_servers_limits_hold() -> None:
    with serving(settings=ServeSettings(max_tokens=4, default_max_tokens=2)) as served:
        assert chat(served, "abcdef")["choices"][0]["message"]["content"] == "ab"
        assert chat(served, "abcdef", max_tokens=4)["choices"][0]["message"]["content"] == "abcd"
        refused = served.post("/v1/chat/completions", messages=user("hi"), max_completion_tokens=5)
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
    pieces = tokens(content="aé", with_pieces=True)["tokens"]
    assert pieces == [{"id": 97, "piece": "a"}, {"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
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


def test_log_probabilities_are_those_of_plain_decoding(served: Serving) -> None:
    fields = {"logprobs": True, "top_logprobs": 3, "temperature": 0}
    drafted = chat(served, REPEATING, **fields)
    plain = chat(served, REPEATING, **fields, speculation={"policy": "plain"})
    assert drafted["outrider"]["accepted_tokens"] > 0 == plain["outrider"]["drafted_tokens"]
    scored = drafted["choices"][0]["logprobs"]["content"]
    assert scored == plain["choices"][0]["logprobs"]["content"]
    assert "".join(one["token"] for one in scored) == REPEATING
    assert all(bytes(one["bytes"]).decode() == one["token"] for one in scored)
    assert all(one["top_logprobs"][0]["token"] == one["token"] for one in scored)
    assert len({one["top_logprobs"][1]["token"] for one in scored}) > 5


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
