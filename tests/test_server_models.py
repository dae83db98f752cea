"""A server of several models: loaded when they are asked for, unloaded when they are not."""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from httpx2 import Response
from starlette.testclient import TestClient

from outrider.core.errors import ModelFileError, OutOfMemory, SettingError
from outrider.core.settings import sampling_params
from outrider.server.assembly import create_app
from outrider.server.configuration import as_toml, read_configuration
from outrider.server.metrics import AllMetrics, Metrics
from outrider.server.models import Model, Models
from outrider.server.service import Service
from outrider.server.settings import ServeSettings
from outrider.server.worker import Turns
from serving import SlowModel, events, tiny_session, user

CHAT = "/v1/chat/completions"
A, B, C = "a", "b", "c"


@dataclass
class Shelf:
    """Models that can be loaded, and what happened to them."""

    call_s: float = 0.0
    failures: dict[str, list[Exception]] = field(default_factory=dict)
    """what the next loads of a model raise"""
    happened: list[str] = field(default_factory=list)
    models: dict[str, SlowModel] = field(default_factory=dict)
    services: dict[str, Service] = field(default_factory=dict)
    turns: Turns = field(default_factory=Turns)
    max_loaded: int = 0

    def model(self, name: str, needed_bytes: int = 1, metrics: Metrics | None = None) -> Model:
        return Model((name,), lambda: self._load(name, metrics), lambda: needed_bytes)

    def _load(self, name: str, metrics: Metrics | None) -> Service:
        if self.failures.get(name):
            raise self.failures[name].pop(0)
        stack = ExitStack()
        session, model = stack.enter_context(tiny_session())
        model.call_s = self.call_s

        def release() -> None:
            assert not service.worker.state().running, "a model with a request was unloaded"
            self.happened.append(f"-{name}")
            del self.models[name], self.services[name]
            stack.close()

        service = Service(
            session, ServeSettings(alias=name), turns=self.turns, metrics=metrics, release=release
        )
        self.happened.append(f"+{name}")
        self.models[name], self.services[name] = model, service
        self.max_loaded = max(self.max_loaded, len(self.models))

        return service


@contextmanager
def serving(served: Sequence[Model], **options: Any) -> Iterator[TestClient]:
    models = Models(served, **options)
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
    found: str = response.json()["choices"][0]["message"]["content"]
    return found


def states(client: TestClient) -> dict[str, str]:
    cards = client.get("/v1/models").json()["data"]
    return {card["id"]: card["status"]["value"] for card in cards}


def eventually(true: Any) -> bool:
    end_s = time.monotonic() + 20
    while not true():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.01)
    return True


def test_a_model_is_loaded_by_the_first_request_for_it() -> None:
    shelf = Shelf()
    with serving([shelf.model(A), shelf.model(B)], max_loaded=2) as client:
        assert states(client) == {A: "unloaded", B: "unloaded"}
        response = ask(client, B)
        assert (answer_of(response), response.json()["model"]) == ("yes", B)
        assert ask(client, B).status_code == 200
        assert (states(client), shelf.happened) == ({A: "unloaded", B: "loaded"}, ["+b"])
        assert answer_of(ask(client, None)) == "yes"  # who names none gets the first
        assert shelf.happened == ["+b", "+a"]
        assert ask(client, "c").status_code == 404
    assert sorted(shelf.happened[2:]) == ["-a", "-b"]


def test_the_model_whose_last_request_is_longest_ago_makes_room() -> None:
    shelf = Shelf()
    with serving([shelf.model(name) for name in (A, B, C)], max_loaded=2) as client:
        for name in (A, B, A, C):
            assert answer_of(ask(client, name)) == "yes"
        assert shelf.happened == ["+a", "+b", "-b", "+c"]
        ask(client, B)
        assert shelf.happened[4:] == ["-a", "+b"]


