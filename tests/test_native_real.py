"""Compiling for this CPU with real programs: the clients over an index in a folder, cmake and compilers."""

import ctypes
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from native_builds import COMPILER, archive_of, source_of, staged
from outrider.backends.native import MAINLINE, cuda
from outrider.backends.native.build import build_native, fetched
from outrider.backends.native.place import RECIPE
from outrider.core.errors import BuildError
from outrider.models.embedded import embedded_default

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
