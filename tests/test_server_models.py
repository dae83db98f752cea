"""A server of several models: loaded when they are asked for, as many at once as may be."""

import asyncio
import gc
import random
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from httpx2 import Response
from starlette.testclient import TestClient

from outrider.core.errors import ModelFileError, OutOfMemory
from outrider.server.assembly import create_app
from outrider.server.metrics import Metrics
from outrider.server.models import Model, Models
from outrider.server.service import Service
from outrider.server.settings import ServeSettings
from serving import CHAT, SlowModel, events, tiny_session, user

A, B, C = "a", "b", "c"


@dataclass
class Shelf:
    """Models that can be loaded, and what happened to them."""

    call_s: float = 0.0
    failures: dict[str, list[Exception]] = field(default_factory=dict)
    """what the next loads of a model raise"""
    happened: list[str] = field(default_factory=list)
    services: dict[str, Service] = field(default_factory=dict)
    """of those that are loaded"""
    max_loaded: int = 1
    metrics: Metrics = field(default_factory=Metrics)

    def load(self, name: str) -> Service:
        if self.failures.get(name):
            raise self.failures[name].pop(0)
        assert len(self.services) < self.max_loaded, "too many models are loaded"
        stack = ExitStack()
        session, model = stack.enter_context(tiny_session())
        assert isinstance(model, SlowModel)
        model.call_s = self.call_s

        def release() -> None:
            assert not service.worker.state().running, "a model with a request was unloaded"
            self.happened.append(f"-{name}")
            del self.services[name]
            stack.close()

        service = Service(session, ServeSettings(alias=name), metrics=self.metrics, release=release)
        self.happened.append(f"+{name}")
        self.services[name] = service
        return service

    @property
    def is_running(self) -> bool:
        return any(service.worker.state().running for service in [*self.services.values()])


@contextmanager
def serving(shelf: Shelf, *names: str, **options: Any) -> Iterator[TestClient]:
    found = [Model((name,), partial(shelf.load, name)) for name in names or (A, B)]
    models = Models(found, max_loaded=shelf.max_loaded, metrics=shelf.metrics, **options)
    try:
        with TestClient(create_app(models), raise_server_exceptions=False) as client:
            yield client
    finally:
        models.close()


def ask(client: TestClient, model: str | None, text: str = "[[yes]]", **body: Any) -> Response:
    named = {} if model is None else {"model": model}
    return client.post(CHAT, json={"messages": user(text), **named, **body})


def answer_of(response: Response) -> str:
    assert response.status_code == 200, response.text
    if response.headers["content-type"].startswith("text/event-stream"):
        return "".join(e["choices"][0]["delta"].get("content") or "" for e in events(response))
    found: str = response.json()["choices"][0]["message"]["content"]
    return found


def states(client: TestClient) -> dict[str, str]:
    cards = client.get("/v1/models").json()["data"]
    return {card["id"]: card["status"]["value"] for card in cards}


def sample(shelf: Shelf, name: str) -> float | None:
    return shelf.metrics.registry.get_sample_value(f"outrider_{name}")


def eventually(true: Any) -> bool:
    end_s = time.monotonic() + 20
    while not true():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.01)
    return True


def test_a_model_is_loaded_by_the_first_request_for_it_in_place_of_another() -> None:
    shelf = Shelf()
    with serving(shelf) as client:
        assert states(client) == {A: "unloaded", B: "unloaded"}
        response = ask(client, B)
        assert (answer_of(response), response.json()["model"]) == ("yes", B)
        assert ask(client, B).status_code == 200
        assert (states(client), shelf.happened) == ({A: "unloaded", B: "loaded"}, ["+b"])
        assert answer_of(ask(client, None)) == "yes"  # who names none gets the first
        assert shelf.happened == ["+b", "-b", "+a"]
        assert ask(client, "c").status_code == 404
    assert shelf.happened[3:] == ["-a"]
    assert sample(shelf, "generation_tokens_total") == 12


