"""A library compiled for this CPU: fetched by its hash, whole or not at all, found again."""

import ctypes
import fcntl
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep

import pytest

from native_builds import (
    CMAKE,
    COMPILER,
    COMPILES,
    DELIVERS,
    PIP,
    Machine,
    archive_of,
    is_running,
    source_of,
    staged,
)
from outrider.backends.native import native_library
from outrider.core.errors import BuildError, SettingError

GUARD_S = 30.0

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return staged(tmp_path, monkeypatch)


def found(machine: Machine) -> Path | None:
    return native_library(machine.source, machine.recipe)


def test_it_is_built_tried_and_found_again(machine: Machine) -> None:
    assert found(machine) is None
    made = machine.build()
    assert made.built
    assert found(machine) == made.path
    assert ctypes.CDLL(str(made.path)).outrider_first_decode(b"model") == 0
    assert machine.left == [made.path.parent.name]
    assert [file.name for file in made.path.parent.iterdir()] == [machine.source.library]
    assert list(dict.fromkeys(stage for stage, _ in machine.stages)) == ["fetching", "compiling", "trying"]
    assert [done for stage, done in machine.stages if stage == "compiling"] == [0.0, 0.5, 1.0]
    assert f"tiny-ik==1.0 --hash=sha256:{machine.source.sha256}" not in machine.calls[0]  # it is in a file
    assert "--no-deps" in machine.calls[0] and "--no-binary tiny-ik" in machine.calls[0]
    before, again = machine.calls, machine.build()
    assert (again.built, again.path) == (False, made.path) and machine.calls == before


def test_force_builds_anew(machine: Machine) -> None:
    first = machine.build()
    first.path.write_bytes(b"old")
    again = machine.build(force=True)
    assert again.built
    assert again.path == first.path
    assert again.path.read_bytes() != b"old"
    # In the same folder, by whose path a compiler's cache knows what it has.
    configured = [call for call in machine.calls if call.startswith("cmake -S")]
    assert len(configured) == 2 and len(set(configured)) == 1
    before = again.path.read_bytes()
    machine.program("cmake", CMAKE.replace("--build) sh", "--build) exit 1; sh"))
    with pytest.raises(BuildError):
        machine.build(force=True)
    assert again.path.read_bytes() == before, "one that fails leaves what was there"


def test_another_cpu_another_source_and_another_recipe_need_builds_of_their_own(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.build()
    assert native_library(replace(machine.source, version="1.1"), machine.recipe) is None
    assert native_library(replace(machine.source, sha256="0" * 64), machine.recipe) is None
    with monkeypatch.context() as patched:
        patched.setattr("outrider.backends.native.place.cpu_id", lambda: "another")
        assert found(machine) is None
    assert found(machine) is not None
    machine.write("recipe/code.c", "/* other flags */")
    assert found(machine) is None


# What is fetched


ESCAPING = archive_of({"../../../../escaped": "", "tiny-ik-1.0/vendor/tiny/CMakeLists.txt": ""})
HAS_FILTERS = hasattr(tarfile, "data_filter")


@pytest.mark.parametrize(
    ("archive", "why"),
    [
        (b"not an archive", "cannot be unpacked"),
        (archive_of({"tiny-ik-1.0/README": ""}), "no vendor/tiny"),
        pytest.param(ESCAPING, "cannot be unpacked", marks=pytest.mark.skipif(not HAS_FILTERS, reason="old")),
    ],
    ids=["no archive", "another", "out of its folder"],
)
def test_a_source_that_is_no_source_is_refused(machine: Machine, archive: bytes, why: str) -> None:
    machine.serve(archive)
    machine.source = source_of(archive)
    with pytest.raises(BuildError, match=why):
        machine.build()
    assert machine.left == [] and not list(machine.root.rglob("escaped"))


# What fails


def test_a_source_that_does_not_compile_gives_one_line_with_the_place_of_the_log(machine: Machine) -> None:
    machine.write("recipe/code.c", "int broken(void) { return missing; }\n")
    with pytest.raises(BuildError) as caught:
        machine.build()
    message = str(caught.value)
    assert "\n" not in message
    assert "tiny-ik 1.0: it cannot be compiled here" in message
    assert "code.c:1:" in message and "error: " in message and "missing" in message
    log = machine.builds / "build.log"
    assert str(log) in message
    assert "missing" in log.read_text()
    assert machine.left == ["build.log"]
    machine.set_up()
    machine.write("cache/native/.build-killed/half", "")  # of a build that was killed
    made = machine.build()
    assert machine.left == [made.path.parent.name], "what others left is taken away"


REFUSES = 'echo "CMake Error at CMakeLists.txt:9 (project):"; echo; echo "  The C compiler is broken."'
INTERRUPTED = 'echo "[1/2] Building"; echo "ninja: build stopped: interrupted by user."; exit 2'
FULL = 'echo "error: code.o: No space left on device"; exit 1\n'
ABORTS = "#include <stdlib.h>\nint outrider_first_decode(void) { abort(); }\n"


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("bin/pip3", f"{PIP}echo 'no route to the index' >&2; exit 1\n", "no route to the index"),
        ("bin/pip3", PIP + FULL, "its disk is full.*OUTRIDER_CACHE"),
        (
            "bin/cmake",
            CMAKE.replace("-S*)", f"-S*) {REFUSES}; exit 1;;\nnever)"),
            r"txt:9 \(project\): The C co",
        ),
        ("recipe/build.sh", INTERRUPTED, r"compiled here \(ninja: build stopped: interrupted by user\.\)"),
        ("recipe/build.sh", FULL, "its disk is full.*OUTRIDER_CACHE"),
        ("recipe/code.c", ABORTS, "signal 6"),
        ("recipe/code.c", "int outrider_first_decode(void) { return 1; }\n", "cannot decode"),
        ("recipe/code.c", "int another(void) { return 0; }\n", "cannot decode"),
    ],
)
def test_what_fails_is_said_and_nothing_but_a_log_is_kept(
    machine: Machine, file: str, text: str, said: str
) -> None:
    machine.write(file, text)
    with pytest.raises(BuildError, match=said):
        machine.build()
    assert found(machine) is None
    assert set(machine.left) <= {"build.log"}