def test_memory_makes_room_too() -> None:
    shelf = Shelf()
    entries = [shelf.model(A, 60), shelf.model(B, 30), shelf.model(C, 50), shelf.model("big", 101)]
    with serving(entries, max_loaded=9, memory_bytes=100) as client:
        for name in (A, B, C):
            ask(client, name)
        assert shelf.happened == ["+a", "+b", "-a", "+c"]
        refused = ask(client, "big")
        assert refused.status_code == 503
        assert "--models-memory" not in refused.json()["error"]["message"]  # clients have no flags
        assert shelf.happened == ["+a", "+b", "-a", "+c"]  # nothing was unloaded for it


def test_a_model_is_not_unloaded_under_a_running_answer() -> None:
    shelf = Shelf(call_s=0.01)
    long = "a" * 60
    with (
        serving([shelf.model(A), shelf.model(B)], max_loaded=1) as client,
        ThreadPoolExecutor(2) as threads,
    ):
        ask(client, A)
        for stream in (False, True):
            first = threads.submit(ask, client, A, f"[[{long}]]", stream=stream)
            assert eventually(lambda: shelf.services[A].worker.state().running)
            second = threads.submit(ask, client, B)
            answer = first.result(30)
            if stream:
                found = "".join(e["choices"][0]["delta"].get("content") or "" for e in events(answer))
            else:
                found = answer_of(answer)
            assert found == long
            assert answer_of(second.result(30)) == "yes"
            assert shelf.happened[-2:] == ["-a", "+b"]
            ask(client, A)
    assert shelf.max_loaded == 1


def test_steady_requests_for_one_model_do_not_keep_another_one_out() -> None:
    shelf = Shelf(call_s=0.002)
    stopped = threading.Event()
    with (
        serving([shelf.model(A), shelf.model(B)], max_loaded=1) as client,
        ThreadPoolExecutor(4) as threads,
    ):
        ask(client, A)

        def keep_asking() -> int:
            number = 0
            while not stopped.is_set():
                assert ask(client, A, "[[aaaaaaaaaaaaaaaaaaaa]]").status_code == 200
                number += 1
            return number

        steady = [threads.submit(keep_asking) for _ in range(3)]
        assert eventually(lambda: shelf.services[A].worker.state().running)
        assert answer_of(threads.submit(ask, client, B).result(30)) == "yes"
        stopped.set()
        assert all(each.result(30) for each in steady)


def test_a_model_that_makes_room_takes_no_new_requests() -> None:
    shelf = Shelf(call_s=0.01)
    long = "[[" + "a" * 60 + "]]"
    with (
        serving([shelf.model(A), shelf.model(B)], max_loaded=1) as client,
        ThreadPoolExecutor(3) as threads,
    ):
        ask(client, A)
        first = threads.submit(ask, client, A, long)
        assert eventually(lambda: shelf.services[A].worker.state().running)
        other = threads.submit(ask, client, B)
        time.sleep(0.1)  # it waits
        second = threads.submit(ask, client, A, long)
        for asked in (first, other, second):
            assert asked.result(30).status_code == 200
    assert shelf.happened[:5] == ["+a", "-a", "+b", "-b", "+a"]


def test_nothing_of_an_unloaded_model_stays() -> None:
    shelf = Shelf()
    with serving([shelf.model(A), shelf.model(B)], max_loaded=1) as client:
        ask(client, A)
        engine = weakref.ref(shelf.services[A].session.engine)
        ask(client, B)
        assert eventually(lambda: engine() is None)


def test_what_nobody_asks_for_is_unloaded() -> None:
    shelf = Shelf()
    with serving([shelf.model(A), shelf.model(B)], max_loaded=2, idle_s=0.05) as client:
        ask(client, A)
        assert eventually(lambda: states(client) == {A: "unloaded", B: "unloaded"})
        assert answer_of(ask(client, A)) == "yes"
        assert shelf.happened[:3] == ["+a", "-a", "+a"]


