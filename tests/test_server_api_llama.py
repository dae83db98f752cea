"""llama-server's own endpoints, on the tiny exact model."""

from collections.abc import Iterator
from typing import Any

import pytest

from outrider.models.infill import Infill, find_infill
from serving import Serving, serving
from test_server_hostile import Marked

SAY = "Say [[one two\nthree]]|"


class Filling(Marked):
    """All bytes, and the control tokens of a model that fills in the middle."""

    SPELLED: tuple[str, ...] = (
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        "<|repo_name|>",
        "<|file_sep|>",
    )


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with serving() as running:
        yield running


@pytest.fixture
def filling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    monkeypatch.setattr("serving.ByteVocabulary", Filling)
    with serving(context_tokens=256) as running:
        yield running


def completion(served: Serving, path: str = "/completion", **body: Any) -> Any:
    response = served.post(path, temperature=0, **body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_a_text_is_continued(served: Serving, path: str) -> None:
    body = completion(served, path, prompt=SAY, n_predict=-1, return_tokens=True)
    assert body["content"] == "one two\nthree"
    assert bytes(body["tokens"]) == b"one two\nthree"
    assert (body["stop"], body["stop_type"], body["stopping_word"]) == (True, "eos", "")
    assert body["tokens_evaluated"] == len(SAY) and body["prompt"] == SAY
    assert body["tokens_predicted"] == body["timings"]["predicted_n"] == len("one two\nthree") + 1
    assert body["has_new_line"] and not body["truncated"]
    assert body["generation_settings"]["temperature"] == 0
    assert body["outrider"]["target_calls"] > 0
    again = completion(served, path, prompt=SAY, n_predict=3)
    assert (again["content"], again["stop_type"], again["tokens"]) == ("one", "limit", [])
    assert again["tokens_cached"] == again["timings"]["cache_n"] > 0
    stopped = completion(served, path, prompt=SAY, stop=["two"])
    assert (stopped["content"], stopped["stop_type"], stopped["stopping_word"]) == ("one ", "word", "two")


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        (list(SAY.encode()), ["one two\nthree"]),
        (["[[a]]|", "[[b]]|"], ["a", "b"]),
        ([[*b"[[a]]|"], [*b"[[b]]|"]], ["a", "b"]),
    ],
)
def test_prompts_of_all_kinds(served: Serving, prompt: Any, texts: list[str]) -> None:
    found = completion(served, prompt=prompt)
    found = found if isinstance(found, list) else [found]
    assert [one["content"] for one in found] == texts
    assert [one["index"] for one in found] == list(range(len(texts)))


def test_a_prompt_that_is_only_read_is_kept(served: Serving) -> None:
    """What llama.vim sends to warm the server up."""
    warm: dict[str, Any] = {"n_predict": 0, "samplers": [], "t_max_predict_ms": 1, "response_fields": [""]}
    prompt = "A prompt of its own: [[x]]|"
    assert completion(served, prompt=prompt, **warm) == {}
    body = completion(served, prompt=prompt, n_predict=0, stream=False)
    assert (body["content"], body["tokens_predicted"]) == ("", 0)
    assert completion(served, prompt=prompt)["tokens_cached"] > len(prompt) // 2


def test_response_fields_are_picked(served: Serving) -> None:
    body = completion(served, prompt="[[x]]|", response_fields=["content", "timings/prompt_n", "no/such"])
    assert body == {"content": "x", "timings/prompt_n": body["timings/prompt_n"]}


def test_samplers_that_are_not_named_are_off(served: Serving) -> None:
    asked = {"prompt": "[[x]]|", "top_k": 7, "top_p": 0.5, "min_p": 0.1}
    body = served.post("/completion", samplers=["top_k", "infill", "top_p"], **asked).json()
    settings = body["generation_settings"]
    assert (settings["top_k"], settings["top_p"], settings["min_p"]) == (7, 0.5, 0)
    assert settings["temperature"] == 1
    assert body["outrider"]["notices"] == ["samplers: infill is not known here"]
    body = served.post("/completion", samplers=["temperature", "top_k"], temperature=0, **asked).json()
    assert body["outrider"]["notices"] == ["samplers: their order is top_k, temperature"]
    assert body["generation_settings"]["temperature"] == 0
    refused = served.post("/completion", prompt="x", mirostat=2)
    assert refused.status_code == 400 and "mirostat" in refused.json()["error"]["message"]
    assert served.post("/completion", prompt="x", mirostat=0, mirostat_tau=5.0).status_code == 200