def test_two_models_stay_loaded_and_the_least_recently_used_one_makes_room() -> None:
    shelf = Shelf(max_loaded=2)
    with serving(shelf, A, B, C) as client:
        for name in (A, B, A, B, A):
            assert answer_of(ask(client, name)) == "yes"
        assert shelf.happened == ["+a", "+b"]
        assert sample(shelf, "max_requests_running") == sum(
            service.worker.state().max_running for service in shelf.services.values()
        )
        assert answer_of(ask(client, C)) == "yes"
        assert shelf.happened[2:] == ["-b", "+c"]
        assert states(client) == {A: "loaded", B: "unloaded", C: "loaded"}
        assert sample(shelf, "generation_tokens_total") == 6 * 4
    assert sorted(shelf.happened[4:]) == ["-a", "-c"]


def test_an_idle_model_makes_room_before_one_with_a_request() -> None:
    shelf = Shelf(call_s=0.01, max_loaded=2)
    with serving(shelf, A, B, C) as client, ThreadPoolExecutor(2) as threads:
        ask(client, A)
        first = threads.submit(ask, client, A, f"[[{'a' * 60}]]")
        assert eventually(lambda: shelf.is_running)
        for name in (B, C):
            assert answer_of(ask(client, name)) == "yes"
        assert shelf.happened == ["+a", "+b", "-b", "+c"]
        assert answer_of(first.result(30)) == "a" * 60


