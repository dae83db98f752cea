"""KV on a slow disk: read ahead while others go on, at hand when its request begins, forgotten for good."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Event
from time import monotonic, sleep
from typing import Any

import pytest

from engines import language_model, plain
from outrider.core.contracts import SavedState
from outrider.core.data import Completion, Request
from outrider.core.errors import BackendError
from outrider.engine.tiers.disk import Disk, SavedText
from outrider.server.worker import Worker
from outrider.session import Session
from serving import Running
from test_tiers import LARGE, TEXTS, Server, request, tiers_of

PATIENCE_S = 30.0


class SlowDisk(Disk):
    """Reads and writes when it is let."""

    def __init__(self, path: Path, max_bytes: int = LARGE) -> None:
        super().__init__(path, "a model", max_bytes)
        self.may_read, self.may_write = Event(), Event()
        self.may_write.set()
        self.asked: list[str] = []

    def read(self, name: str, text: SavedText) -> SavedState | None:
        self.asked.append(name)
        assert self.may_read.wait(PATIENCE_S)
        return super().read(name, text)

    def write(self, *arguments: Any) -> int:
        assert self.may_write.wait(PATIENCE_S)
        return super().write(*arguments)


class SlowServer(Server):
    """A Server whose disk is slow; `files` are the texts that are on it."""

    def __init__(self, path: Path, memory: int = 0, max_bytes: int = LARGE, **options: Any) -> None:
        super().__init__(None, memory, **options)
        self.slow = self.disk = SlowDisk(path, max_bytes)
        self.tiers = tiers_of(self.model, memory, self.slow)
        self.session = Session(self.model, kv_tiers=self.tiers)
        self.engine = self.session.engine


def saved(path: Path, texts: int = 1) -> None:
    """Leave some texts on the disk, the first the one that was used longest ago."""
    for text in TEXTS[:texts]:
        server = Server(path, max_sequences=1)
        server.reused(text)
        server.end()


def until(is_so: Callable[[], bool]) -> None:
    end_s = monotonic() + PATIENCE_S
    while not is_so():
        assert monotonic() < end_s
        sleep(0.001)


@asynccontextmanager
async def working(server: SlowServer) -> Any:
    worker = Worker(server.session)
    worker.start()
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield worker
    finally:
        server.slow.may_read.set()
        await asyncio.to_thread(worker.stop)


async def finished(job: Running) -> Completion:
    async for _ in job:
        pass
    return job.completion


def test_others_go_on_while_a_text_is_read_from_disk(tmp_path: Path) -> None:
    saved(tmp_path)
    server = SlowServer(tmp_path, max_sequences=3, capacity_tokens=400)

    async def main() -> None:
        async with working(server) as worker:
            long, short = request((1, 2), max_tokens=40), request((3, 1), max_tokens=4)
            other = await Running.submit(worker, long)
            returning = asyncio.create_task(Running.submit(worker, request(TEXTS[0])))
            later = await Running.submit(worker, short)  # it passes by: there is room
            assert (await finished(other)).tokens == plain(language_model(), long)[0]
            assert (await finished(later)).tokens == plain(language_model(), short)[0]
            assert worker.state().waiting == 1 and worker.state().running == 0
            assert len(server.slow.asked) == 1
            server.slow.may_read.set()
            completion = await finished(await returning)
            assert completion.tokens == plain(language_model(), request(TEXTS[0]))[0]
            assert completion.reused_tokens == 89
            assert server.tiers.counts.hits == {"memory": 0, "disk": 1} and len(server.slow.asked) == 1

    asyncio.run(main())


def test_whoever_waits_for_the_disk_keeps_its_room_and_the_worker_sleeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path)
    server = SlowServer(tmp_path, max_sequences=1, capacity_tokens=200)
    looked: list[int] = []
    has_room = server.engine.has_room

    def counted(*asked: Request) -> bool:
        looked.append(len(asked))
        return has_room(*asked)

    monkeypatch.setattr(server.engine, "has_room", counted)

    async def main() -> None:
        async with working(server) as worker:
            first = asyncio.create_task(Running.submit(worker, request(TEXTS[0])))
            await asyncio.to_thread(until, lambda: len(server.slow.asked) == 1)
            second = asyncio.create_task(Running.submit(worker, request(TEXTS[1])))
            await asyncio.sleep(0.05)
            assert worker.state().running == 0 and len(looked) < 20
            server.slow.may_read.set()
            one, two = await asyncio.gather(finished(await first), finished(await second))
            assert (one.reused_tokens, two.reused_tokens) == (89, 0)

    asyncio.run(main())


def test_who_leaves_while_its_text_is_read_leaves_nothing(tmp_path: Path) -> None:
    saved(tmp_path)
    [file] = tmp_path.glob("*.kv")
    server = SlowServer(tmp_path, max_bytes=file.stat().st_size + 1500)

    async def main() -> None:
        async with working(server) as worker:
            leaving = asyncio.create_task(Running.submit(worker, request(TEXTS[0])))
            await asyncio.to_thread(until, lambda: len(server.slow.asked) == 1)
            leaving.cancel()
            with pytest.raises((asyncio.CancelledError, BackendError)):
                await leaving
            await asyncio.to_thread(until, lambda: worker.state().waiting == 0)
            server.slow.may_read.set()
            assert (await finished(await Running.submit(worker, request(TEXTS[1])))).reused_tokens == 0

    asyncio.run(main())
    server.end()
    assert Server(tmp_path).reused(TEXTS[0]) == 0  # it was not held any more, and made room
    assert Server(tmp_path).reused(TEXTS[1]) == 89


def test_a_file_that_is_read_does_not_make_room(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    size = max(file.stat().st_size for file in tmp_path.glob("*.kv"))
    server = SlowServer(tmp_path, max_bytes=2 * size + 1500, max_sequences=1)
    done: list[int] = []
    [reading] = server.engine.read_ahead(request(TEXTS[0]), lambda: done.append(1))
    assert reading is not None and not reading.done()
    server.reused(TEXTS[2])
    server.reused(TEXTS[3])  # the one before is written: of the two there are, the older is being read
    until(lambda: len(list(tmp_path.glob("*.kv"))) == 2 and server.tiers.counts.kept == 1)
    server.slow.may_read.set()
    until(reading.done)
    assert done == [1] and server.engine.read_ahead(request(TEXTS[0]), lambda: None) == []
    assert server.reused(TEXTS[0]) == 89 and server.tiers.counts.refused == 0
    assert len(server.slow.asked) == 1
    del reading
    server.end()
    assert Server(tmp_path).reused(TEXTS[1]) == 0


def test_where_all_that_could_make_room_is_read_nothing_is_written(tmp_path: Path) -> None:
    saved(tmp_path)
    [file] = tmp_path.glob("*.kv")
    server = SlowServer(tmp_path, max_bytes=file.stat().st_size + 1500, max_sequences=1)
    [reading] = server.engine.read_ahead(request(TEXTS[0]), lambda: None)
    server.reused(TEXTS[1])
    server.reused(TEXTS[2])
    until(lambda: server.tiers.counts.not_written == 1)
    assert list(tmp_path.glob("*.kv")) == [file] and reading is not None
    server.slow.may_read.set()


def test_what_is_kept_is_written_while_nobody_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed loses nothing of what it had time to write."""
    monkeypatch.setattr("outrider.server.worker._REST_S", 0.01)
    server = SlowServer(tmp_path, max_sequences=8, capacity_tokens=1000)

    async def main() -> None:
        async with working(server) as worker:
            for text in TEXTS:
                await finished(await Running.submit(worker, request(text)))
            await asyncio.to_thread(until, lambda: len(list(tmp_path.glob("*.kv"))) == len(TEXTS))

    asyncio.run(main())
    again = Server(tmp_path)
    assert [again.reused(text) for text in TEXTS] == [89] * len(TEXTS)


# Forgetting


@pytest.fixture(params=["memory", "disk", "both"])
def full(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    path = None if request.param == "memory" else tmp_path
    server = Server(path, 0 if request.param == "disk" else LARGE, max_sequences=1)
    yield server
    server.end()


def test_what_is_forgotten_does_not_return(full: Server, tmp_path: Path) -> None:
    for text in TEXTS:
        full.reused(text)
    if full.disk is not None:
        until(lambda: bool(list(tmp_path.glob("*.kv"))))
    full.engine.reset()
    assert [full.reused(text) for text in TEXTS] == [0] * 4


def test_what_waits_to_be_written_is_forgotten_too(tmp_path: Path) -> None:
    server = SlowServer(tmp_path, max_sequences=1)
    server.slow.may_write.clear()
    for text in TEXTS[:3]:
        server.reused(text)
    server.engine.reset()
    server.slow.may_write.set()
    assert server.reused(TEXTS[0]) == 0
    server.end()
    assert len(list(tmp_path.glob("*.kv"))) == 1
    assert [Server(tmp_path).reused(text) for text in TEXTS[:3]] == [89, 0, 0]
