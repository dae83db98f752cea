"""KV that leaves a model: kept in memory and on disk, restored as if it had been read, never for another;
read ahead from a slow disk while others go on; forgotten for good."""

import asyncio
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from threading import Event
from time import monotonic, sleep
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import LANGUAGE, PROMPT, VOCABULARY, ScriptedDrafter, language_model, plain, request
from examples import examples
from full_disk import file_size_limit
from outrider import Session
from outrider.backends.fake import FakeModel
from outrider.core.contracts import SavedState
from outrider.core.data import Completion, Request
from outrider.core.errors import BackendError, SettingError
from outrider.core.notices import collect_notices
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.engine.tiers import Disk, KvTiers, SavedText
from outrider.models.vocab import align
from outrider.policy.fixed import FixedPolicy
from outrider.server.worker import Worker
from serving import Running

LARGE = 2**30
TEXTS = [tuple((i + j * (i + 2)) % 5 for j in range(90)) for i in range(4)]


def disk_in(path: Path, max_bytes: int = LARGE, identity: str = "a model") -> Disk:
    return Disk(path, identity, max_bytes)


class Server:
    """An engine whose KV holds little, with tiers; restarted by making another one of the same folder."""

    def __init__(self, path: Path | None, memory: int = 0, max_bytes: int = LARGE, **options: Any) -> None:
        self.model = language_model(**{"max_sequences": 2, "capacity_tokens": 200, **options})
        self.disk = disk_in(path, max_bytes) if path else None
        with collect_notices() as self.notices:
            self.tiers = KvTiers(self.model, memory_bytes=memory, disk=self.disk)
        self.engine = Engine(self.model, kv_store=self.tiers)

    def reused(self, prompt: Sequence[int], scope: str = "") -> int:
        """Tokens of a prompt that were not read; the answer is that of an engine without tiers."""
        completion = self.engine.generate(request(prompt, scope))
        assert completion.tokens == plain(language_model(), request(prompt))[0]
        return completion.reused_tokens

    def end(self) -> None:
        """What SIGTERM does."""
        self.tiers.will_close(monotonic() + 60)
        self.engine.reset(texts=False)
        self.tiers.close()


def test_what_made_room_comes_back_from_memory() -> None:
    server = Server(None, LARGE)
    assert [server.reused(text) for text in TEXTS] == [0, 0, 0, 0]
    assert [server.reused(text) for text in TEXTS] == [89, 89, 89, 89]
    counts = server.tiers.counts
    assert counts.hits["memory"] >= 2 and counts.restored_tokens["memory"] == 89 * counts.hits["memory"]
    assert 0 < counts.num_bytes["memory"] <= LARGE and counts.misses == 4


@pytest.mark.parametrize("attends_to_all", [False, True])
def test_what_slows_other_calls_is_put_away_when_one_begins(attends_to_all: bool) -> None:
    server = Server(None, LARGE, capacity_tokens=1000)
    server.model.attends_to_all = attends_to_all
    server.reused(TEXTS[0])
    one = server.engine.used_tokens
    server.reused(TEXTS[1])
    assert server.engine.used_tokens == (one if attends_to_all else 2 * one)
    assert server.reused(TEXTS[0]) == 89
    assert server.tiers.counts.hits["memory"] == attends_to_all


def test_of_memory_no_more_is_used_than_may_be_and_the_oldest_goes_first() -> None:
    server = Server(None, 8 * 100 * 2, max_sequences=1)  # two of the texts: a fake's token has 8 bytes
    for text in TEXTS:
        server.reused(text)
    assert server.tiers.counts.num_bytes["memory"] <= 1600
    assert server.reused(TEXTS[0]) == 0
    assert server.reused(TEXTS[3]) == 89


@pytest.mark.parametrize("delay_s", [0.0, 0.02])
def test_after_a_restart_texts_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delay_s: float
) -> None:
    """What waits for a slow disk is written, too."""
    write = Disk.write

    def slow(*given: Any) -> int:
        sleep(delay_s)
        return write(*given)

    monkeypatch.setattr(Disk, "write", slow)
    first = Server(tmp_path)
    first.tiers.will_close(monotonic() + 60)
    for text in TEXTS:
        first.reused(text)
    first.end()
    assert first.tiers.counts.kept == len(list(tmp_path.glob("*.kv"))) == 4
    second = Server(tmp_path)
    assert {tuple(text[:90]) for text in second.tiers.recall("")} == set(TEXTS)
    assert second.tiers.recall("another namespace") == []
    assert [second.reused(text) for text in TEXTS] == [89] * 4
    assert second.tiers.counts.hits["disk"] == 4 and second.notices == []