def test_without_a_compiler_one_line_says_so_before_anything_is_fetched(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(machine.root / "bin"))
    (machine.root / "bin" / "c++").unlink()
    with pytest.raises(BuildError, match=r"C\+\+ compiler") as caught:
        machine.build()
    assert "apt install g++" in caught.value.way_out
    assert machine.calls == []
    monkeypatch.setenv("CXX", "no-such-compiler -x")
    with pytest.raises(BuildError, match="no-such-compiler"):
        machine.build()
    machine.program("own-c++", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", f"{machine.root / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("CXX", "own-c++ -pipe")
    assert machine.build().built


# What ends it halfway


def test_ctrl_c_leaves_nothing(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIDS", str(machine.root / "pids"))
    machine.write(
        "recipe/build.sh",
        'sleep 100 & echo $! > "$PIDS"; echo $$ >> "$PIDS"; touch "$1/half"; echo "[1/2] Building"; wait\n',
    )
    record = machine.stages.append

    class CtrlC(list[tuple[str, float]]):
        def append(self, shown: tuple[str, float]) -> None:
            record(shown)
            if shown == ("compiling", 0.5):
                raise KeyboardInterrupt

    machine.stages = CtrlC()
    with pytest.raises(KeyboardInterrupt):
        machine.build()
    assert machine.left == []
    assert found(machine) is None
    pids = [int(word) for word in (machine.root / "pids").read_text().split()]
    assert len(pids) == 2
    until_s = monotonic() + GUARD_S  # they were sent a signal, which a busy machine may deliver later
    while any(is_running(pid) for pid in pids) and monotonic() < until_s:
        sleep(0.01)
    assert not any(is_running(pid) for pid in pids)


def test_where_nothing_can_be_built_nothing_is_fetched(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.builds.mkdir(parents=True)
    with (machine.builds / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BuildError, match="another process"):
            machine.build()
    usage = shutil.disk_usage(machine.root)._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(BuildError, match="it needs 500 MB"):
        machine.build()
    assert machine.calls == [] and machine.left == []
    machine.write("file", "")
    monkeypatch.setenv("OUTRIDER_CACHE", str(machine.root / "file"))
    with pytest.raises(SettingError, match="OUTRIDER_CACHE"):
        machine.build()


# cmake and ninja


def test_tools_that_are_missing_are_fetched_for_the_build_alone(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = machine.root / "bin"
    for name in ("sh", "cat", "mkdir", "cp", "chmod"):
        (bare / name).symlink_to(str(shutil.which(name)))
    (bare / "cmake").rename(machine.root / "cmake")
    (bare / "ninja").unlink()
    monkeypatch.setenv("PATH", str(bare))
    machine.write("recipe/build.sh", f"PATH=$PATH:/usr/bin:/bin\n{COMPILES}")
    brings = 'mkdir "$target/bin"; cp "$STAGE/cmake" "$target/bin"; cp "$STAGE/bin/cc" "$target/bin/ninja"'
    machine.program("pip3", f"{PIP}case $target in *installed) {brings}; exit ;; esac\n{DELIVERS}")
    machine.build()
    assert ("tools", 0.0) in machine.stages
    [install] = [call for call in machine.calls if "install" in call]
    assert "cmake>=3.19 ninja" in install
    assert not (machine.root / "bin" / "cmake").exists()
    assert len(machine.left) == 1


def test_an_old_cmake_counts_as_missing(machine: Machine) -> None:
    machine.program("cmake", '#!/bin/sh\necho "cmake version 3.16.3"\n')
    machine.program("pip3", f"{PIP}case $target in *installed) exit 3 ;; esac\n{DELIVERS}")
    with pytest.raises(BuildError, match=r"cmake: it could not be fetched: .*exit status 3"):
        machine.build()
    assert machine.left == []