def test_a_model_that_cannot_be_loaded_is_an_error_of_its_requests_alone() -> None:
    shelf = Shelf(failures={B: [ModelFileError("/secret/b.gguf", "it is cut off", "Fetch it again.")]})
    with serving([shelf.model(A), shelf.model(B)], max_loaded=2) as client:
        ask(client, A)
        refused = ask(client, B)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_not_loaded")
        assert refused.headers["retry-after"] and "/secret" not in refused.text
        card = client.get("/v1/models/b").json()
        assert card["status"]["failed"] and "/secret" not in str(card)
        assert ask(client, A).status_code == 200
        assert answer_of(ask(client, B)) == "yes"  # it is tried again
        assert "failed" not in client.get("/v1/models/b").json()["status"]


def broken(*_: Any) -> bool:
    raise ZeroDivisionError


def test_a_model_whose_engine_failed_is_loaded_anew() -> None:
    shelf = Shelf()
    with serving([shelf.model(A), shelf.model(B)], max_loaded=2) as client:
        ask(client, A)
        shelf.services[A].session.engine.has_room = broken  # type: ignore[method-assign]
        assert ask(client, A).status_code >= 500
        assert answer_of(ask(client, A)) == "yes"
        assert shelf.happened == ["+a", "-a", "+a"]


def test_one_model_alone_is_not_managed() -> None:
    with tiny_session() as (session, _):
        assert states(TestClient(create_app(Service(session)))) == {"tiny": "loaded"}


def test_random_requests_of_many_clients_are_all_answered() -> None:
    shelf = Shelf(call_s=0.0005)
    names = ["m0", "m1", "m2", "m3"]
    entries = [shelf.model(name, 40) for name in names]
    with (
        serving(entries, max_loaded=3, memory_bytes=100, idle_s=0.02) as client,
        ThreadPoolExecutor(6) as threads,
    ):

        def talk(seed: int) -> None:
            draw = random.Random(seed)
            for turn in range(8):
                text = f"{seed}-{turn}-" + "x" * draw.randrange(12)
                response = ask(client, draw.choice(names), f"[[{text}]]", stream=draw.random() < 0.5)
                if response.headers["content-type"].startswith("text/event-stream"):
                    found = "".join(e["choices"][0]["delta"].get("content") or "" for e in events(response))
                else:
                    found = answer_of(response)
                assert found == text

        for done in [threads.submit(talk, seed) for seed in range(6)]:
            done.result(60)
    assert shelf.max_loaded <= 2
    assert shelf.models == {} and len(shelf.happened) > 8  # all were closed, some several times


def test_metrics_say_whose_they_are() -> None:
    shelf = Shelf()
    counted = {name: Metrics(name) for name in (A, B)}
    found = [shelf.model(name, metrics=metrics) for name, metrics in counted.items()]
    with serving(found, max_loaded=2, metrics=AllMetrics(counted)) as client:
        ask(client, B)
        ask(client, "unknown")
        lines = client.get("/metrics").text.splitlines()
        openmetrics = client.get("/metrics", headers={"accept": "application/openmetrics-text"}).text
    assert 'outrider_generation_tokens_total{model_name="a"} 0.0' in lines
    assert 'outrider_generation_tokens_total{model_name="b"} 4.0' in lines
    assert 'outrider_errors_total{code="model_not_found",model_name="a",status="404"} 1.0' in lines
    assert sum(line == "# TYPE outrider_generation_tokens_total counter" for line in lines) == 1
    assert sum(line.startswith("process_cpu_seconds_total") for line in lines) == 1
    assert openmetrics.endswith("# EOF\n")


# Turns


