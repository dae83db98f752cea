"""What becomes of generated tokens, whatever the API: content, reasoning and calls, their ids and log
probabilities, what a stop string ends; that a stream is the whole answer, and that a seed repeats."""

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import ScriptedDrafter
from examples import examples
from outrider import Session
from outrider.backends.fake import random_logits
from outrider.backends.gguf.options import LoadOptions
from outrider.policy.fixed import FixedPolicy
from outrider.server.service import Service
from serving import (
    CALL,
    CHAT,
    CLOCK,
    GENERATE,
    HERMES,
    LLAMA,
    MESSAGES,
    OLLAMA,
    RESPONSES,
    SCHEMA,
    TEXT,
    TOOLS,
    WEATHER,
    Serving,
    events,
    serving,
    text_of,
    user,
)
from test_server_api_llama import Filling
from tiny_gguf import write_tiny

CONVERSATIONS = (CHAT, RESPONSES, MESSAGES, OLLAMA)


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with serving(template=HERMES + "<think>", max_running=4) as running:
        yield running


# Answers of all APIs as one thing


class Answer(NamedTuple):
    """`scored` are tokens with their log probabilities, as the API gives them; `end` is all that it says of
    the end of the answer and of its tokens."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    scored: tuple[Any, ...]
    ids: tuple[int, ...]
    end: dict[str, Any]


_KINDS = ("reasoning_tokens", "content_tokens", "call_tokens")


def counts(account: dict[str, Any]) -> dict[str, int]:
    """How many tokens were generated, and for what; each is of one kind."""
    found = {name: account[name] for name in (*_KINDS, "generated_tokens")}
    assert sum(found[name] for name in _KINDS) == found["generated_tokens"]
    return found


def asked(path: str, said: str, max_tokens: int = 400, **more: Any) -> dict[str, Any]:
    """A request for this answer, with log probabilities where the API has them."""
    body: dict[str, Any] = {"temperature": 0, "max_tokens": max_tokens, **more}
    if path in (OLLAMA, GENERATE):
        options = {"num_predict": body.pop("max_tokens"), "stop": body.pop("stop", [])}
        body |= {"options": options, "logprobs": True, "stream": more.get("stream", False)}
    if path in (TEXT, LLAMA, GENERATE):
        body |= {"prompt": f"[[{said}]]|"}
        own: dict[str, dict[str, Any]] = {
            TEXT: {"logprobs": 1},
            LLAMA: {"n_probs": 1, "return_tokens": True},
            GENERATE: {"raw": True},
        }
        return body | own[path]
    if path == RESPONSES:
        body["max_output_tokens"] = body.pop("max_tokens")
        return body | {"input": f"Say [[{said}]]", "include": ["message.output_text.logprobs"]}
    if path == MESSAGES:
        body["stop_sequences"] = body.pop("stop", [])
        return body | {"messages": user(f"Say [[{said}]]")}
    return body | {"messages": user(f"Say [[{said}]]"), "logprobs": True}


def tools_of(path: str) -> list[dict[str, Any]]:
    functions: list[Any] = [tool["function"] for tool in TOOLS]
    if path == RESPONSES:
        return [{"type": "function", **one} for one in functions]
    if path == MESSAGES:
        return [{"name": one["name"], "input_schema": one["parameters"]} for one in functions]
    return TOOLS


def post(served: Serving, path: str, **body: Any) -> Any:
    response = served.post(path, **body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return response.json()
    if path in (OLLAMA, GENERATE):
        return [json.loads(line) for line in response.text.splitlines()]
    return events(response)


def read(served: Serving, path: str, said: str, *, stream: bool = False, **more: Any) -> Answer:
    found = post(served, path, **asked(path, said, stream=stream, **more))
    return _READERS[path](found if stream else [found], stream)


def _chat(chunks: Sequence[dict[str, Any]], stream: bool) -> Answer:
    texts, calls = {"content": "", "reasoning_content": ""}, dict[int, list[str]]()
    scored = dict[str, list[Any]]()
    for chunk in chunks:
        [choice] = chunk["choices"]
        said = choice["delta" if stream else "message"]
        for name in texts:
            texts[name] += said.get(name) or ""
        for i, call in enumerate(said.get("tool_calls") or ()):
            function, parts = call["function"], calls.setdefault(call.get("index", i), [])
            parts += [*filter(None, [function.get("name")]), function["arguments"]]
        for name, entries in (choice["logprobs"] or {}).items():
            scored[name] = scored.get(name, []) + (entries or [])
            # Log probabilities stand beside their own text.
            assert not entries or said[name]
    content = "".join(one["token"] for one in scored.get("content", ()))
    assert content == texts["content"] or "\ufffd" in content
    reason = chunks[-1]["choices"][0]["finish_reason"]
    made = tuple((name, "".join(parts)) for name, *parts in calls.values())
    found = tuple(sorted((name, json.dumps(entries)) for name, entries in scored.items() if entries))
    end = {"reason": reason, **counts(chunks[-1]["outrider"])}
    return Answer(texts["content"], texts["reasoning_content"], made, found, (), end)


def _text(chunks: Sequence[dict[str, Any]], _stream: bool) -> Answer:
    choices = [chunk["choices"][0] for chunk in chunks]
    scored = [one["logprobs"] for one in choices if one["logprobs"]]
    rows = [row for one in scored for row in zip(*one.values(), strict=True)]
    end = {"reason": choices[-1]["finish_reason"], **counts(chunks[-1]["outrider"])}
    return Answer("".join(one["text"] for one in choices), "", (), tuple(map(repr, rows)), (), end)


def _llama(chunks: Sequence[dict[str, Any]], _stream: bool) -> Answer:
    for chunk in chunks:
        assert [one["id"] for one in chunk["completion_probabilities"]] == chunk["tokens"]
        assert bytes(chunk["tokens"]).decode(errors="replace") == chunk["content"]
    last = chunks[-1]
    names = ("stop_type", "stopping_word", "tokens_predicted", "has_new_line")
    scored = tuple(repr(one) for chunk in chunks for one in chunk["completion_probabilities"])
    ids = tuple(token for chunk in chunks for token in chunk["tokens"])
    end = {name: last[name] for name in names} | counts(last["outrider"])
    return Answer("".join(chunk["content"] for chunk in chunks), "", (), scored, ids, end)


def _ollama(lines: Sequence[dict[str, Any]], _stream: bool) -> Answer:
    said = [line.get("message", line) for line in lines]
    scored = [one for line in lines for one in line.get("logprobs", ())]
    content = "".join(one.get("content", one.get("response", "")) for one in said)
    assert b"".join(bytes(one["bytes"]) for one in scored).decode(errors="replace") == content
    calls = [call["function"] for one in said for call in one.get("tool_calls", ())]
    made = tuple((call["name"], json.dumps(call["arguments"])) for call in calls)
    end = {"reason": lines[-1]["done_reason"], **counts(lines[-1]["outrider"])}
    thinking = "".join(one.get("thinking", "") for one in said)
    return Answer(content, thinking, made, tuple(map(repr, scored)), (), end)


def _response(found: Sequence[dict[str, Any]], stream: bool) -> Answer:
    body = found[-1]["response"] if stream else found[0]
    texts = {"message": "", "reasoning": ""}
    scored: list[Any] = []
    for item in body["output"]:
        if item["type"] != "function_call":
            [part] = item["content"]
            texts[item["type"]] += part["text"]
            scored += part.get("logprobs", ())
    made = tuple((i["name"], i["arguments"]) for i in body["output"] if i["type"] == "function_call")
    if stream:
        deltas = [one for one in found if one["type"].endswith(".delta")]
        shown = [one for one in deltas if one["type"] == "response.output_text.delta"]
        assert "".join(one["delta"] for one in shown) == texts["message"]
        assert [entry for one in shown for entry in one["logprobs"]] == scored
        assert all(
            b"".join(bytes(entry["bytes"]) for entry in one["logprobs"]).decode(errors="replace")
            == one["delta"]
            for one in shown
        )
    end = {"reason": body["incomplete_details"], "status": body["status"], **counts(body["outrider"])}
    return Answer(texts["message"], texts["reasoning"], made, tuple(map(repr, scored)), (), end)


def _message(found: Sequence[dict[str, Any]], stream: bool) -> Answer:
    if not stream:
        [body] = found
        blocks = [(one["type"], one) for one in body["content"]]
        end = {"reason": body["stop_reason"], "stop": body["stop_sequence"], **counts(body["outrider"])}
        texts = {
            kind: "".join(one[kind] for name, one in blocks if name == kind) for kind in ("text", "thinking")
        }
        made = tuple((one["name"], json.dumps(one["input"])) for name, one in blocks if name == "tool_use")
        return Answer(texts["text"], texts["thinking"], made, (), (), end)
    deltas = [one["delta"] for one in found if one["type"] == "content_block_delta"]
    starts = [one for one in found if one["type"] == "content_block_start"]
    calls = dict[int, str]()
    for one in found:
        if one["type"] == "content_block_delta" and one["delta"]["type"] == "input_json_delta":
            calls[one["index"]] = calls.get(one["index"], "") + one["delta"]["partial_json"]
    made = tuple(
        (one["content_block"]["name"], json.dumps(_object(calls.get(one["index"], ""))))
        for one in starts
        if one["content_block"]["type"] == "tool_use"
    )
    last = found[-2]
    delta = last["delta"]
    end = {"reason": delta["stop_reason"], "stop": delta["stop_sequence"], **counts(last["outrider"])}
    texts = {kind: "".join(one.get(kind, "") for one in deltas) for kind in ("text", "thinking")}
    return Answer(texts["text"], texts["thinking"], made, (), (), end)


def _object(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {}


_READERS: dict[str, Callable[[Sequence[dict[str, Any]], bool], Answer]] = {
    CHAT: _chat,
    TEXT: _text,
    LLAMA: _llama,
    RESPONSES: _response,
    MESSAGES: _message,
    OLLAMA: _ollama,
    GENERATE: _ollama,
}

# Single cases

THOUGHT = "a sea of stars</think>\n\n"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", CONVERSATIONS)
def test_a_stop_string_ends_the_content_alone(served: Serving, path: str, stream: bool) -> None:
    found = read(served, path, f"{THOUGHT}Not far. And", stop=["a", "\n"], stream=stream)
    assert (found.reasoning, found.content) == ("a sea of stars", "Not f")
    call = read(served, path, f"{THOUGHT}{CALL}", stop=["\n", "city"], tools=tools_of(path), stream=stream)
    assert (call.content, call.calls) == ("", (("weather", WEATHER),))


def test_a_stop_string_ends_no_required_call_and_no_json_before_it_begins(served: Serving) -> None:
    more: dict[str, Any] = {"stop": ["\n", "tool"], "tools": TOOLS, "tool_choice": "required"}
    assert read(served, CHAT, f"{THOUGHT}{CALL}", **more).calls == (("weather", WEATHER),)
    limit = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    found = read(served, CHAT, f"so\n</think>{WEATHER}", stop=["\n"], response_format=limit)
    assert found.content == WEATHER


@pytest.mark.parametrize("max_tokens", [24, 9])
@pytest.mark.parametrize("stop", [[], ["\U0001f419!"], ["\U0001f419 "]])
def test_no_id_is_lost(served: Serving, max_tokens: int, stop: list[str]) -> None:
    said = "\U0001f99c\U0001f9a9\U0001f419 " * 3
    more: dict[str, Any] = {"max_tokens": max_tokens, "stop": stop}
    whole = read(served, LLAMA, said, **more)
    assert read(served, LLAMA, said, **more, stream=True) == whole
    assert (
        bytes(whole.ids) == said.encode()[: 8 if stop == ["\U0001f419 "] and max_tokens > 12 else max_tokens]
    )


def test_no_text_is_lost_where_the_time_is_up() -> None:
    with serving(call_s=0.02, drafters=[]) as served:
        said = "one\n" + "z" * 300
        body = asked(LLAMA, said, stop=["z" * 299], stream=True) | {"t_max_predict_ms": 30}
        found = _llama(post(served, LLAMA, **body), True)
        assert len(found.ids) == len(found.content) == found.end["tokens_predicted"] < 300


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_marker_that_is_written_again_after_a_forced_end_is_no_content(served: Serving, path: str) -> None:
    said = "so</think>a </think> b </think>"  # of which the forced end takes the place of all but ">"
    found = read(served, path, said, reasoning_budget=1)
    assert (found.reasoning, found.content) == ("s", ">a b </think>")
    assert read(served, path, said).content == "a </think> b </think>"


def test_log_probabilities_are_of_the_text_beside_them(served: Serving) -> None:
    assert len(read(served, RESPONSES, f"{THOUGHT}Noon.").scored) == len("Noon.")
    assert len(read(served, TEXT, "one two", stop=["two"]).scored) == len("one ")
    body = asked(CHAT, f"{THOUGHT}Well. {CALL}", tools=TOOLS)
    scored = post(served, CHAT, **body)["choices"][0]["logprobs"]
    texts = {name: "".join(one["token"] for one in entries or ()) for name, entries in scored.items()}
    assert texts == {
        "content": "Well.",
        "refusal": "",
        "reasoning_content": "a sea of stars",
        "tool_calls": WEATHER,
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", CONVERSATIONS)
def test_what_is_cut_of_a_required_call_is_no_content(served: Serving, path: str, stream: bool) -> None:
    choice = {"type": "any"} if path == MESSAGES else "required"
    more: dict[str, Any] = {"tools": tools_of(path)} | ({} if path == OLLAMA else {"tool_choice": choice})
    said = f"</think>{CALL}\n{CLOCK}"
    first = "</think><" if path != OLLAMA else "</think><tool_call>"  # its calls are never required
    in_clock = len(f"</think>{CALL}\n") + 36
    for cut in (*range(len(first), in_clock, 13), in_clock):
        found = read(served, path, said, max_tokens=cut, stream=stream, **more)
        assert found.content == "" and found.end["reason"] not in ("stop", "tool_calls", None)
    names = [name for name, _ in found.calls]
    assert names == (["weather"] if path == OLLAMA else ["weather", "clock"])
    cut = len("</think>") + CALL.index("31")
    found = read(served, path, said, max_tokens=cut, stream=stream, **more)
    begun = WEATHER.partition("31")[0]
    calls = {OLLAMA: (), MESSAGES: (("weather", "{}"),)}
    assert found.calls == calls.get(path, (("weather", begun),))


def test_a_prompt_is_given_back_with_its_control_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.ByteVocabulary", Filling)
    with serving() as served:
        prompt = "<|fim_prefix|>[[ab]]|"
        assert post(served, LLAMA, prompt=prompt)["prompt"] == prompt
        tokens = post(served, "/tokenize", prompt=prompt)["tokens"]
        assert len(tokens) < len(prompt)
        assert post(served, "/detokenize", tokens=tokens)["content"] == prompt
        assert post(served, TEXT, prompt=tokens)["choices"][0]["text"] == "ab"


# Any answer

_BITS = ["so ", "a", "b", "é😀", " ", "\n", "\n\n", "</think>", CLOCK, "<", "{", '{"name": ', "12 34 12 34 "]
_SAID = st.lists(st.sampled_from(_BITS), max_size=6).map("".join)
_STOPS = st.lists(st.sampled_from([*_BITS[:8], "ab", "o a", "😀b", "</", "name", "34 1"]), max_size=2)
_MAX_TOKENS = st.one_of(st.just(300), st.integers(1, 60))


@pytest.mark.parametrize("path", [*CONVERSATIONS, TEXT, LLAMA, GENERATE])
@settings(max_examples=examples(60))
@given(said=_SAID, stop=_STOPS, max_tokens=_MAX_TOKENS, with_tools=st.booleans(), budget=st.integers(-1, 4))
def test_a_stream_is_the_whole_answer_and_drafts_change_nothing(
    served: Serving, path: str, said: str, stop: list[str], max_tokens: int, with_tools: bool, budget: int
) -> None:
    more: dict[str, Any] = {"max_tokens": max_tokens, "stop": stop}
    if path in CONVERSATIONS and with_tools:
        more["tools"] = tools_of(path)
    if path in (CHAT, RESPONSES):
        more["reasoning_budget"] = budget
    if path in CONVERSATIONS:
        said = f"so{said}"
    whole = read(served, path, said, **more)
    assert read(served, path, said, **more, stream=True) == whole
    plain = more if path in (MESSAGES, OLLAMA, GENERATE) else more | {"speculation": {"policy": "plain"}}
    assert read(served, path, said, **plain) == whole
    if not whole.calls:
        assert not any(one in whole.content for one in stop)
    unstopped = read(served, path, said, **more | {"stop": []})
    assert unstopped.content.startswith(whole.content) and unstopped.reasoning == whole.reasoning


# A seed repeats an answer with drafts; what cannot repeat says so

SAMPLED = {"temperature": 1.0, "seed": 42, "ignore_eos": True}


@pytest.fixture(scope="module")
def fickle() -> Iterator[Serving]:
    """Drafts that change from request to request."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serving.answering", lambda vocabulary: random_logits(vocabulary.size, order=1))
        policy, asks = FixedPolicy(draft_max=4, p_min=0.0, hand_over=0.0), count(1)

        def guess(_text: Sequence[int], _number: int) -> list[int]:
            """A token at some positions, at others in the next request."""
            ask = next(asks)
            return [] if ask % (len(drafter.ended) % 5 + 1) else [ask % 256]

        drafter = ScriptedDrafter(guess, acceptance=0.5)
        with serving(template=HERMES, drafters=[drafter], policy=policy) as running:
            yield running


