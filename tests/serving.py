"""A server on a tiny exact model, in the test's own process or on a real port.

The model says what the prompt has between [[ and ]]: a test writes its answer into its question.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI
from httpx2 import Response
from starlette.testclient import TestClient

from outrider import Session
from outrider.backends.fake import FakeModel, FakeVocabulary, NextLogits
from outrider.core.contracts import Drafter, Policy, check_spans
from outrider.core.data import Completion, Logits, Request, Span, Update
from outrider.core.errors import BackendError, OutriderError
from outrider.drafters.lookup import SuffixDrafter
from outrider.drafters.prediction import PredictionDrafter
from outrider.models.chat import ChatTemplate
from outrider.server.assembly import create_app
from outrider.server.service import Service
from outrider.server.settings import ServeSettings
from outrider.server.worker import Job, Outcome, Worker

TEMPLATE = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}|"""
"""No tools and no start token; the answer begins after the last bar."""

DEFAULT_ANSWER = "Hello there."

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
LLAMA, OLLAMA, GENERATE = "/completion", "/api/chat", "/api/generate"

# What tests of tools and of limited answers ask with

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}
WEATHER = '{"city": "Rome", "degrees": 31}'
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}},
]
HERMES = """{% if tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer with <tool_call></tool_call>.
{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{% endfor %}|"""
"""As Qwen's: tools in front, calls between markers, and the answer after the last bar."""
THINKING = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}|<think>"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "degrees": 31}}\n</tool_call>'
CLOCK = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


class ByteVocabulary(FakeVocabulary):
    """All bytes, and an end token."""

    def __init__(self) -> None:
        super().__init__("")
        self.size = 257

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        del add_special, parse_special
        return list(text.encode())

    def piece(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""


def said(prompt: str) -> str:
    """What the model answers to a prompt."""
    _, found, rest = prompt.rpartition("[[")
    return rest.partition("]]")[0] if found else DEFAULT_ANSWER


def answering(vocabulary: ByteVocabulary) -> NextLogits:
    """Next to certain of the answer's next byte, after it of the end token; what else could have been
    differs from place to place."""

    def next_logits(tokens: Sequence[int]) -> Any:
        prompt, _, so_far = bytes(t for t in tokens if t < 256).rpartition(b"|")
        so_far = so_far.removeprefix(b"<think>")
        answer = [*said(prompt.decode(errors="replace")).encode(), vocabulary.size - 1]
        row = np.sin(np.arange(vocabulary.size) * (1.0 + len(tokens) % 13)).astype(np.float32)
        row[answer[min(len(so_far), len(answer) - 1)]] = 40.0
        return row

    return next_logits


class SlowModel(FakeModel):
    """Takes `call_s` seconds for a call, and can be told to fail from one of its calls on."""

    call_s = 0.0
    fail_from_call: int | None = None

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        time.sleep(self.call_s)
        if self.fail_from_call is not None and len(self.calls) + 1 >= self.fail_from_call:
            check_spans(self, spans)
            raise BackendError("tiny", "it was told to fail")
        return super().decode(spans)


@dataclass(frozen=True, slots=True)
class Serving:
    """A service that runs, its application and its model; `client` talks to it without a network."""

    service: Service
    app: FastAPI
    model: SlowModel
    worker: Worker
    client: TestClient

    def post(self, path: str, **body: Any) -> Response:
        """One request, without a network."""
        return self.client.post(path, json=body)

    def idle(self, timeout_s: float = 10) -> bool:
        """Whether nothing runs or waits, now or soon."""
        end_s = time.monotonic() + timeout_s
        while (state := self.worker.state()).running or state.waiting:
            if time.monotonic() > end_s:
                return False
            time.sleep(0.005)
        return True


class Running:
    """A request that a worker has accepted: iterate over it for its updates. Leaving early cancels it."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._outcomes: asyncio.Queue[Outcome] = asyncio.Queue()
        self._job: Job
        self.completion: Completion
        self.endings: list[str] = []
        """finish reasons of completions"""

    @classmethod
    async def submit(cls, worker: Worker, request: Request) -> Running:
        """Hand a request in. Raises what the worker refuses it with."""
        self = cls(worker)
        self._job = await worker.submit(request, self._take)
        return self

    def _take(self, _: Job, outcome: Outcome) -> None:
        if isinstance(outcome, Completion):
            self.endings.append(outcome.finish_reason)
        self._outcomes.put_nowait(outcome)

    def cancel(self) -> None:
        self._worker.cancel(self._job)

    async def __aiter__(self) -> AsyncIterator[Update]:
        try:
            while isinstance(outcome := await self._outcomes.get(), Update):
                yield outcome
            if isinstance(outcome, OutriderError):
                raise outcome
            self.completion = outcome
        finally:
            self.cancel()


@contextmanager
def tiny_session(
    *,
    max_running: int = 2,
    context_tokens: int = 2048,
    template: str | None = TEMPLATE,
    drafters: Sequence[Drafter] | None = None,
    policy: Policy | None = None,
) -> Iterator[tuple[Session, SlowModel]]:
    """A session over the answering model, and that model."""
    vocabulary = ByteVocabulary()
    model = SlowModel(
        vocabulary,
        answering(vocabulary),
        name="tiny",
        context_length=context_tokens,
        max_sequences=max_running + 1,
        max_batch_tokens=512,
        max_rows=512,
    )
    session = Session(
        model,
        [PredictionDrafter(), SuffixDrafter()] if drafters is None else drafters,
        policy,
        template=None if template is None else ChatTemplate(template, bos="", eos=""),
        max_running=max_running,
    )
    try:
        yield session, model
    finally:
        session.close()


@contextmanager
def serving(
    *,
    max_running: int = 2,
    max_waiting: int = 4,
    call_s: float = 0.0,
    context_tokens: int = 2048,
    template: str | None = TEMPLATE,
    drafters: Sequence[Drafter] | None = None,
    policy: Policy | None = None,
    **options: Any,
) -> Iterator[Serving]:
    """A service over the answering model; `options` are Service's."""
    settings = options.pop("settings", ServeSettings()).model_copy(update={"max_waiting": max_waiting})
    with tiny_session(
        max_running=max_running,
        context_tokens=context_tokens,
        template=template,
        drafters=drafters,
        policy=policy,
    ) as (session, model):
        model.call_s = call_s
        service = Service(session, settings, **options)
        service.start()
        app = create_app(service)
        try:
            with TestClient(app, raise_server_exceptions=False) as client:  # one event loop for all requests
                yield Serving(service, app, model, service.worker, client)
        finally:
            service.close()


@contextmanager
def live(app: Any) -> Iterator[str]:
    """The application on a free port of the loopback; gives its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive(), "the server did not start"
                time.sleep(0.005)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)
            assert not thread.is_alive(), "the server did not end"


def user(text: str) -> list[dict[str, str]]:
    """A conversation of one message."""
    return [{"role": "user", "content": text}]


def events(response: Response) -> list[dict[str, Any]]:
    """The data of a stream's events, without its [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def text_of(path: str, body: dict[str, Any]) -> Any:
    """The text of an answer, whole."""
    if path == CHAT:
        return body["choices"][0]["message"]["content"]
    if path == RESPONSES:
        return body["output"][-1]["content"][0]["text"]
    if path == MESSAGES:
        return body["content"][-1]["text"]
    if path == OLLAMA:
        return body["message"]["content"]
    return body["choices"][0]["text"] if path == TEXT else body["content" if path == LLAMA else "response"]