@pytest.mark.parametrize("busy", [False, True])
def test_idle_models_make_room_where_memory_runs_out(busy: bool) -> None:
    full = OutOfMemory("c.gguf", "no room", "Take another.")
    shelf = Shelf(call_s=0.01, failures={C: [full, full]}, max_loaded=3)
    with serving(shelf, A, B, C) as client, ThreadPoolExecutor(1) as threads:
        ask(client, B)
        ask(client, A)
        if busy:
            first = threads.submit(ask, client, A, f"[[{'a' * 60}]]")
            assert eventually(lambda: shelf.is_running)
            assert ask(client, C).status_code == 503
            assert shelf.happened == ["+b", "+a", "-b"]
            assert answer_of(first.result(30)) == "a" * 60
        else:
            assert answer_of(ask(client, C)) == "yes"
            assert shelf.happened == ["+b", "+a", "-b", "-a", "+c"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_is_not_unloaded_under_a_running_answer(stream: bool) -> None:
    shelf = Shelf(call_s=0.01)
    with serving(shelf) as client, ThreadPoolExecutor(2) as threads:
        first = threads.submit(ask, client, A, f"[[{'a' * 60}]]", stream=stream)
        assert eventually(lambda: shelf.is_running)
        second = threads.submit(ask, client, B)
        assert answer_of(first.result(30)) == "a" * 60
        assert answer_of(second.result(30)) == "yes"
        assert shelf.happened == ["+a", "-a", "+b"]


def test_steady_requests_for_one_model_do_not_keep_another_one_out() -> None:
    shelf = Shelf(call_s=0.002)
    stopped = threading.Event()
    with serving(shelf) as client, ThreadPoolExecutor(4) as threads:
        ask(client, A)

        def keep_asking() -> int:
            number = 0
            while not stopped.is_set():
                assert ask(client, A, "[[aaaaaaaaaaaaaaaaaaaa]]").status_code == 200
                number += 1
            return number

        steady = [threads.submit(keep_asking) for _ in range(3)]
        assert eventually(lambda: shelf.is_running)
        assert answer_of(threads.submit(ask, client, B).result(30)) == "yes"
        stopped.set()
        assert all(each.result(30) for each in steady)


def test_a_model_that_makes_room_takes_no_new_requests() -> None:
    shelf = Shelf(call_s=0.01)
    long = "[[" + "a" * 60 + "]]"
    with serving(shelf) as client, ThreadPoolExecutor(3) as threads:
        first = threads.submit(ask, client, A, long)
        assert eventually(lambda: shelf.is_running)
        other = threads.submit(ask, client, B)
        assert eventually(lambda: states(client)[B] == "loading")
        second = threads.submit(ask, client, A, long)
        for asked in (first, other, second):
            assert asked.result(30).status_code == 200
    assert shelf.happened[:5] == ["+a", "-a", "+b", "-b", "+a"]


def test_nothing_of_an_unloaded_model_stays() -> None:
    shelf = Shelf()
    with serving(shelf) as client:
        ask(client, A)
        engine = weakref.ref(shelf.services[A].session.engine)
        ask(client, B)
        assert eventually(lambda: engine() is None)


def test_what_nobody_asks_for_is_unloaded() -> None:
    shelf = Shelf()
    with serving(shelf, idle_s=0.05) as client:
        ask(client, A)
        assert eventually(lambda: states(client) == {A: "unloaded", B: "unloaded"})
        assert answer_of(ask(client, A)) == "yes"
        assert shelf.happened[:3] == ["+a", "-a", "+a"]


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (ModelFileError("/secret/b.gguf", "it is cut off", "Fetch it again."), 503, "model_not_loaded"),
        (ZeroDivisionError("/secret"), 500, "internal_error"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_an_error_of_its_requests_alone(
    failure: Exception, status: int, code: str
) -> None:
    shelf = Shelf(failures={B: [failure]})
    with serving(shelf) as client:
        ask(client, A)
        refused = ask(client, B)
        assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
        assert "/secret" not in refused.text
        card = client.get("/v1/models/b").json()
        assert card["status"].get("failed", False) is (status == 503) and "/secret" not in str(card)
        assert ask(client, A).status_code == 200
        assert answer_of(ask(client, B)) == "yes"  # it is tried again
        assert "failed" not in client.get("/v1/models/b").json()["status"]


def test_a_load_that_fails_after_its_client_has_left_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    began, left = threading.Event(), threading.Event()

    def load() -> Service:
        began.set()
        assert left.wait(20)
        raise ModelFileError("a.gguf", "it is cut off", "Fetch it again.")

    async def leave() -> None:
        models = Models([Model((A,), load)])

        async def ask() -> None:
            async with models.serving(A):
                pass

        clients = [asyncio.create_task(ask()) for _ in range(2)]
        await asyncio.to_thread(began.wait, 20)
        for client in clients:
            client.cancel()
        await asyncio.wait(clients)
        left.set()
        while models.card(A)["status"]["value"] == "loading":
            await asyncio.sleep(0)

    asyncio.run(leave())
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == ["not loaded"]


def broken(*_: Any) -> bool:
    raise ZeroDivisionError


def test_a_model_whose_engine_failed_is_loaded_anew() -> None:
    shelf = Shelf()
    with serving(shelf) as client:
        ask(client, A)
        shelf.services[A].session.engine.has_room = broken  # type: ignore[method-assign]
        assert ask(client, A).status_code >= 500
        assert client.get("/health").json() == {"status": "ok"}  # no reason to restart the server
        assert answer_of(ask(client, A)) == "yes"
        assert shelf.happened == ["+a", "-a", "+a"]


def test_one_model_alone_is_not_managed() -> None:
    with tiny_session() as (session, _):
        assert states(TestClient(create_app(Service(session)))) == {"tiny": "loaded"}


@pytest.mark.parametrize("max_loaded", [1, 2])
def test_random_requests_of_many_clients_are_all_answered(max_loaded: int) -> None:
    shelf = Shelf(call_s=0.0005, max_loaded=max_loaded)
    names = ["m0", "m1", "m2", "m3"]
    with serving(shelf, *names, idle_s=0.02) as client, ThreadPoolExecutor(6) as threads:

        def talk(seed: int) -> None:
            draw = random.Random(seed)
            for turn in range(5):
                text = f"{seed}-{turn}-" + "x" * draw.randrange(12)
                response = ask(client, draw.choice(names), f"[[{text}]]", stream=draw.random() < 0.5)
                assert answer_of(response) == text

        for done in [threads.submit(talk, seed) for seed in range(6)]:
            done.result(60)
    assert not shelf.services and len(shelf.happened) > 8  # all were closed, some several times
