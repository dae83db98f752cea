"""A library compiled for NVIDIA cards: which cards and which CUDA, and nothing left where it fails."""

import ctypes
import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from cli_helpers import Call, refused
from native_builds import COMPILER, COMPILES, DELIVERS, PIP, Machine, staged
from outrider.backends.native import cuda
from outrider.backends.native.build import NativeBuild, build_native
from outrider.backends.native.cuda import CudaPlan, cuda_library, plan_cuda
from outrider.backends.native.place import cuda_libraries
from outrider.core.errors import BuildError, SettingError

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")

NVCC = """#!/bin/sh
case "$1" in
--version) echo "Cuda compilation tools, release {major}.0, V{major}.0.1" ;;
--list-gpu-code) echo sm_75; echo sm_86; echo sm_90 ;;
--dryrun) echo "#$ TOP=${{0%/*}}/.." >&2 ;;
esac
"""
BRINGS = f"""
case $target in
*installed) root=$target/nvidia/cu13; mkdir -p $root/bin $root/lib
    for name in libcudart libcublas libcublasLt; do echo $name > $root/lib/$name.so.13; done
    cat > $root/bin/nvcc <<'END'
{NVCC.format(major=13)}
END
    chmod +x $root/bin/nvcc; exit ;;
esac
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = staged(tmp_path, monkeypatch)
    made.source = replace(made.source, target="outrider-cuda")
    made.write("recipe/build.sh", COMPILES.replace("outrider-ik", "outrider-cuda"))
    made.write("recipe/cuda13.txt", "")
    made.program("pip3", PIP + BRINGS + DELIVERS)
    cuda.cards.cache_clear()
    monkeypatch.setattr("outrider.backends.native.cuda.cuda_libraries", partial(found, made))
    return made


def found(machine: Machine) -> list[Path]:
    return cuda_libraries(machine.source, machine.recipe)


def has_cards(machine: Machine, *kinds: str, driver: str = "580.65.06") -> None:
    lines = "; ".join(f"echo 'NVIDIA {kind}, {kind}, {driver}'" for kind in kinds)
    machine.program("nvidia-smi", f"#!/bin/sh\n{lines}\n")


def has_nvcc(machine: Machine, major: int, *, whole: bool = True) -> Path:
    machine.program("nvcc", NVCC.format(major=major))
    if whole:
        machine.write("include/cublas_v2.h", "")
    return machine.root


def build(machine: Machine, asked: str | None = None) -> NativeBuild:
    def show(stage: str, done: float) -> None:
        machine.stages.append((stage, done))

    model = machine.root / "model.gguf"
    given = {"source": machine.source, "recipe": machine.recipe, "cuda": plan_cuda(asked)}
    return build_native(model, progress=show, **given)  # type: ignore[arg-type]


def test_it_is_built_for_the_cards_that_are_here_with_what_it_needs_beside_it(machine: Machine) -> None:
    has_cards(machine, "9.0", "8.6", "8.6")
    made = build(machine)
    assert made.built and made.path.parent.name.endswith("-sm86+90")
    assert ctypes.CDLL(str(made.path)).outrider_first_decode(b"model") == 0
    beside = {"libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13"}
    assert {file.name for file in made.path.parent.iterdir()} == {made.path.name, *beside}
    [configured] = [one for one in machine.calls if "-DCUDA=ON" in one]
    assert "-DCMAKE_CUDA_ARCHITECTURES=86-real;90-real" in configured and "-DGGML_NATIVE=ON" in configured
    assert "cu13/bin/nvcc" in configured and "-DCUDA_BESIDE=ON" in configured
    [fetched] = [one for one in machine.calls if one.startswith("pip install")]
    assert "--require-hashes" in fetched and "cuda13.txt" in fetched
    stages = list(dict.fromkeys(stage for stage, _ in machine.stages))
    assert stages == ["fetching", "CUDA", "compiling", "trying"]
    assert machine.left == [made.path.parent.name]
    assert not build(machine).built


def test_without_a_card_it_is_built_for_the_kind_that_is_named_and_any_cpu(machine: Machine) -> None:
    with pytest.raises(SettingError, match=r"no NVIDIA card is here.*--cuda-arch"):
        plan_cuda(None)
    made = build(machine, "9.0")
    assert made.path.parent.name.endswith("-sm90")
    assert any("-DGGML_NATIVE=OFF" in one for one in machine.calls)
    assert cuda_library() == made.path
    other = build(machine, "75,86")
    assert other.path.parent != made.path.parent and cuda_library() in (made.path, other.path)
    has_cards(machine, "8.6")
    cuda.cards.cache_clear()
    assert cuda_library() == other.path  # the one for the card that is here


@pytest.mark.parametrize(
    ("driver", "major", "whole", "expected"),
    [
        ("580.65.06", None, True, "packages"),
        ("580.65.06", 13, True, "installed"),
        ("580.65.06", 12, True, "installed"),
        ("580.65.06", 13, False, "packages"),  # a compiler without cuBLAS
        ("550.54.14", 12, True, "installed"),
        ("580.65.06", 14, True, "packages"),
        ("550.54.14", 13, True, "the driver 550 is too old for CUDA 13, which needs 580"),
        ("550.54.14", None, True, "an older CUDA's nvcc on the PATH"),
    ],
)
def test_the_driver_decides_which_cuda(
    machine: Machine, driver: str, major: int | None, whole: bool, expected: str
) -> None:
    has_cards(machine, "8.6", driver=driver)
    root = has_nvcc(machine, major, whole=whole) if major else None
    if expected in ("packages", "installed"):
        chosen = root if expected == "installed" else None
        assert plan_cuda(None) == CudaPlan(("86",), None, chosen)
    else:
        with pytest.raises(SettingError, match=expected):
            plan_cuda(None)


def test_an_installed_cuda_is_not_fetched_and_nothing_lies_beside(machine: Machine) -> None:
    root = has_nvcc(machine, 12)
    made = build(machine, "86")
    assert [file.name for file in made.path.parent.iterdir()] == [made.path.name]
    assert not any(one.startswith("pip install") for one in machine.calls)
    assert any(f"-DCUDAToolkit_ROOT={root}" in one and "-DCUDA_BESIDE=OFF" in one for one in machine.calls)


@pytest.mark.parametrize(("asked", "message"), [("x", "no compute capability"), ("61", "75, 86, 90")])
def test_a_kind_of_card_that_there_is_not_is_named(machine: Machine, asked: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        build(machine, asked)
    assert not machine.builds.exists() or machine.left == []


@pytest.mark.parametrize(
    ("says", "message"),
    [
        ("echo 'ERROR: no route to the index' >&2; exit 1", "could not be fetched.*no route"),
        ("echo 'ERROR: No space left on device' >&2; exit 1", "its disk is full"),
        ("exit 0", "no nvcc in its packages"),
    ],
)
def test_a_cuda_that_cannot_be_fetched_leaves_nothing(machine: Machine, says: str, message: str) -> None:
    machine.program("pip3", f"{PIP}case $target in *installed) {says} ;; esac\n{DELIVERS}")
    with pytest.raises(BuildError, match=message):
        build(machine, "90")
    assert machine.left == []


@pytest.fixture
def setup(machine: Machine, monkeypatch: pytest.MonkeyPatch, outrider: Call) -> Call:
    monkeypatch.setattr("outrider.backends.native.MAINLINE", machine.source)
    patched = partial(build_native, recipe=machine.recipe)
    monkeypatch.setattr("outrider.backends.native.build.build_native", patched)
    monkeypatch.setattr("outrider.backends.gguf.libraries.installed", lambda: ())
    monkeypatch.setattr(
        "outrider.backends.gguf.libraries.describe_gpus", lambda file: [f"no GPU of {file.source}"]
    )
    model = machine.root / "model.gguf"
    monkeypatch.setattr("outrider.models.embedded.embedded_default", lambda _progress: model)
    return partial(outrider, "setup")


def test_the_command_builds_and_shows_the_devices(machine: Machine, setup: Call) -> None:
    has_cards(machine, "9.0")
    said = "llama.cpp for NVIDIA 9.0: not built; `outrider setup --cuda` does it"
    assert said in setup().out
    built = setup("--cuda", "--cuda-arch", "90")
    title = "llama.cpp for NVIDIA cards of kind 90"
    assert built.status == 0 and f"{title} is built and decodes" in built.out
    assert f"  no GPU of {title}\n" in built.out
    stages = [line.partition(":")[0] for line in built.err.splitlines()]
    assert stages[:3] == ["fetching llama.cpp", "fetching CUDA's compiler", f"compiling {title}"]
    assert "there already" in setup("--cuda").out and said not in setup().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (("--cuda",), "--cuda: no NVIDIA card is here"),
        (("--cuda-arch", "90"), "--cuda-arch: it says for which cards to compile. Add --cuda."),
        (("--cuda", "--cuda-arch", "90"), ".*: building it needs a C and a C\\+\\+ compiler"),
    ],
)
def test_what_cannot_be_built_is_one_line(
    machine: Machine,
    setup: Call,
    monkeypatch: pytest.MonkeyPatch,
    line: tuple[str, ...],
    message: str,
) -> None:
    if len(line) == 3:
        monkeypatch.setenv("PATH", str(machine.root / "bin"))
        (machine.root / "bin" / "c++").unlink()
    assert re.match(message, refused(setup(*line)))


def test_ctrl_c_leaves_nothing(machine: Machine, setup: Call) -> None:
    machine.write("recipe/build.sh", f'touch "$1/half"; kill -INT {os.getpid()}; sleep 100\n')
    ended = setup("--cuda", "--cuda-arch", "90")
    assert ended.status == 130
    assert ended.err.endswith("\ninterrupted\n")
    assert machine.left == []
