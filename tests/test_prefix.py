"""What requests share of their prompts, over HTTP and through the worker: read once, or anew where asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from engines import PROMPT, language_model, plain
from outrider.core.data import Completion
from outrider.engine import Engine
from outrider.server.settings import ServeSettings
from serving import Running, Serving, serving, user
from test_server_api_service import Counted
from test_server_worker import REQUEST, finish, slow_model, working

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
def test_the_choices_of_a_prompt_read_it_once(path: str, stream: bool) -> None:
    meter = Counted()
    with serving(max_running=4, metrics=meter) as served:
        assert read_by(served, path, **ENDPOINTS[path], n=4, stream=stream) < len(TEXT) + 4 * 20
    cached = sorted(completion.reused_tokens for completion, _ in meter.completions)
    assert cached[0] == 0 and cached[1] > len(TEXT) - 20 and len(cached) == 4


@pytest.mark.parametrize("max_running", [2, 4])
@pytest.mark.parametrize("differ", [False, True])
def test_whoever_comes_while_a_beginning_is_read_shares_it(max_running: int, differ: bool) -> None:
    model = slow_model(context_length=300, max_sequences=4)
    requests = [
        replace(REQUEST, prompt=(*LONG, *(number,) * 9 * differ), max_tokens=8) for number in range(4)
    ]

    async def main() -> list[Completion]:
        async with working(model, max_running=max_running) as worker:
            jobs = [await Running.submit(worker, request) for request in requests]
            return [completion for _, completion in await asyncio.gather(*map(finish, jobs))]

    completions = asyncio.run(main())
    first, *others = sorted(completion.reused_tokens for completion in completions)
    assert first == 0 and min(others) > len(LONG) - 16
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