def test_files_are_private_and_their_names_say_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    server = Server(folder)
    server.reused(TEXTS[0], "anna")
    server.end()
    assert os.stat(folder).st_mode & 0o777 == 0o700
    files = list(folder.iterdir())
    assert len(files) == 2 and all(os.stat(file).st_mode & 0o777 == 0o600 for file in files)
    assert not any(b"anna" in file.read_bytes() for file in files)


def test_a_longer_text_replaces_its_own_beginning(tmp_path: Path) -> None:
    server = Server(tmp_path, LARGE, max_sequences=1, capacity_tokens=256)
    turn = (*TEXTS[0], *plain(language_model(), request(TEXTS[0]))[0])
    for text in (TEXTS[0], TEXTS[1], (*turn, *TEXTS[2]), TEXTS[1]):
        server.reused(text)
    server.tiers.will_close(monotonic() + 60)
    server.tiers.close()
    assert len(list(tmp_path.glob("*.kv"))) == 2
    assert Server(tmp_path).reused(TEXTS[0]) == 89  # cut out of the longer one


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_nothing_reaches_another_namespace(tmp_path: Path, tier: str) -> None:
    server = Server(tmp_path if tier == "disk" else None, LARGE if tier == "memory" else 0, max_sequences=1)
    assert server.reused(TEXTS[0], "one") == server.reused(TEXTS[0], "two") == 0
    assert server.reused(TEXTS[1], "one") == 0
    server.tiers.will_close(monotonic() + 60)
    assert server.reused(TEXTS[0], "three") == 0
    assert server.reused(TEXTS[0], "") == 0
    assert server.engine.read_ahead(request(TEXTS[0], "four"), lambda: None) == []
    assert server.reused(TEXTS[0], "one") == 89
    server.end()
    if tier == "disk":
        again = Server(tmp_path)
        assert again.engine.read_ahead(request(TEXTS[1], "two"), lambda: None) == []
        assert again.engine.read_ahead(request(TEXTS[1], "one"), lambda: None)
        assert again.reused(TEXTS[1], "two") == 0
        assert again.reused(TEXTS[1], "one") == 89


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_a_draft_models_kv_leaves_and_comes_back_like_the_targets(tmp_path: Path, tier: str) -> None:
    """Two texts take turns where there is room for one; from disk, with a restart between."""

    def opened() -> tuple[Engine, FakeModel, list[KvTiers]]:
        models = [language_model(max_sequences=1), FakeModel(VOCABULARY, LANGUAGE, max_sequences=1)]
        folders = [tmp_path / "target", tmp_path / "draft"]
        stores = [
            KvTiers(model, memory_bytes=LARGE, disk=disk_in(folder) if tier == "disk" else None)
            for model, folder in zip(models, folders, strict=True)
        ]
        drafter = ModelDrafter(models[1], align(VOCABULARY, VOCABULARY))
        engine = Engine(models[0], [drafter], FixedPolicy(), kv_store=stores[0], draft_kv_store=stores[1])
        return engine, models[1], stores

    engine, draft, stores = opened()
    for round_ in range(2):
        for text in TEXTS[:2]:
            num_calls = len(draft.calls)
            completion = engine.generate(request(text, max_tokens=8))
            assert completion.tokens == plain(language_model(), request(text, max_tokens=8))[0]
            read = sum(len(span.tokens) for call in draft.calls[num_calls:] for span in call)
            assert read < 20 if round_ else read > 80
        if tier == "disk" and not round_:
            for store in stores:
                store.will_close(monotonic() + 60)
            engine.reset(texts=False)
            for store in stores:
                store.close()
            engine, draft, stores = opened()
    engine.reset()
    assert stores[1].counts.num_bytes[tier] == 0, "for good"


