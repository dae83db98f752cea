"""What requests share of their prompts: read once, found again in another tokenization, or read anew."""

import asyncio
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import PROMPT, language_model, plain
from examples import examples
from outrider import Session
from outrider.backends.gguf.options import LoadOptions
from outrider.core.contracts import Vocabulary
from outrider.core.data import Completion
from outrider.core.params import SamplingParams
from outrider.core.sequences import common_prefix
from outrider.engine import Engine
from outrider.engine.kv_slots import respelled
from outrider.policy.fixed import FixedPolicy
from outrider.server.settings import ServeSettings
from outrider.session.options import Keeping
from serving import DEFAULT_ANSWER, ByteVocabulary, Running, Serving, serving, user
from test_server_worker import REQUEST, finish, slow_model, working
from tiny_gguf import write_tiny

TEXT = "a beginning that many requests share, said twice " * 30
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": user(TEXT), "max_tokens": 3},
    "/v1/completions": {"prompt": TEXT, "max_tokens": 3},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 3},
    "/v1/messages": {"messages": user(TEXT), "max_tokens": 3},
    "/completion": {"prompt": TEXT, "n_predict": 3},
    "/api/chat": {"model": "tiny", "messages": user(TEXT), "stream": False, "options": {"num_predict": 3}},
    "/api/generate": {"model": "tiny", "prompt": TEXT, "stream": False, "options": {"num_predict": 3}},
}
LONG = PROMPT * 40


@pytest.fixture
def served() -> Iterator[Serving]:
    with serving() as running:
        yield running


def read_by(served: Serving, path: str, **body: Any) -> int:
    """Tokens of the prompt that a request had the model read."""
    before = len(served.model.calls)
    response = served.post(path, **body)
    assert response.status_code == 200, response.text
    spans = [span for call in served.model.calls[before:] for span in call]
    return sum(len(span.tokens) for span in spans if span.rows != len(span.tokens))


@pytest.mark.parametrize("path", ENDPOINTS)
def test_without_the_cache_a_prompt_is_read_again(served: Serving, path: str) -> None:
    body = ENDPOINTS[path]
    whole = read_by(served, path, **body)
    assert whole >= len(TEXT)
    assert read_by(served, path, **body) < 20
    assert read_by(served, path, **body, cache_prompt=False) == whole
    assert read_by(served, path, **body, cache_prompt=True) < 20


def test_a_server_may_be_started_without_the_cache() -> None:
    path, body = "/v1/completions", ENDPOINTS["/v1/completions"]
    with serving(settings=ServeSettings(cache_prompt=False)) as served:
        assert read_by(served, path, **body) == read_by(served, path, **body) >= len(TEXT)
        assert read_by(served, path, **body, cache_prompt=True) < 20


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/completion"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_choices_of_a_prompt_read_it_once(
    path: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Completion] = []
    with serving(max_running=4) as served:
        monkeypatch.setattr(served.service.metrics, "observe_request", lambda one, **_: done.append(one))
        assert read_by(served, path, **ENDPOINTS[path], n=4, stream=stream) < len(TEXT) + 4 * 20
    cached = sorted(completion.reused_tokens for completion in done)
    assert cached[0] == 0 and cached[1] > len(TEXT) - 20 and len(cached) == 4


@pytest.mark.parametrize("rewind", ["free", "checkpoints"])
@pytest.mark.parametrize("max_running", [2, 4])
@pytest.mark.parametrize("differ", [False, True])
def test_whoever_comes_while_a_beginning_is_read_shares_it(
    max_running: int, differ: bool, rewind: str
) -> None:
    model = slow_model(context_length=300, max_sequences=4, rewind=rewind)
    prompts = [(*LONG, *(number,) * 9 * differ) for number in range(4)]
    requests = [replace(REQUEST, prompt=prompt, max_tokens=8, speculate=False) for prompt in prompts]

    async def main() -> list[Completion]:
        async with working(model, max_running=max_running) as worker:
            jobs = [await Running.submit(worker, request) for request in requests]
            return [completion for _, completion in await asyncio.gather(*map(finish, jobs))]

    completions = asyncio.run(main())
    first, *others = sorted(completion.reused_tokens for completion in completions)
    assert first == 0 and min(others) > len(LONG) - 17
    for request, completion in zip(requests, completions, strict=True):
        assert completion.tokens == plain(language_model(context_length=300), request)[0]


def test_who_waits_for_a_reader_that_leaves_reads_itself() -> None:
    model = slow_model(context_length=300, max_sequences=4, max_batch_tokens=16)
    request = replace(REQUEST, prompt=LONG, max_tokens=3)

    async def main() -> Completion:
        async with working(model, max_running=2) as worker:
            first = await Running.submit(worker, request)
            second = await Running.submit(worker, request)
            while not model.calls:
                await asyncio.sleep(0.001)
            first.cancel()
            return (await finish(second))[1]

    completion = asyncio.run(main())
    assert completion.tokens == plain(language_model(context_length=300), request)[0]
    assert sum(len(span.tokens) for call in model.calls for span in call) < len(LONG) + 10


