"""Files that were changed by chance end in a message, whatever is changed: a library that dies of one does so
in the child process that tries it first."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import pytest

import mutations
from backends import FILES, MAINLINE, NATIVE
from mutations import MUTATIONS, layout_of, mutated
from outrider.backends.gguf import guard
from outrider.core.errors import ModelFileError
from outrider.models.gguf import read_card
from tiny import ARCHITECTURES
from tiny_gguf import write_tiny

COUNT = 500
EACH_OF = 17
"""Of so many files that the header check lets through, every run tries one on each library."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The changed files: each kind of change, of one kind of model after the other."""
    folder = tmp_path_factory.mktemp("mutated")
    wholes = [write_tiny(folder / f"{arch}.gguf", arch=arch) for arch in ARCHITECTURES]
    layouts = {path: layout_of(path) for path in wholes}
    made: list[Path] = []
    numbers = count()
    while len(made) < COUNT:
        number = next(numbers)
        kind = list(MUTATIONS)[number % len(MUTATIONS)]
        whole = wholes[number // len(MUTATIONS) % len(wholes)]
        content = mutated(whole, layouts[whole], kind, number)
        if content == whole.read_bytes():  # zeros where zeros were, or an entry like the other
            continue
        made.append(folder / f"{number}_{whole.stem}_{kind.replace(' ', '_')}.gguf")
        made[-1].write_bytes(content)
    return made


def assert_message(message: Sequence[str], path: Path) -> None:
    """It names the file, why it cannot be used and what to do, in a line."""
    what, why, way_out = message
    assert what == str(path) and why.strip() and way_out.strip()
    assert "\n" not in f"{why}{way_out}"


def assert_survived(library: str, paths: Sequence[Path], cache: Path) -> dict[str, int]:
    """Go the way of a user's files with these, in a process of its own; how many ended at which stage."""
    package, tests = (
        str(Path(file).parents[n]) for file, n in ((guard.__file__, 3), (mutations.__file__, 0))
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((package, tests)),
        "OUTRIDER_CACHE": str(cache),
    }
    command = [sys.executable, mutations.__file__, str(FILES[library].path), *map(str, paths)]
    process = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    outcomes = [json.loads(line) for line in process.stdout.splitlines()]
    assert process.returncode == 0 and len(outcomes) == len(paths), (
        f"{library} ended the process (status {process.returncode}) at {paths[len(outcomes) :][:1]}: "
        f"{process.stderr[-500:]}"
    )
    stages: dict[str, int] = {}
    for path, (stage, message) in zip(paths, outcomes, strict=True):
        ended = "used" if message is None else stage
        stages[ended] = stages.get(ended, 0) + 1
        if message is not None:
            assert_message(message, path)
    return stages


@pytest.fixture(scope="module")
def passed(files: list[Path]) -> list[Path]:
    """Those whose header says nothing impossible; all others are refused with a message."""
    passed = []
    for path in files:
        try:
            read_card(path)
        except ModelFileError as error:
            assert_message((error.what, error.why, error.way_out), path)
        else:
            passed.append(path)
    return passed


def test_the_header_check_refuses_most_of_them_with_a_message(files: list[Path], passed: list[Path]) -> None:
    assert len(files) == COUNT and EACH_OF < len(passed) < COUNT / 2
    assert not [path.stem for path in passed if "cut" in path.stem or "magic" in path.stem]


@pytest.mark.parametrize(
    "library",
    [pytest.param(name, marks=[pytest.mark.slow] if name in MAINLINE[1:] else []) for name in NATIVE],
)
def test_a_sample_of_them_ends_in_a_message(passed: list[Path], library: str, tmp_path: Path) -> None:
    """Other files for each library."""
    part = passed[NATIVE.index(library) :: EACH_OF * len(NATIVE)]
    stages = assert_survived(library, part, tmp_path / "cache")
    assert "header" not in stages and len(part) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("library", NATIVE)
def test_all_of_them_end_in_a_message_on_every_library(
    files: list[Path], library: str, tmp_path: Path
) -> None:
    stages = assert_survived(library, files, tmp_path / "cache")
    assert stages["header"] > COUNT / 2 and stages["library"] and stages["used"]