def test_the_disk_has_its_limit_too_and_what_was_used_longest_ago_goes(tmp_path: Path) -> None:
    server = Server(tmp_path)
    for text in TEXTS[:3]:
        server.reused(text)
    server.end()
    size = max(path.stat().st_size for path in tmp_path.glob("*.kv"))
    server = Server(tmp_path)
    assert server.reused(TEXTS[0]) == 89  # which makes it the last used
    server.end()
    server = Server(tmp_path, max_bytes=3 * size + 1500, max_sequences=1)
    server.reused(TEXTS[3])
    server.end()
    assert sum(path.stat().st_size for path in tmp_path.glob("*.kv")) <= 3 * size + 1500
    again = Server(tmp_path)
    assert again.reused(TEXTS[0]) == 89
    assert [again.reused(text) for text in TEXTS[1:3]].count(0) == 1


def test_a_text_larger_than_the_disk_may_have_is_not_written(tmp_path: Path) -> None:
    server = Server(tmp_path, max_bytes=1000)
    server.reused(TEXTS[0])
    server.end()
    assert not list(tmp_path.glob("*.kv")) and server.tiers.counts.not_written == 1


def kept_files(path: Path) -> list[Path]:
    server = Server(path)
    for text in TEXTS[:2]:
        server.reused(text)
    server.end()
    return sorted(path.glob("*.kv"))


def test_a_full_disk_is_one_line_and_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(tmp_path, max_sequences=1)
    with file_size_limit(1000), caplog.at_level(logging.WARNING):
        for text in (*TEXTS, *TEXTS):
            server.reused(text)
        server.end()
    assert len(caplog.messages) == 1 and "file too large" in caplog.messages[0]
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


HOSTILE: dict[str, Callable[[bytes], bytes]] = {
    "torn": lambda data: data[: len(data) // 2],
    "without its last byte": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "empty": lambda _data: b"",
    "of another version": lambda data: data.replace(b"kv\n0001", b"kv\n0000", 1),
    "no file of KV": lambda data: b"\x7fELF" + data[4:],
    "with another head": lambda data: data.replace(b'"any_from":0', b'"any_from":1', 1),
    "of an endless head": lambda data: data[:16] + b"\xff" * 8 + data[24:],
    "of another user": lambda data: data.replace(b'"scope":"', b'"scope":"0', 1),
}


@pytest.mark.parametrize("damage", HOSTILE)
def test_a_file_that_cannot_be_trusted_is_one_line(tmp_path: Path, damage: str) -> None:
    bad, good = kept_files(tmp_path)
    bad.write_bytes(HOSTILE[damage](bad.read_bytes()))
    server = Server(tmp_path)
    assert len(server.notices) == 1 and str(bad) in server.notices[0]
    assert sorted(server.reused(text) for text in TEXTS[:2]) == [0, 89]
    assert good.exists()


def test_data_that_was_changed_is_found_when_it_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for path in kept_files(tmp_path):
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)
    server = Server(tmp_path, LARGE)
    with caplog.at_level(logging.WARNING):
        assert [server.reused(text) for text in TEXTS[:2]] == [0, 0]
    assert ["its data was changed" in line for line in caplog.messages] == [True, True]
    assert server.tiers.counts.refused == 2


def test_a_file_under_the_name_of_another_is_not_used(tmp_path: Path) -> None:
    one, two = kept_files(tmp_path)
    server = Server(tmp_path)
    one.write_bytes(two.read_bytes())
    assert sorted(server.reused(text) for text in TEXTS[:2]) == [0, 89]


def test_links_pipes_and_folders_are_not_opened(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    one, two = kept_files(folder)
    outside = tmp_path / "outside"
    one.rename(outside)
    one.symlink_to(outside)
    two.unlink()
    os.mkfifo(two)
    (folder / f"{two.stem}x.kv").mkdir()
    server = Server(folder)
    assert len(server.notices) == 3
    assert [server.reused(text) for text in TEXTS[:2]] == [0, 0]


def test_files_of_other_models_are_counted_and_left(tmp_path: Path) -> None:
    kept_files(tmp_path)
    other = disk_in(tmp_path, identity="another model")
    with collect_notices() as notices:
        assert list(other.found()) == []
    assert len(notices) == 1 and "2 files are of another model" in notices[0]
    assert other.num_bytes > 0 and len(list(tmp_path.glob("*.kv"))) == 2


def test_a_folder_that_cannot_be_used_is_said_with_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match="--cache-dir"):
        disk_in(tmp_path / "file")
    (tmp_path / "secret").write_bytes(b"short")
    with pytest.raises(SettingError, match="damaged"):
        disk_in(tmp_path)