def test_nobody_waits_for_another_namespace_or_a_short_beginning() -> None:
    engine = Engine(language_model(context_length=300, max_batch_tokens=16))
    request = replace(REQUEST, prompt=LONG)
    engine.submit(request)
    assert engine.should_wait(request)
    for other in (
        replace(request, scope="other"),
        replace(request, cache_prompt=False),
        replace(request, prompt=(*LONG[:10], 3, 3, 3)),
    ):
        assert not engine.should_wait(other)
    while engine.step()[0].record.kind == "prefill":
        pass
    assert not engine.should_wait(request), "it is stored"


# Text that was generated


PIECES = (b"a", b"b", b"ab", b"ba", b"aba", b"\xc3", b"\xa9", b"\xc3\xa9", b"")
"""The last one is a control token."""
SPELLED = SimpleNamespace(piece=lambda token: PIECES[token])
SOME_TOKENS = st.lists(st.integers(0, len(PIECES) - 1), max_size=12)


def spelled(tokens: Sequence[int]) -> list[bytes]:
    """What tokens spell between control tokens."""
    return b"".join(PIECES[token] or b"|" for token in tokens).split(b"|")


@settings(max_examples=examples(200))
@given(prompt=SOME_TOKENS, served=SOME_TOKENS)
def test_a_respelled_prompt_is_the_same_text(prompt: list[int], served: list[int]) -> None:
    found, reached, num_other = respelled(prompt, served, cast(Vocabulary, SPELLED))
    assert spelled(found) == spelled(prompt)
    assert found[:reached] == tuple(served[:reached])
    assert reached >= common_prefix(prompt, served)
    assert (num_other == 0) == (found == tuple(prompt))
    longest = max(
        (
            i
            for i in range(len(served) + 1)
            for j in range(len(prompt) + 1)
            if spelled(served[:i]) == spelled(prompt[:j])
        ),
        default=0,
    )
    assert reached == longest


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z ]{8,24}$"},
        "the end": {"enum": ["in the", "on"]},
    },
    "required": ["name", "the end"],
}


def test_the_next_turn_loses_nothing_of_what_was_generated(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", context_length=1024)
    options, num_other = LoadOptions(threads=1), 0
    opening: dict[str, Any] = {"context_length": 1024, "keeping": Keeping(2**30), "policy": FixedPolicy()}
    with Session.load(path, "none", options=options, **opening) as session:
        for seed in range(6):
            prompt = f"Answer number {seed}, in the usual way: "
            first = session.generate(
                prompt, schema=SCHEMA, sampling=SamplingParams(temperature=1, seed=seed), max_tokens=90
            )
            if seed % 2:  # then it comes out of memory
                session.engine.slots.clear(put_away=True)
            turn = session.encode(prompt + first.text + " And the next?")
            second = session.generate(prompt + first.text + " And the next?", max_tokens=2)
            assert first.finish_reason == "stop" and len(first.tokens) > 30
            assert second.reused_tokens >= first.prompt_tokens + len(first.tokens) - 1
            num_other += second.respelled_tokens
            given = session.generate(turn, max_tokens=2)
            assert (given.prompt_tokens, given.respelled_tokens) == (len(turn), 0), "tokens stay as they are"
    assert num_other > 15


class Paired(ByteVocabulary):
    """All bytes, a token for "he", and an end token."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 258

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        del add_special, parse_special
        parts = re.split("(he)", text)
        return [token for part in parts for token in ([256] if part == "he" else part.encode())]

    def piece(self, token: int) -> bytes:
        return b"he" if token == 256 else bytes([token]) if token < 256 else b""


ASKED, NEXT = "hi there", "and then?"
TALK = [*user(ASKED), {"role": "assistant", "content": DEFAULT_ANSWER}, *user(NEXT)]


@pytest.mark.parametrize(
    ("path", "first", "second"),
    [
        ("/v1/chat/completions", {"messages": user(ASKED)}, {"messages": TALK}),
        ("/v1/messages", {"messages": user(ASKED), "max_tokens": 50}, {"messages": TALK, "max_tokens": 50}),
        ("/v1/responses", {"input": ASKED}, {"input": TALK}),
        ("/api/chat", {"messages": user(ASKED)}, {"messages": TALK}),
        ("/completion", {"prompt": f"{ASKED}|"}, {"prompt": f"{ASKED}|{DEFAULT_ANSWER}{NEXT}|"}),
        (
            "/v1/completions",
            {"prompt": f"{ASKED}|", "max_tokens": 50},
            {"prompt": f"{ASKED}|{DEFAULT_ANSWER}{NEXT}|", "max_tokens": 50},
        ),
    ],
)
def test_every_endpoint_finds_its_answer_again(
    path: str, first: dict[str, Any], second: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.ByteVocabulary", Paired)
    template = "{% for m in messages %}{{ m.content }}{{ '|' if m.role == 'user' }}{% endfor %}"
    with serving(template=template) as served:

        def account(body: dict[str, Any]) -> dict[str, Any]:
            answer = served.post(path, temperature=0, model="tiny", stream=False, **body)
            assert DEFAULT_ANSWER in answer.text, answer.text
            return cast(dict[str, Any], answer.json()["outrider"])

        assert account(first)["respelled_prompt_tokens"] == 0
        found = account(second)
        assert found["respelled_prompt_tokens"] == 2, "h and e"
        assert found["reused_prompt_tokens"] >= len(ASKED) + len(DEFAULT_ANSWER)
        assert account(second | {"cache_prompt": False})["respelled_prompt_tokens"] == 0