@pytest.mark.parametrize("path", _READERS)
def test_a_seed_repeats_whatever_is_drafted(fickle: Serving, path: str) -> None:
    def ask(**more: Any) -> Any:
        return post(fickle, path, **asked(path, "ab ab ab", 24, **SAMPLED | more))

    def texts(**more: Any) -> set[str]:
        return {text_of(path, ask(**more)) for _ in range(4)}

    whole = ask()
    assert whole["outrider"]["notices"] == []
    assert texts() == texts(speculation={"policy": "plain"}) == {text_of(path, whole)}
    assert len(texts(speculation={"rule": "token"})) > 1, "these drafts change nothing: the test is blind"


def test_what_cannot_repeat_says_so_and_has_no_fingerprint(fickle: Serving) -> None:
    prints = set()
    for path in (CHAT, TEXT):
        for more, repeats in (
            ({}, True),
            ({"speculation": {"rule": "auto"}}, True),
            ({"speculation": {"policy": "plain", "rule": "token"}}, True),
            ({"speculation": {"rule": "block"}, "temperature": 0}, True),
            ({"speculation": {"rule": "block"}, "seed": None}, True),
            ({"speculation": {"rule": "block"}}, False),
        ):
            body = post(fickle, path, **asked(path, "ab", 24, **SAMPLED | more))
            said = [line for line in body["outrider"]["notices"] if line.startswith("seed: ")]
            assert (body["system_fingerprint"] is not None, said == []) == (repeats, repeats), more
            prints.add(body["system_fingerprint"])
    with serving() as other:
        prints.add(other.service.fingerprint)
    assert len(prints) == 2, "one for the model, and none"


def test_the_fingerprint_tells_how_the_model_is_run(tmp_path: Path) -> None:
    """Another file or another type of the KV is another fingerprint: its answers are others."""

    def fingerprint(name: str, **options: Any) -> str:
        file = tmp_path / name
        if not file.exists():
            write_tiny(file, seed=len(name))
        loaded = LoadOptions(threads=1, **options)
        with Session.load(file, context_length=64, options=loaded, policy=FixedPolicy()) as session:
            return Service(session).fingerprint

    others = [fingerprint("bb.gguf"), fingerprint("a.gguf", cache_type_k="q8_0")]
    assert len({fingerprint("a.gguf"), *others}) == 3
