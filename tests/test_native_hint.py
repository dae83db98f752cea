"""That a library for this CPU is to be had is said once, where one could be built and none is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from native_builds import Machine, staged
from outrider.backends.native import hint_once, place
from outrider.backends.native.place import library_path


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = staged(tmp_path, monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return made


@pytest.mark.usefixtures("machine")
def test_it_is_said_once_in_one_line_and_claims_nothing_of_this_machine() -> None:
    line = hint_once()
    assert line is not None and "outrider setup --native" in line and "\n" not in line
    assert "on the machines where that was measured" in line
    assert hint_once() is None


@pytest.mark.usefixtures("machine")
def test_another_cpu_over_the_same_cache_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hint_once()
    monkeypatch.setattr(place, "cpu_id", lambda: "another")
    assert hint_once() and not hint_once()


def test_without_a_compiler_nothing_is_said_until_there_is_one(machine: Machine) -> None:
    (machine.root / "bin" / "c++").unlink()
    assert hint_once() is None
    machine.program("c++", "#!/bin/sh\n")
    assert hint_once()


@pytest.mark.usefixtures("machine")
def test_with_the_library_there_nothing_is_said() -> None:
    library_path().parent.mkdir(parents=True)
    library_path().touch()
    assert hint_once() is None


def test_where_it_cannot_be_kept_that_it_was_said_it_is_not(machine: Machine) -> None:
    (machine.root / "cache").write_text("no folder")
    assert hint_once() is None
