"""The way of a request to a replica: given to another one, refused, or ended with an error. The first tests
have fakes for replicas; the last has real ones, on a cluster, over an exact model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import httpx2
import openai
import pytest
from starlette.types import Message

import serving as tiny
from cli_helpers import PATIENCE_S
from clusters import cluster
from outrider.server.errors import Problem
from outrider.server.guard import protect
from outrider.server.keys import Caller, KeyRing
from outrider.server.models import Models
from outrider.server.service import Service
from outrider.server.settings import ServeSettings

ray = pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = [
    # Ray's own, from the first import of its parts to their end.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
DIED = ray.exceptions.ActorDiedError()
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]
HEAD: Message = {"type": "http.response.start", "status": 200, "headers": EVENTS}
FIRST: Message = {"type": "http.response.body", "body": b"data: one\n\n", "more_body": True}
LAST: Message = {"type": "http.response.body", "body": b"data: two\n\n", "more_body": False}
USED: Message = {"type": "used", "tokens": (3, 2), "route": "/v1/chat/completions"}
WHOLE = [[HEAD, FIRST, USED], [LAST, USED]]


class Scripted:
    """A deployment whose replicas, one for each call, say what is written here, and may die then."""

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts = [*scripts]
        self.answer = self

    def options(self, **_: Any) -> Scripted:
        return self

    def remote(self, _asked: Any) -> AsyncIterator[list[Message]]:
        return self.say(self.scripts.pop(0))

    async def say(self, script: list[Any]) -> AsyncIterator[list[Message]]:
        for step in script:
            if isinstance(step, Exception):
                raise step
            yield step


def through(*scripts: list[Any], path: str = "/v1/chat/completions") -> tuple[list[Message], Any, Scripted]:
    """What a client gets of replicas like these, who made the request, and what is left of them."""
    from outrider.fleet.ray.serving import Replicas

    replicas = Replicas.__new__(Replicas)
    vars(replicas).update(_draining=False, _handle=(handle := Scripted(*scripts)))
    got: list[Message] = []
    unread = [{"type": "http.request", "body": b"{}"}]
    scope: Any = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}
    scope["state"] = {"caller": Caller()}

    async def receive() -> Message:
        return unread.pop() if unread else await asyncio.get_running_loop().create_future()

    async def send(message: Message) -> None:
        got.append(message)

    asyncio.run(replicas(scope, receive, send))
    return got, scope, handle


def test_a_replica_that_dies_before_the_first_token_is_replaced() -> None:
    for first in ([DIED], [[HEAD], DIED]):
        got, scope, handle = through(first, WHOLE)
        assert got == [HEAD, FIRST, LAST] and handle.scripts == []
    assert scope["route"].path == "/v1/chat/completions"
    used = scope["state"]["caller"].used
    assert (used.prompt_tokens, used.completion_tokens) == (3, 2)


def test_one_that_dies_later_ends_the_stream_with_an_error_in_its_form() -> None:
    got, scope, handle = through([[HEAD, FIRST, USED], DIED], WHOLE)
    assert got[:2] == [HEAD, FIRST] and handle.scripts == [WHOLE]
    assert scope["state"]["caller"].used.completion_tokens == 2
    [end] = got[2:]
    assert json.loads(end["body"].removeprefix(b"data: "))["error"]["code"] == "replica_lost"
    assert not end["more_body"]
    lines = {**HEAD, "headers": [(b"content-type", b"application/x-ndjson")]}
    got, _, _ = through([[lines, FIRST], DIED], path="/api/chat")
    assert "error" in json.loads(got[-1]["body"])


def test_where_all_die_or_all_are_full_the_client_gets_the_reason() -> None:
    from ray.serve.exceptions import BackPressureError

    with pytest.raises(Problem) as lost:
        through([DIED], [DIED], [DIED])
    assert (lost.value.status, lost.value.code) == (503, "replica_lost")
    with pytest.raises(Problem, match="all replicas are full") as full:
        through([BackPressureError(1, 1)])
    assert (full.value.status, full.value.code) == (429, "queue_full")
    refused = [[{**HEAD, "status": 503}, LAST, USED]]
    for later in ([[DIED], [DIED]], [[BackPressureError(1, 1)]], [refused]):
        got, _, _ = through([[HEAD], DIED], *later)
        assert got[0] == HEAD and len(got) == 2 and b'"error"' in got[1]["body"]


def test_a_replica_holds_what_comes_before_the_first_token() -> None:
    from outrider.fleet.ray.serving import Asked, Replica

    waiting = {**FIRST, "body": b": waiting\n\n"}

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        await send(HEAD)
        await asyncio.sleep(0.01)
        await send(FIRST)
        if scope["path"] == "/slow":
            await send(waiting)
        await asyncio.sleep(0.01)
        with scope["state"]["caller"].reserved(3, 2) as used:
            used.prompt_tokens, used.completion_tokens = 3, 1
            await send(FIRST)
            await asyncio.sleep(0.01)
            used.completion_tokens = 2
        await send(LAST)

    async def steps(path: str) -> list[list[Message]]:
        replica = Replica.__new__(Replica)
        vars(replica).update(_app=app, _telling=True)
        return [step async for step in replica.answer(Asked("POST", path, b"", [], b"", ""))]

    none, one, two = (
        {"type": "used", "tokens": tokens, "route": None} for tokens in ((0, 0), (3, 1), (3, 2))
    )
    assert asyncio.run(steps("/")) == [[HEAD, none], [FIRST, FIRST, one], [LAST, two]]
    assert asyncio.run(steps("/slow")) == [[HEAD, none], [FIRST, waiting, none], [FIRST, one], [LAST, two]]


# Real replicas

SETTINGS = ServeSettings(max_running=1, max_waiting=1, drain_timeout=30)


def open_tiny() -> Models:
    """A model that says the number of its process, and then much more, slowly."""
    tiny.DEFAULT_ANSWER = f"{os.getpid()} " + "and so on " * 10
    stack = ExitStack()
    session, model = stack.enter_context(tiny.tiny_session(max_running=1, drafters=()))
    model.call_s = 0.05
    service = Service(session, SETTINGS, release=stack.close)
    service.start()
    return Models.of(service)


@pytest.fixture(scope="module")
def two() -> Iterator[str]:
    """The address of a server of two replicas, each of which has room for two requests."""
    from outrider.fleet.ray.joining import joined
    from outrider.fleet.ray.serving import Replicas

    with cluster(("any", "any")) as made, joined(made.address):
        replicas = Replicas(open_tiny, SETTINGS, 2, 2)
        try:
            with tiny.live(protect(replicas, SETTINGS, KeyRing([]))) as address:
                yield address
        finally:
            replicas.close()


class Stream:
    """A request of one conversation, and what has come of it."""

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self.said, self.end = "", ""
        self.running = asyncio.ensure_future(self.run(client))

    async def run(self, client: openai.AsyncOpenAI) -> None:
        try:
            stream = await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "Hello"}], stream=True
            )
            async for chunk in stream:
                self.said += chunk.choices[0].delta.content or ""
                self.end = chunk.choices[0].finish_reason or ""
        except openai.APIError as error:
            self.end = f"{getattr(error, 'status_code', '')} {error.code}".strip()

    async def replica(self) -> int:
        """The process of the replica that answers."""
        while " " not in self.said:
            assert not self.running.done(), self.end
            await asyncio.sleep(0.02)
        return int(self.said.split()[0])


@pytest.mark.slow
def test_full_replicas_are_passed_over_and_dead_ones_replaced(two: str) -> None:
    async def play() -> None:
        async with openai.AsyncOpenAI(base_url=f"{two}/v1", api_key="none", max_retries=0) as client:
            start = partial(Stream, client)

            async def all_end(*streams: Stream) -> list[str]:
                async with asyncio.timeout(4 * PATIENCE_S):
                    await asyncio.gather(*(stream.running for stream in streams))
                return [stream.end for stream in streams]

            first = start()
            own = await first.replica()
            waits = start()
            await asyncio.sleep(1)
            over = start()
            other = await over.replica()
            assert other != own and waits.said == ""
            more = [start()]
            await asyncio.sleep(1)
            more += [start()]  # waits for a replica
            await asyncio.sleep(0.5)
            refused = start()
            await refused.running
            assert refused.end == "429 queue_full"
            async with httpx2.AsyncClient() as plain:
                assert (await plain.get(f"{two}/health")).json() == {"status": "ok"}
            assert await all_end(first, waits, over, *more) == ["stop"] * 5

            first = start()
            assert await first.replica() == own
            waits = start()
            await asyncio.sleep(0.5)
            assert waits.said == ""
            os.kill(own, signal.SIGKILL)
            assert await all_end(first, waits) == ["replica_lost", "stop"]
            assert waits.said.startswith(f"{other} ")

    asyncio.run(play())