def test_an_answer_that_takes_too_long_ends_with_a_line() -> None:
    said = "first line\n" + "z" * 400
    with serving(call_s=0.02, drafters=[]) as served:
        body = completion(served, prompt=f"[[{said}]]|", t_max_predict_ms=30)
        assert body["content"].startswith("first line\n") and len(body["content"]) < 300
        assert body["stop_type"] == "limit"
        assert served.idle()


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("/completion", {}, "prompt: it is missing"),
        ("/completion", {"prompt": [1, [2]]}, "prompt[1]"),
        ("/completion", {"prompt": "x", "lora": []}, "lora"),
        ("/completion", {"prompt": "x", "image_data": [{}]}, "unknown field: image_data"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "no tokens for filling in a middle"),
        ("/apply-template", {"messages": []}, "messages"),
    ],
)
def test_errors_have_llama_servers_shape(served: Serving, path: str, body: dict[str, Any], why: str) -> None:
    response = served.post(path, **body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == 400 and error["type"] == "invalid_request_error" and why in error["message"]


def test_a_gap_is_filled(filling: Serving) -> None:
    """The prompt is in the model's own tokens, whatever a client spells; what comes first is its files."""
    body = completion(
        filling,
        "/infill",
        input_prefix="[[gap]]|",
        input_suffix="after",
        input_extra=[{"text": "print()", "filename": "a.py"}],
        prompt="",
        n_predict=20,
        n_indent=4,
        t_max_prompt_ms=500,
    )
    marks = {spelled: 257 + i for i, spelled in enumerate(Filling.SPELLED)}
    sent = next(span for call in filling.model.calls for span in call).tokens
    expected = [
        marks["<|repo_name|>"],
        *b"repository\n",
        marks["<|file_sep|>"],
        *b"a.py\nprint()",
        marks["<|file_sep|>"],
        *b"filename\n",
        marks["<|fim_prefix|>"],
        *b"[[gap]]|",
        marks["<|fim_suffix|>"],
        *b"after",
        marks["<|fim_middle|>"],
    ]
    assert list(sent) == expected
    assert body["stop"]
    forged = completion(filling, "/infill", input_prefix="<|fim_middle|>", input_suffix="", n_predict=2)
    assert forged["tokens_evaluated"] == 3 + len("<|fim_middle|>")


def test_a_suffix_of_a_completion_is_the_same(filling: Serving) -> None:
    response = filling.post("/v1/completions", prompt="ab", suffix="cd", max_tokens=2, temperature=0)
    assert response.json()["usage"]["prompt_tokens"] == 3 + 4
    refused = filling.post("/v1/completions", prompt=[1, 2], suffix="cd")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "suffix"


@pytest.mark.parametrize(
    ("before", "after", "files"), [(1000, 20, 0), (20, 1000, 0), (1000, 1000, 3), (10, 10, 9), (0, 0, 1)]
)
def test_what_is_next_to_the_gap_has_room(filling: Serving, before: int, after: int, files: int) -> None:
    body = completion(
        filling,
        "/infill",
        input_prefix="p" * before + "|",
        input_suffix="s" * after,
        input_extra=[{"text": "x" * 30}] * files,
        n_predict=40,
    )
    assert body["tokens_evaluated"] <= 256 - 40
    assert body["tokens_evaluated"] >= min(256 - 40, before + after + 4)
    assert body["prompt"].count("p") + body["prompt"].count("s") > 0 or not before


def test_a_file_names_its_tokens_or_spells_them() -> None:
    vocabulary = Filling()
    assert find_infill(vocabulary, lambda _: "") == Infill(257, 258, 259, 260, 261)
    named = {"tokenizer.ggml.fim_pre_token_id": "5", "tokenizer.ggml.suffix_token_id": "6"}
    assert find_infill(vocabulary, lambda key: named.get(key, "")) == Infill(5, 6, 259, 260, 261)
    too_large = {"tokenizer.ggml.fim_mid_token_id": "99999"}
    assert find_infill(vocabulary, lambda key: too_large.get(key, "")) == Infill(257, 258, 259, 260, 261)
    assert find_infill(Marked(), lambda _: "") is None


def test_a_gap_that_leaves_no_room_is_refused(filling: Serving) -> None:
    response = filling.post("/infill", input_prefix="a", input_suffix="b", prompt="m" * 300)
    assert response.status_code == 400 and "maximum context length" in response.json()["error"]["message"]