def test_turns_are_taken_in_the_order_of_asking() -> None:
    turns, order, threads = Turns(), [], []
    with turns:
        for number in range(5):

            def take(number: int = number) -> None:
                with turns:
                    order.append(number)

            asked = turns._next_ticket
            threads.append(threading.Thread(target=take))
            threads[-1].start()
            assert eventually(lambda asked=asked: turns._next_ticket > asked)
        assert turns.is_wanted and order == []
    for thread in threads:
        thread.join(10)
    assert order == [0, 1, 2, 3, 4] and not turns.is_wanted


# Settings


def config(folder: Path, text: str) -> Path:
    path = folder / "outrider.toml"
    path.write_text(text, encoding="utf-8")
    return path


SEVERAL = """
[models.coder]
model = "coder.gguf"
model_draft = "draft.gguf"
ctx_size = 8192

[models."big.one"]
hf_repo = "owner/repo:Q8_0"
temp = 0.25
alias = "gpt-4o"

[sampling]
temp = 0.5

[machine]
threads = 3
"""


def test_a_file_describes_several_models(tmp_path: Path) -> None:
    found = read_configuration({}, {}, config(tmp_path, SEVERAL))
    coder, big = found.models["coder"], found.models["big.one"]
    assert (coder.model, coder.model_draft, coder.ctx_size, sampling_params(coder).temperature) == (
        "coder.gguf",
        "draft.gguf",
        8192,
        0.5,
    )
    assert (big.hf_repo, big.model, sampling_params(big).temperature, big.alias, big.threads) == (
        "owner/repo:Q8_0",
        None,
        0.25,
        "gpt-4o",
        3,
    )
    assert read_configuration({}, {}, config(tmp_path, "port = 1")).models == {}


def test_the_model_of_the_command_line_is_the_first_of_several(tmp_path: Path) -> None:
    path = config(tmp_path, SEVERAL)
    found = read_configuration({"model": "x/mine.gguf", "model_draft": "d.gguf"}, {}, path)
    assert list(found.models) == ["mine", "coder", "big.one"]
    assert found.models["mine"].model_draft == "d.gguf" and found.models["big.one"].model_draft is None


def test_several_models_are_printed_as_a_file_that_means_the_same(tmp_path: Path) -> None:
    found = read_configuration({}, {}, config(tmp_path, SEVERAL))
    again = read_configuration({}, {}, config(tmp_path, as_toml(found)))
    assert again.models == found.models and again.settings == found.settings


def test_a_folder_has_a_model_in_each_file(tmp_path: Path) -> None:
    for name in ("a.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf", "mmproj-a.gguf", "c.txt"):
        (tmp_path / name).touch()
    found = read_configuration({"models_dir": tmp_path, "ctx_size": 512}, {})
    assert {name: settings.model for name, settings in found.models.items()} == {
        "a": str(tmp_path / "a.gguf"),
        "b": str(tmp_path / "b-00001-of-00002.gguf"),
    }
    assert {settings.ctx_size for settings in found.models.values()} == {512}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[models.a]\nport = 1", "models.a.port: not a setting of a model"),
        ("[models.a]\nctx_sizes = 1", "models.a.ctx_sizes: no such setting"),
        ("[models.a]\nctx_size = true", "models.a.ctx_size"),
        ("[models.a]\nctx_size = 'many'", "models.a.ctx_size"),
        ("models_dir = '/there/is/none'", "--models-dir /there/is/none"),
        ("models_max = 0", "models_max"),
    ],
)
def test_what_is_wrong_with_a_model_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(SettingError) as caught:
        read_configuration({}, {}, config(tmp_path, text))
    assert complaint in str(caught.value)


def test_where_the_system_has_no_memory_idle_models_are_unloaded_until_it_has() -> None:
    shelf = Shelf(failures={C: [OutOfMemory(C, "too large"), OutOfMemory(C, "too large")]})
    with serving([shelf.model(name) for name in (A, B, C)], max_loaded=3) as client:
        ask(client, A)
        ask(client, B)
        assert answer_of(ask(client, C)) == "yes"
        assert shelf.happened == ["+a", "+b", "-a", "-b", "+c"]