def test_what_a_program_that_died_left_is_removed(tmp_path: Path) -> None:
    for age_s in (10, 10_000):
        left = tmp_path / f"{age_s}.kv.partial"
        left.write_bytes(b"half")
        os.utime(left, (left.stat().st_mtime - age_s,) * 2)
    list(disk_in(tmp_path).found())
    assert [path.name for path in tmp_path.glob("*.partial")] == ["10.kv.partial"]


def test_a_copy_that_the_model_refuses_leaves_everything_as_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(None, LARGE, max_sequences=1)
    server.reused(TEXTS[0])
    server.reused(TEXTS[1])

    def refuse(_sequence: int, _state: SavedState) -> None:
        raise BackendError("restore", "it was told to fail")

    monkeypatch.setattr(server.model, "restore", refuse)
    with caplog.at_level(logging.WARNING):
        assert server.reused(TEXTS[0]) == 0
        assert server.reused(TEXTS[0]) == 89  # from the model's own cache
    assert len(caplog.messages) == 1
    monkeypatch.undo()
    assert server.reused(TEXTS[1]) in (0, 89)


@pytest.mark.parametrize("rewind", ["free", "checkpoints", "none"])
@settings(max_examples=examples(25))
@given(data=st.data())
def test_with_tiers_every_text_is_that_of_a_request_alone(
    rewind: Any, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("tiers") if data.draw(st.booleans()) else None
    capacity = data.draw(st.integers(130, 400))
    options: dict[str, Any] = {
        "max_sequences": data.draw(st.integers(1, 4)),
        "capacity_tokens": capacity,
        "context_length": 120,
        "rewind": rewind,
    }
    # How many steps there are depends on when the disk is written to: no draw may.
    cancels = Random(data.draw(st.integers(0, 2**32)))
    stems = [PROMPT * 8, (3, *PROMPT * 8), PROMPT * 12, (2, 1)]
    for _ in range(data.draw(st.integers(1, 3))):  # starts of a server
        memory = data.draw(st.sampled_from([0, 1000, 4000, LARGE]))
        disk = disk_in(path, data.draw(st.sampled_from([3000, 20_000, LARGE]))) if path else None
        model = FakeModel(VOCABULARY, LANGUAGE, **options)
        tiers = KvTiers(model, memory_bytes=memory, disk=disk)
        engine = Engine(model, [ScriptedDrafter(lambda text, most: text[:most])], kv_store=tiers)
        waiting = [
            request(
                (*data.draw(st.sampled_from(stems)), *data.draw(st.lists(st.integers(0, 4), max_size=6))),
                data.draw(st.sampled_from(["", "other"])),
                data.draw(st.integers(1, 20)),
            )
            for _ in range(data.draw(st.integers(1, 6)))
        ]
        started: dict[int, Request] = {}
        ahead: list[object] = []
        answers: dict[int, list[int]] = defaultdict(list)
        while waiting or engine.num_running:
            if waiting and cancels.randrange(2):
                ahead = [engine.read_ahead(waiting[0], lambda: None), *ahead[: cancels.randrange(3)]]
            if waiting and engine.has_room(waiting[0]):
                made = waiting.pop(0)
                started[engine.submit(made)] = made
            if cancels.randrange(32) == 0:
                engine.reset()
            if cancels.randrange(16) == 0 and started:
                engine.cancel(max(started))
            for update in engine.step():
                made, tokens = started[update.record.request], answers[update.record.request]
                tokens.extend(update.record.tokens)
                assert plain(language_model(context_length=120), made)[0][: len(tokens)] == tuple(tokens)
            assert engine.used_tokens <= capacity
            # What waits for the disk is in memory until it is written.
            assert disk is not None or tiers.counts.num_bytes["memory"] <= memory
        if data.draw(st.booleans()):  # else it is killed
            tiers.will_close(monotonic() + 60)
            engine.reset(texts=False)
        tiers.will_close(monotonic() + 60)
        tiers.close()


# A slow disk

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
        self.tiers = KvTiers(self.model, memory_bytes=memory, disk=self.slow)
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
