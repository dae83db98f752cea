"""A library compiled for this CPU: fetched by its hash, whole or not at all, found again."""

import ctypes
import fcntl
import os
import re
import shutil
import subprocess
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
from outrider.backends.native import MAINLINE, cuda, native_library
from outrider.backends.native.build import build_native, fetched
from outrider.backends.native.place import RECIPE
from outrider.core.errors import BuildError, SettingError
from outrider.models.embedded import embedded_default

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


# With real programs: the clients over an index in a folder, cmake and compilers


REAL_PATH = os.environ.get("PATH", os.defpath)


@pytest.mark.parametrize("client", ["pip", "uv"])
@pytest.mark.parametrize("right", [True, False])
def test_a_client_brings_the_source_by_its_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: str, right: bool
) -> None:
    program = shutil.which(client)
    if program is None:
        pytest.skip(f"there is no {client}")
    index, folder, alone = tmp_path / "index", tmp_path / "folder", tmp_path / "bin"
    for made in (index, folder, alone):
        made.mkdir()
    project = '[project]\nname = "tiny-ik"\nversion = "1.0"\n[build-system]\nrequires = []\n'
    metadata = "Metadata-Version: 2.1\nName: tiny-ik\nVersion: 1.0\n"
    backend = (
        "def prepare_metadata_for_build_wheel(folder, settings=None):\n    import os\n"
        "    os.mkdir(folder + '/tiny_ik-1.0.dist-info')\n"
        f"    open(folder + '/tiny_ik-1.0.dist-info/METADATA', 'w').write({metadata!r})\n"
        "    return 'tiny_ik-1.0.dist-info'\n"
    )
    archive = archive_of(
        {
            "tiny_ik-1.0/pyproject.toml": f'{project}build-backend = "own"\nbackend-path = ["."]\n',
            "tiny_ik-1.0/PKG-INFO": metadata,
            "tiny_ik-1.0/own.py": backend,
            "tiny_ik-1.0/vendor/tiny/CMakeLists.txt": "# nothing\n",
        }
    )
    (index / "tiny_ik-1.0.tar.gz").write_bytes(archive)
    (alone / client).symlink_to(program)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setenv("PATH", f"{alone}:{os.environ['PATH']}")
    monkeypatch.setattr(
        "outrider.models.package_clients.shutil.which",
        lambda name, path=None: str(alone / client) if name == client and path is None else None,
    )
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(index)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
        monkeypatch.setenv(f"UV_{name}", value)
    source = source_of(archive)
    if right:
        assert (fetched(source, folder, lambda _: None) / "CMakeLists.txt").read_text() == "# nothing\n"
    else:
        with pytest.raises(BuildError, match=r"(?i)hash(es)? "):
            fetched(replace(source, sha256="0" * 64), folder, lambda _: None)


# The recipe: how the real library is put together, here from a source of a few lines


LLAMA_H = """
#include <stdbool.h>
#ifdef __cplusplus
extern "C" {
#endif
enum ggml_log_level { GGML_LOG_LEVEL_NONE };
typedef int llama_token;
struct llama_model { bool repacked; };
struct llama_context { struct llama_model * model; float logits; };
struct llama_model_params { bool repack_tensors; };
struct llama_context_params { unsigned n_ctx, n_threads, n_threads_batch; };
struct llama_batch { int count; };
void llama_log_set(void (*log)(enum ggml_log_level, const char *, void *), void * data);
void llama_backend_init(void);
struct llama_model_params llama_model_default_params(void);
struct llama_context_params llama_context_default_params(void);
struct llama_model * llama_model_load_from_file(const char * path, struct llama_model_params params);
struct llama_context * llama_init_from_model(struct llama_model * model, struct llama_context_params params);
const struct llama_model * llama_get_model(const struct llama_context * context);
int llama_n_vocab(const struct llama_model * model);
struct llama_batch llama_batch_get_one(llama_token * tokens, int count, int start, int sequence);
int llama_decode(struct llama_context * context, struct llama_batch batch);
float * llama_get_logits_ith(struct llama_context * context, int row);
void llama_free(struct llama_context * context);
void llama_free_model(struct llama_model * model);
int llama_value(void);
int ggml_value(void);
int helper_value(void);
#ifdef __cplusplus
}
#endif
"""
LLAMA_CPP = """
#include <cmath>
#include <cstring>
#include "llama.h"
void llama_log_set(void (*)(ggml_log_level, const char *, void *), void *) {}
void llama_backend_init(void) {}
llama_model_params llama_model_default_params(void) { return {}; }
llama_context_params llama_context_default_params(void) { return {}; }
llama_model * llama_model_load_from_file(const char * path, llama_model_params params) {
    return strstr(path, "missing") ? nullptr : new llama_model{params.repack_tensors && strstr(path, "nan")};
}
llama_context * llama_init_from_model(llama_model * model, llama_context_params) {
    return new llama_context{model, model->repacked ? NAN : 1};
}
const llama_model * llama_get_model(const llama_context * context) { return context->model; }
int llama_n_vocab(const llama_model *) { return 1; }
llama_batch llama_batch_get_one(llama_token *, int count, int, int) { return {count}; }
int llama_decode(llama_context *, llama_batch batch) { return batch.count == 0; }
float * llama_get_logits_ith(llama_context * context, int) { return &context->logits; }
void llama_free(llama_context * context) { delete context; }
void llama_free_model(llama_model * model) { delete model; }
int llama_value(void) { return ggml_value() + helper_value(); }
"""
IK_CMAKE = """
add_library(ggml ggml.c)
add_library(llama llama.cpp)
target_include_directories(llama PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
target_link_libraries(llama PUBLIC ggml)
add_library(broken broken.c)
"""


