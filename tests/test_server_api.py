"""Chat completions, completions and the small endpoints, on a tiny model that says what it is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from outrider.server.settings import ServeSettings
from serving import DEFAULT_ANSWER, Serving, events, serving, user

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


def test_a_chat_is_answered(served: Serving) -> None:
    body = chat(served, "Good morning!", model="tiny")
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Good morning!", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None


def test_usage_counts_what_the_tokenizer_counts(served: Serving) -> None:
    body = chat(served, "abcd")
    said = served.post("/tokenize", messages=user("Say [[abcd]]")).json()
    assert body["usage"]["prompt_tokens"] == said["count"] == len("user: Say [[abcd]]\n|")
    assert body["usage"]["completion_tokens"] == 5  # with the end token
    assert body["usage"]["total_tokens"] == said["count"] + 5


def test_a_stream_says_the_same_in_pieces(served: Serving) -> None:
    chunks = stream(served, REPEATING)
    assert content(chunks) == REPEATING
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len({chunk["id"] for chunk in chunks}) == 1
    ends = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert ends == [None] * (len(chunks) - 1) + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)
    assert chunks[-1]["outrider"]["generated_tokens"] == len(REPEATING) + 1


def test_a_stream_ends_with_done(served: Serving) -> None:
    response = served.post("/v1/chat/completions", messages=user("hi"), stream=True)
    assert response.text.endswith("data: [DONE]\n\n")
    assert response.headers["cache-control"] == "no-cache"


def test_a_stream_tells_its_usage_where_it_is_asked(served: Serving) -> None:
    chunks = stream(served, "abc", stream_options={"include_usage": True})
    *others, last = chunks
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
    assert last["outrider"]["target_calls"] == 4
    assert all(chunk["usage"] is None for chunk in others)
    assert "outrider" not in others[-1]


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


def test_half_a_character_is_never_sent(served: Serving) -> None:
    text = "naïve café – 日本語 🙂"
    chunks = stream(served, text)
    assert content(chunks) == text
    assert all("\ufffd" not in content([chunk]) for chunk in chunks)


def test_several_choices(served: Serving) -> None:
    body = chat(served, "abc", n=3)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in body["choices"]] == ["abc"] * 3
    assert body["usage"]["completion_tokens"] == 12
    assert body["usage"]["prompt_tokens"] == len("user: Say [[abc]]\n|")
    account = body["outrider"]
    assert account["target_calls"] == sum(one["target_calls"] for one in account["choices"])
    assert account["generated_tokens"] == 12
    assert account["estimated_speedup"] is None and account["estimated_speedup_unknown"]


def test_several_choices_in_a_stream(served: Serving) -> None:
    chunks = stream(served, "abcdef", n=2)
    assert [content(chunks, index) for index in (0, 1)] == ["abcdef"] * 2
    ends = [choice["index"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert sorted(ends) == [0, 1]
    assert [("outrider" in chunk) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


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


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_an_answer_is_cut_at_its_limit(served: Serving, field: str) -> None:
    [choice] = chat(served, "abcdef", **{field: 3})["choices"]
    assert choice["message"]["content"] == "abc"
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("stop", ["d", ["xyz", "d"]])
def test_an_answer_ends_at_a_stop_text(served: Serving, stop: Any) -> None:
    [choice] = chat(served, "abcdef", stop=stop)["choices"]
    assert choice["message"]["content"] == "abc"
    assert choice["finish_reason"] == "stop"


def test_contents_in_parts_are_joined(served: Serving) -> None:
    parts = [{"type": "text", "text": "Say [[ab"}, {"type": "text", "text": "cd]]"}]
    response = served.post("/v1/chat/completions", messages=[{"role": "user", "content": parts}])
    assert response.json()["choices"][0]["message"]["content"] == "abcd"


def test_a_developer_is_the_system(served: Serving) -> None:
    messages = [{"role": "developer", "content": "Be brief."}, *user("hi")]
    said = served.post("/tokenize", messages=messages, with_pieces=True).json()
    assert "".join(token["piece"] for token in said["tokens"]) == "system: Be brief.\nuser: hi\n|"


def test_an_answer_can_be_sent_back(served: Serving) -> None:
    message = chat(served, "abc")["choices"][0]["message"]
    returned = {**message, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    messages = [*user("Say [[abc]]"), returned, *user("And [[def]]")]
    response = served.post("/v1/chat/completions", messages=messages)
    assert response.json()["choices"][0]["message"]["content"] == "def"
    assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_what_is_harmless_is_accepted(served: Serving) -> None:
    harmless = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "k",
        "modalities": ["text"],
        "verbosity": "medium",
        "logit_bias": None,
        "temperature": None,
        "seed": 5.0,
        "parallel_tool_calls": True,
    }
    assert chat(served, "abc", **harmless)["choices"][0]["message"]["content"] == "abc"


def test_samplers_are_switched_off_as_others_do(served: Serving) -> None:
    off = {"top_k": -1, "top_n_sigma": -1, "top_p": 0, "temperature": 1e-9, "seed": -1}
    assert chat(served, "abc", **off)["choices"][0]["message"]["content"] == "abc"


# Log probabilities


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


def test_a_stream_has_the_same_log_probabilities(served: Serving) -> None:
    fields = {"logprobs": True, "top_logprobs": 2, "temperature": 0}
    whole = chat(served, REPEATING, **fields)["choices"][0]["logprobs"]["content"]
    chunks = stream(served, REPEATING, **fields)
    found = [one["choices"][0]["logprobs"] for one in chunks if one["choices"][0]["logprobs"]]
    assert [token for one in found for token in one["content"]] == whole
    assert any(len(one["content"]) > 1 for one in found), "no chunk held several tokens"


def test_log_probabilities_of_half_characters_keep_their_bytes(served: Serving) -> None:
    scored = chat(served, "é", logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [one["bytes"] for one in scored] == [[0xC3], [0xA9]]
    assert [one["token"] for one in scored] == ["\ufffd", "\ufffd"]
    legacy = complete(served, "[[é!]]|", logprobs=1)["choices"][0]["logprobs"]
    assert legacy["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
    assert legacy["text_offset"] == [0, 0, 1]


def test_completions_have_log_probabilities_as_lists(served: Serving) -> None:
    body = complete(served, "[[abc]]|", logprobs=2, temperature=0)
    found = body["choices"][0]["logprobs"]
    assert found["tokens"] == ["a", "b", "c"]
    assert found["text_offset"] == [0, 1, 2]
    assert [next(iter(top)) for top in found["top_logprobs"]] == ["a", "b", "c"]
    assert [len(top) for top in found["top_logprobs"]] == [2, 2, 2]
    top = found["top_logprobs"]
    assert found["token_logprobs"] == [one[token] for one, token in zip(top, "abc", strict=True)]


# What speculation did


def test_the_account_adds_up(served: Serving) -> None:
    body = chat(served, REPEATING)
    account, usage = body["outrider"], body["usage"]
    assert account["policy"] == "fixed" and account["lossy"] is False
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


def test_a_prediction_is_drafted_from(served: Serving) -> None:
    answer = "Nothing here repeats, so only the prediction knows it."
    prediction = {"type": "content", "content": [{"type": "text", "text": answer}]}
    body = chat(served, answer, prediction=prediction, temperature=0)
    assert body["choices"][0]["message"]["content"] == answer
    assert body["outrider"]["drafters"]["prediction"]["accepted_tokens"] > len(answer) // 2
    assert body["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > len(answer) // 2


def test_a_request_says_who_drafts(served: Serving) -> None:
    plain = chat(served, REPEATING, speculation={"policy": "plain"})["outrider"]
    assert plain["policy"] == "plain"
    assert plain["drafted_tokens"] == 0
    assert plain["tokens_per_target_call"] == 1
    short = chat(served, REPEATING, speculation={"max_draft": 2})["outrider"]
    assert short["accepted_tokens"] > 0
    assert short["target_calls"] > chat(served, REPEATING)["outrider"]["target_calls"]


def test_a_rule_is_told_and_loss_is_owned_up_to(served: Serving) -> None:
    stable = chat(served, "abc", speculation={"rule": "stable"})["outrider"]
    token = chat(served, "abc", speculation={"rule": "token", "lenience": 0.5})["outrider"]
    assert stable["rule"] != token["rule"]
    assert (stable["lossy"], token["lossy"]) == (False, True)


# Completions


def test_a_text_is_continued(served: Serving) -> None:
    body = complete(served, "[[abcdef]]|")
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "abcdef", "logprobs": None, "finish_reason": "stop"}]


def test_sixteen_tokens_where_nothing_is_said(served: Serving) -> None:
    [choice] = complete(served, f"[[{REPEATING}]]|")["choices"]
    assert (choice["text"], choice["finish_reason"]) == (REPEATING[:16], "length")


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ([*b"[[ab]]|"], ["ab"]),
        (["[[ab]]|", "[[cd]]|"], ["ab", "cd"]),
        ([[*b"[[ab]]|"], [*b"[[cd]]|"]], ["ab", "cd"]),
    ],
)
def test_prompts_are_texts_or_tokens_or_lists_of_them(served: Serving, prompt: Any, texts: list[str]) -> None:
    assert [choice["text"] for choice in complete(served, prompt)["choices"]] == texts


def test_choices_of_several_prompts_come_in_order(served: Serving) -> None:
    body = complete(served, ["[[ab]]|", "[[cd]]|"], n=2, best_of=2)
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "ab"), (1, "ab"), (2, "cd"), (3, "cd")]
    assert body["usage"]["prompt_tokens"] == 14
    assert body["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("prompt", ["[[ab]]|", [*b"[[ab]]|"]])
def test_a_prompt_is_echoed(served: Serving, prompt: Any) -> None:
    assert complete(served, prompt, echo=True)["choices"][0]["text"] == "[[ab]]|ab"
    chunks = events(served.post("/v1/completions", prompt=prompt, echo=True, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "[[ab]]|ab"


def test_a_completion_is_streamed(served: Serving) -> None:
    fields = {"logprobs": 1, "stream_options": {"include_usage": True}, "speculation": {"show_sources": True}}
    body = {"prompt": f"[[{REPEATING}]]|", "max_tokens": 100, "stream": True, **fields}
    chunks = events(served.post("/v1/completions", **body))
    texts = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(texts) == REPEATING
    tokens = [t for c in chunks for x in c["choices"] if x["logprobs"] for t in x["logprobs"]["tokens"]]
    assert "".join(tokens) == REPEATING
    offsets = [o for c in chunks for x in c["choices"] if x["logprobs"] for o in x["logprobs"]["text_offset"]]
    assert offsets == list(range(len(REPEATING)))
    pieces = [p for c in chunks for p in c.get("outrider", {}).get("pieces", [])]
    assert "".join(text for text, _ in pieces) == REPEATING
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == len(REPEATING) + 1


def test_a_completion_needs_no_template() -> None:
    with serving(template=None) as served:
        assert complete(served, "[[ab]]|")["choices"][0]["text"] == "ab"
        refused = served.post("/v1/chat/completions", messages=user("hi"))
        assert refused.status_code == 400
        assert "/v1/completions" in refused.json()["error"]["message"]


# Limits of the server


def test_the_servers_limits_hold() -> None:
    settings = ServeSettings(max_prompt_tokens=40, max_tokens=4, default_max_tokens=2, max_choices=2)
    with serving(settings=settings) as served:
        assert chat(served, "abcdef")["choices"][0]["message"]["content"] == "ab"
        assert chat(served, "abcdef", max_tokens=4)["choices"][0]["message"]["content"] == "abcd"
        for field, value in (("max_tokens", 5), ("max_completion_tokens", 5), ("n", 3)):
            refused = served.post("/v1/chat/completions", messages=user("hi"), **{field: value})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == field
        long = served.post("/v1/chat/completions", messages=user("x" * 50))
        assert long.json()["error"]["code"] == "context_length_exceeded"
        many = served.post("/v1/completions", prompt=["a", "b", "c"])
        assert many.json()["error"]["param"] == "prompt"


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
    assert tokens(prompt="ab", return_token_strs=True)["token_strs"] == ["a", "b"]
    assert served.post("/detokenize", tokens=[97, 256, 98]).json()["content"] == "a<end>b"
    assert served.post("/detokenize", tokens=[]).json()["content"] == ""
    long = served.post("/tokenize", content="a" * 1_000_001).json()["error"]
    assert long["param"] == "content" and "more than 1,000,000 characters" in long["message"]
    assert served.post("/detokenize", tokens=[300]).json()["error"]["param"] == "tokens"
    assert tokens(content="a", prompt="b")["error"]["param"] == "content"


def test_health_and_status(served: Serving) -> None:
    client = served.client
    assert client.get("/health").json() == {"status": "ok"}
    status = client.get("/outrider/status").json()
    assert (status["model"], status["draft"], status["context_tokens"]) == ("tiny", None, 2048)
    assert status["drafters"] == ["prediction", "lookup"] and status["bitwise"] is False
    assert status["calls_s"] is None and status["plain_token_s"] is None


def test_the_default_answer(served: Serving) -> None:
    body = served.post("/v1/chat/completions", messages=user("hi")).json()
    assert body["choices"][0]["message"]["content"] == DEFAULT_ANSWER
