"""A build of llama.cpp that dies at its first call is found out in a child, and worked around."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from first_calls import REAL
from outrider.backends.gguf import guard
from outrider.backends.gguf.guard import check_build
from outrider.backends.gguf.libraries import build_id, candidates, installed
from outrider.backends.gguf.log import show_log
from outrider.backends.gguf.options import LoadOptions
from outrider.core.errors import BackendCrash, OutOfMemory
from outrider.core.notices import collect_notices
from outrider.costs.other_programs import OtherPrograms
from outrider.models.gguf import read_card
from tiny_gguf import write_tiny

OPTIONS = LoadOptions(threads=1, backend="llama.cpp", library="lib.so")
MODEL = Path("model.gguf")


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where outcomes are kept, in a cache of the test's own."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "builds.json"


class Children:
    """Stands in for the child processes: `outcome` gives the exit status under some options."""

    def __init__(self, outcome: Callable[[LoadOptions], int]) -> None:
        self.tried: list[LoadOptions] = []
        self._outcome = outcome

    def __call__(self, command: Sequence[str], _limit_s: float) -> int:
        assert command[-2] == str(MODEL)
        options = LoadOptions(**json.loads(command[-1]))
        self.tried.append(options)
        return self._outcome(options)


def ends(status: int) -> Children:
    """Children that all end so."""
    return Children(lambda _options: status)


def dies_repacked(options: LoadOptions) -> int:
    return -signal.SIGSEGV if options.extra_buffer_types else 0


def check(
    run: Callable[[Sequence[str], float], int] | Children,
    options: LoadOptions = OPTIONS,
    *,
    path: Path = MODEL,
    build: str = "build 1",
    quantization: str = "Q4_1",
    file: str = "content",
) -> tuple[LoadOptions, str | None]:
    card = SimpleNamespace(path=path, architecture="llama", quantization=quantization)
    library = SimpleNamespace(build_id=build, backend="llama.cpp", file=SimpleNamespace(path="lib.so"))
    with patch.object(guard, "_run_child", run), patch.object(guard, "fingerprint", lambda _path: file):
        return check_build(card, options, library)  # type: ignore[arg-type]


def test_a_build_that_works_is_left_alone_and_remembered(memory: Path) -> None:
    run = ends(0)
    for _ in range(3):
        assert check(run) == (OPTIONS, None)
    assert run.tried == [OPTIONS]
    assert [path.name for path in memory.parent.iterdir()] == ["builds.json"]


def test_a_build_whose_repacked_kernels_die_runs_without_them() -> None:
    run = Children(dies_repacked)
    plain = replace(OPTIONS, extra_buffer_types=False, backend_sampling=False)
    options, notice = check(run)
    assert options == plain and run.tried == [OPTIONS, plain]
    assert notice is not None and "\n" not in notice
    assert all(word in notice for word in ("llama Q4_1", "slower", "rebuild", "-mno-amx-int8"))
    # Remembered, the notice included.
    assert check(run) == (options, notice)
    assert len(run.tried) == 2


def test_a_build_that_always_dies_is_an_error_that_says_how() -> None:
    run = ends(-signal.SIGILL)
    with pytest.raises(BackendCrash, match="SIGILL") as caught:
        check(run)
    assert caught.value.what == str(MODEL) and "--backend" in caught.value.way_out
    assert len(run.tried) == 2
    # It may be another build the next time: nothing is remembered.
    assert check(ends(0)) == (OPTIONS, None)


def test_a_model_that_cannot_be_loaded_is_left_to_the_real_load(memory: Path) -> None:
    run = ends(1)
    assert check(run) == (OPTIONS, None) == check(run)
    assert len(run.tried) == 2 and not memory.exists()


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_that_was_killed_is_no_broken_build(memory: Path, signal_number: int) -> None:
    run = ends(-signal_number)
    with pytest.raises(OutOfMemory):
        check(run)
    assert not memory.exists()


def wrong_in_large_calls(options: LoadOptions) -> int:
    return guard.WRONG if options.micro_batch_tokens > 31 else 0


def test_a_library_that_is_wrong_in_large_calls_is_given_small_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = Children(wrong_in_large_calls)
    options, notice = check(run)
    assert options == replace(OPTIONS, micro_batch_tokens=31) and len(run.tried) == 2
    assert notice is None and capsys.readouterr().err == "", "a detail"
    show_log(True)
    assert check(run) == (options, notice) and len(run.tried) == 2
    show_log(False)
    assert "computes long calls wrongly with " in capsys.readouterr().err
    small, _ = check(run, LoadOptions(threads=1, micro_batch_tokens=8), file="other")
    assert small.micro_batch_tokens == 8


def test_a_library_that_is_always_wrong_is_not_used(memory: Path) -> None:
    with pytest.raises(BackendCrash, match="wrongly"):
        check(ends(guard.WRONG))
    assert not memory.exists()


def test_plain_kernels_that_were_asked_for_are_all_that_is_tried() -> None:
    plain, run = replace(OPTIONS, extra_buffer_types=False), ends(-signal.SIGILL)
    with pytest.raises(BackendCrash) as caught:
        check(run, plain)
    assert run.tried == [plain] and "kernels" not in caught.value.why
    assert check(ends(0), plain) == (plain, None)


def test_builds_kinds_of_model_devices_and_cpus_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ends(0)
    asked: list[dict[str, Any]] = [{}, {"build": "build 2"}, {"quantization": "Q4_0"}, {"file": "another"}]
    asked += [{"options": LoadOptions(gpu_layers=0)}]
    for given in [*asked, *asked]:  # all are still known
        check(run, **given)
    assert len(run.tried) == 5
    monkeypatch.setattr(guard, "cpu_id", lambda: "another")
    check(run)
    assert len(run.tried) == 6


def test_what_does_not_change_the_kernels_is_not_tried_again() -> None:
    run = Children(dies_repacked)
    check(run)
    asked = replace(OPTIONS, threads=2, batch_tokens=64)
    options, _ = check(run, asked)
    assert options == replace(asked, extra_buffer_types=False, backend_sampling=False)
    assert len(run.tried) == 2


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b'"works"', b"[" * 20_000])
def test_a_damaged_memory_is_replaced_with_a_word(memory: Path, content: bytes) -> None:
    run = ends(0)
    memory.write_bytes(content)
    with collect_notices() as notices:
        assert check(run) == (OPTIONS, None)
    assert len(notices) == 1 and str(memory) in notices[0]
    assert check(run) == (OPTIONS, None)
    assert len(run.tried) == 1


@pytest.mark.parametrize("outcome", ["broken", 17, None, ["works"]])
def test_an_outcome_that_makes_no_sense_is_tried_again(memory: Path, outcome: object) -> None:
    check(ends(0))
    memory.write_text(json.dumps({key: outcome for key in json.loads(memory.read_text())}))
    run = Children(dies_repacked)
    options, notice = check(run)
    assert not options.extra_buffer_types and notice
    assert check(run) == (options, notice) and len(run.tried) == 2


def test_a_memory_that_cannot_be_written_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "folder" / "builds.json").mkdir(parents=True)
    run = Children(dies_repacked)
    for folder in ("file", "folder"):
        monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / folder))
        for _ in range(2):
            options, notice = check(run)
            assert not options.extra_buffer_types and notice
    assert len(run.tried) == 8
    assert list((tmp_path / "folder").iterdir()) == [tmp_path / "folder" / "builds.json"]


# With real children


def test_the_first_calls_are_really_made_in_a_child(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_tiny(tmp_path / "own.gguf")
    # A user's folder may hold files that are named like modules.
    (tmp_path / "json.py").write_text("raise SystemExit(3)")
    (tmp_path / "numpy.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    # The plain kernels work on any machine; what the repacked ones do here is not this test's matter.
    card, library = read_card(path), next(candidates(LoadOptions()))
    with patch.object(guard, "_run_child", REAL):
        options, _ = check_build(card, LoadOptions(threads=1), library)
    assert len(json.loads(memory.read_text())) == 1
    assert (options.threads, options.backend) == (1, library.backend)
    assert capfd.readouterr() == ("", "")


def test_a_real_child_that_cannot_load_its_model_says_so_by_its_status(tmp_path: Path, memory: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"no model")
    assert check(REAL, path=bad) == (OPTIONS, None) and not memory.exists()


@pytest.mark.parametrize(("others", "threads"), [(0.1, 4), (1.2, 3), (4.0, 1)])
def test_the_child_leaves_their_cores_to_other_programs(
    monkeypatch: pytest.MonkeyPatch, others: float, threads: int
) -> None:
    found = list[LoadOptions]()

    def weights(_path: Path, options: LoadOptions) -> None:
        found.append(options)
        raise BackendCrash("model.gguf", "it is not loaded here", "")

    monkeypatch.setattr(OtherPrograms, "cores", lambda _self: others)
    monkeypatch.setattr(guard, "Weights", weights)
    assert guard.main("model.gguf", '{"threads": 4, "threads_batch": 8}') == 1
    assert (found[0].threads, found[0].threads_batch) == (threads, threads)


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_real_crash_is_seen_as_one(
    memory: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    crashing = "import os, signal, sys; '\"extra_buffer_types\": true' in sys.argv[2] and "
    crashing += "(print('last words'), os.kill(os.getpid(), signal.SIGSEGV))"
    real = subprocess.run

    def run(command: Sequence[str], **settings: Any) -> Any:
        return real([sys.executable, "-c", crashing, *command[-2:]], **settings)

    monkeypatch.setattr(subprocess, "run", run)
    options, notice = check(REAL)
    assert not options.extra_buffer_types and notice is not None and "crashes" in notice
    assert list(json.loads(memory.read_text()).values()) == ["works without extra buffer types"]
    assert capfd.readouterr() == ("", "")


def test_a_child_that_does_not_come_back_is_ended(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's first call of a Gemma 3 whose rope.dimension_count is 0 has no end."""
    real = subprocess.run

    def run(_command: Sequence[str], **settings: Any) -> Any:
        return real([sys.executable, "-c", "import time; time.sleep(600)"], **settings)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(guard, "_LIMIT_S", 0.1)
    with pytest.raises(BackendCrash, match="did not end within 0 s") as raised:
        check(REAL)
    assert raised.value.what == str(MODEL) and "--backend" in raised.value.way_out
    assert not memory.exists()


def test_a_build_is_named_by_its_version_and_binaries() -> None:
    [first, *_] = installed()
    assert first.build_id.startswith(f"{first.source} {first.version} ")
    assert len({file.build_id for file in installed()}) == len(installed()), "each build is another"
    assert build_id() == build_id()
