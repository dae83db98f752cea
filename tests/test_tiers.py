"""KV that leaves a model: kept in memory and on disk, restored as if it had been read, never for another."""

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from time import monotonic, sleep
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import GREEDY, LANGUAGE, PROMPT, VOCABULARY, ScriptedDrafter, language_model, plain
from examples import examples
from full_disk import file_size_limit
from outrider.backends.fake import FakeModel
from outrider.core.contracts import SavedState
from outrider.core.data import Request
from outrider.core.errors import BackendError, SettingError
from outrider.core.notices import collect_notices
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.engine.tiers.disk import Disk
from outrider.engine.tiers.store import KvTiers
from outrider.models.vocab import align
from outrider.policy.fixed import FixedPolicy

LARGE = 2**30
TEXTS = [tuple((i + j * (i + 2)) % 5 for j in range(90)) for i in range(4)]


def request(prompt: Sequence[int], scope: str = "", max_tokens: int = 4) -> Request:
    return Request(tuple(prompt), GREEDY, max_tokens=max_tokens, ignore_end=True, scope=scope)


def disk_in(path: Path, max_bytes: int = LARGE, identity: str = "a model") -> Disk:
    return Disk(path, identity, max_bytes)


def tiers_of(model: FakeModel, memory: int = LARGE, disk: Disk | None = None) -> KvTiers:
    """Copies take no time by their clock: they always pay."""
    return KvTiers(model, memory_bytes=memory, disk=disk, clock=lambda: 0.0)


class Server:
    """An engine whose KV holds little, with tiers; restarted by making another one of the same folder."""

    def __init__(self, path: Path | None, memory: int = 0, max_bytes: int = LARGE, **options: Any) -> None:
        self.model = language_model(**{"max_sequences": 2, "capacity_tokens": 200, **options})
        self.disk = disk_in(path, max_bytes) if path else None
        with collect_notices() as self.notices:
            self.tiers = tiers_of(self.model, memory, self.disk)
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

    def settle(self) -> None:
        """Until all that waits is written."""
        self.tiers.will_close(monotonic() + 60)
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
    server.settle()
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
            tiers_of(model, LARGE, disk_in(folder)) if tier == "disk" else tiers_of(model)
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


def test_what_takes_longer_than_reading_is_not_done() -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1000.0
        return now[0]

    model = language_model(max_sequences=1)
    tiers = KvTiers(model, memory_bytes=LARGE, clock=clock)
    engine = Engine(model, kv_store=tiers)
    for text in (*TEXTS, *TEXTS):
        assert engine.generate(request(text)).reused_tokens == 0
    assert tiers.counts.hits["memory"] == 0 and tiers.counts.kept == 1  # the first says what copies take


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
        tiers = tiers_of(model, memory, disk)
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
