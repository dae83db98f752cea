"""`outrider setup`: what is there, and what a build looks like to the one who waits for it."""

import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from cli_helpers import Call, refused
from native_builds import COMPILER, Machine, staged
from outrider.backends.gguf.library import LibraryFile
from outrider.backends.native import native_library
from outrider.backends.native.build import build_native

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = staged(tmp_path, monkeypatch)
    source, recipe = made.source, made.recipe
    monkeypatch.setattr("outrider.backends.native.build.build_native", partial(build_native, recipe=recipe))
    monkeypatch.setattr("outrider.backends.native.IK", source)
    monkeypatch.setattr("outrider.backends.native.MAINLINE", replace(source, target="outrider-cuda"))
    monkeypatch.setattr("outrider.backends.native.native_library", partial(native_library, source, recipe))
    # What is installed here is kept for the whole process: nothing of this machine may get into it.
    monkeypatch.setattr(
        "outrider.backends.gguf.libraries.installed", lambda: _files(native_library(source, recipe))
    )
    monkeypatch.setattr("outrider.backends.gguf.libraries.why_not", lambda _file: None)
    monkeypatch.setattr("outrider.backends.gguf.libraries.describe_gpus", lambda _file: [])
    monkeypatch.setattr(
        "outrider.models.embedded.embedded_default", lambda _progress: tmp_path / "model.gguf"
    )
    return made


def _files(built: Path | None) -> list[LibraryFile]:
    return [LibraryFile(built, "ik_llama.cpp for this CPU")] if built else []


@pytest.fixture
def setup(outrider: Call) -> Call:
    return partial(outrider, "setup")


def test_a_build_is_asked_for_made_and_shown(machine: Machine, setup: Call) -> None:
    before, built = setup(), setup("--native")
    assert before.status == built.status == 0 and "outrider setup --native" in before.out
    path = re.search(r"built and decodes \([\d.]+ [kM]B, compiled in [\d.]+ s\): (\S+)\n", built.out)
    assert path is not None and Path(path[1]).is_file()
    said = built.err.splitlines()
    assert [line.partition(":")[0] for line in said] == [
        "fetching ik_llama.cpp",
        "compiling ik_llama.cpp for this CPU",
        "trying its first decode",
    ]
    assert path[1] in setup().out
    again = setup("--native")
    assert again.status == 0 and "there already" in again.out
    assert len([one for one in machine.calls if "--dest" in one]) == 1
    assert "built and decodes" in setup("--native", "--force").out
    assert len([one for one in machine.calls if "--dest" in one]) == 2
    assert "Add --native" in refused(setup("--force"))


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP"])
def test_a_signal_leaves_nothing_and_says_so(machine: Machine, setup: Call, name: str) -> None:
    machine.write("recipe/build.sh", f'touch "$1/half"; kill -{name} {os.getpid()}; sleep 100\n')
    ended = setup("--native")
    assert ended.status == 130
    assert ended.err.endswith("\ninterrupted\n")
    assert machine.left == []