@pytest.mark.slow
@pytest.mark.skipif(None in (shutil.which("cmake"), COMPILER), reason="there is no cmake or no compiler")
def test_the_recipe_makes_one_object_that_shares_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = staged(tmp_path, monkeypatch)
    files = {"CMakeLists.txt": IK_CMAKE, "llama.h": LLAMA_H, "llama.cpp": LLAMA_CPP, "broken.c": "?"}
    files["ggml.c"] = "int ggml_value(void) { return 1; }\nint helper_value(void) { return 10; }\n"
    archive = archive_of({f"tiny-ik-1.0/vendor/tiny/{name}": text for name, text in files.items()})
    machine.serve(archive)
    machine.source = source_of(archive)
    for name in ("cmake", "ninja", "cc", "c++"):
        (machine.root / "bin" / name).unlink()
    other = machine.root / "libother.so"
    machine.write("other.c", files["ggml.c"].replace("1", "7"))
    subprocess.run([str(COMPILER), "-shared", "-o", other, machine.root / "other.c"], check=True)
    monkeypatch.setenv("PATH", f"{machine.root / 'bin'}:{REAL_PATH}")

    path = build_native(machine.root / "model.gguf", source=machine.source).path

    ctypes.CDLL(str(other), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(path))
    assert library.llama_value() == 11  # its own functions, though others of their names came first
    assert library.ggml_value() == 1
    assert not re.search(rb"\0helper_value\0", path.read_bytes())
    assert [library.outrider_first_decode(name) for name in (b"model", b"missing", b"nan")] == [0, 1, 1]
    assert re.search(rb"\0liboutrider-ik.so\0", path.read_bytes())


CUDA_CMAKE = """
add_library(ggml ggml.c)
add_library(ggml-base base.c)
add_library(ggml-cuda kernel.cu)
target_link_libraries(ggml-cuda PRIVATE CUDA::cudart)
target_link_libraries(ggml PUBLIC ggml-base ggml-cuda)
add_library(llama llama.c)
target_include_directories(llama PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
target_link_libraries(llama PUBLIC ggml)
"""
KERNEL = """
__global__ void add(float * x) { x[threadIdx.x] += 1; }
extern "C" int ggml_devices(void) { int count = 0; return cudaGetDeviceCount(&count) ? -1 : count; }
extern "C" void ggml_add(float * x) { add<<<1, 32>>>(x); }
"""


@pytest.mark.slow
@pytest.mark.skipif(None in (shutil.which("cmake"), COMPILER), reason="there is no cmake or no compiler")
def test_a_kernel_is_compiled_without_an_installed_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the compiler of the pinned packages, as `setup --cuda` does; all but cuBLAS, which is large."""
    source, recipe = tmp_path / "source", tmp_path / "recipe"
    source.mkdir()
    shutil.copytree(RECIPE, recipe)
    pins = (recipe / "cuda13.txt").read_text().split("\nnvidia-")
    kept = [pin for pin in pins if not pin.startswith("cublas")]
    (recipe / "cuda13.txt").write_text("\nnvidia-".join(kept))
    monkeypatch.setattr(cuda, "_AT_RUN_TIME", ("libcudart.so.13",))
    (recipe / "first_decode.c").write_text(
        "int outrider_first_decode(const char * path) { return path == 0; }\n"
    )
    texts = {
        "CMakeLists.txt": CUDA_CMAKE,
        "kernel.cu": KERNEL,
        "ggml.c": "int ggml_value(void) { return 1; }",
    }
    texts |= {"base.c": "int ggml_base(void) { return 2; }", "llama.c": "int llama_value(void) { return 3; }"}
    for name, text in texts.items():
        (source / name).write_text(text)
    monkeypatch.setattr("outrider.backends.native.build.fetched", lambda *_: source)
    monkeypatch.setattr(cuda, "_installed_toolkit", lambda: None)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    try:
        made = build_native(tmp_path / "model", source=MAINLINE, recipe=recipe, cuda=cuda.plan_cuda("90"))
    except BuildError as error:
        if "could not be fetched" not in error.why:
            raise
        pytest.skip(error.why)
    assert {file.name for file in made.path.parent.iterdir()} == {MAINLINE.library, "libcudart.so.13"}
    library = ctypes.CDLL(str(made.path))  # which finds CUDA's own beside it
    assert (library.llama_value(), library.ggml_value()) == (3, 1)
    assert library.ggml_devices() == (len(cuda.cards()) or -1)
    assert b"sm_90" in made.path.read_bytes()


@pytest.mark.slow
@pytest.mark.skipif("OUTRIDER_TEST_NATIVE" not in os.environ, reason="it takes ten minutes and the network")
def test_the_real_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = embedded_default()
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    path = build_native(model).path
    library = ctypes.CDLL(str(path))
    library.llama_print_system_info.restype = ctypes.c_char_p
    assert b"AVX" in library.llama_print_system_info() or b"NEON" in library.llama_print_system_info()
    assert all(hasattr(library, name) for name in ("llama_decode", "ggml_type_size", "gguf_init_from_file"))
    assert not any(hasattr(library, name) for name in ("iqk_mul_mat", "_ZN7llm_arch"))
