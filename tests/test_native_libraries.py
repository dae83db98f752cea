"""What is declared of the native libraries is true; what cannot be used is passed over with a line."""

import ctypes
import importlib
import json
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from backends import FILES, MAINLINE
from outrider.backends import tuning
from outrider.backends.gguf import libraries
from outrider.backends.gguf.c_types import LibraryRefused, Params
from outrider.backends.gguf.ik import Ik
from outrider.backends.gguf.libraries import candidates, installed
from outrider.backends.gguf.library import SHARED, Library, LibraryFile
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.gguf.quantizer import quantize
from outrider.backends.tuning import choose_options
from outrider.core.errors import BackendError, SettingError
from outrider.core.notices import collect_notices
from tiny_gguf import write_tiny

BY_NAME = {file.source: file for file in installed()}
HEADER = Path(sysconfig.get_paths()["purelib"]) / "include" / "llama.h"

SIZES = {
    **dict.fromkeys(("bool", "int8_t"), 1),
    **dict.fromkeys(("int32_t", "uint32_t", "int", "float", "llama_token", "llama_pos"), 4),
    **dict.fromkeys(("llama_seq_id", "llama_state_seq_flags"), 4),
    **dict.fromkeys(("size_t", "uint64_t", "double", "ggml_log_callback"), 8),
    "void": 0,
}


def size_of(declared: str) -> int | str:
    """The bytes of a C type, or the name of a structure that is given by value."""
    if "*" in declared:
        return 8
    words = [word for word in declared.split() if word not in ("const", "LLAMA_API")]
    if words[0] == "struct":
        return words[1]
    return 4 if words[0] == "enum" else SIZES.get(words[0], 8)


def prototypes(header: str) -> dict[str, list[int | str]]:
    """By function: the size of its result, then those of its arguments."""
    bare = re.sub(r"//[^\n]*|/\*.*?\*/", "", header, flags=re.S)
    found: dict[str, list[int | str]] = {}
    for result, name, arguments in re.findall(r"LLAMA_API\s+([\w\s*]+?)(llama_\w+)\s*\(([^()]*)\)\s*;", bare):
        declared = [argument.strip() for argument in arguments.split(",")]
        found[name] = [size_of(result), *(size_of(one) for one in declared if one not in ("void", ""))]
    return found


def size_declared(kind: Any) -> int | str:
    if kind is None:
        return 0
    return str(kind.__name__) if issubclass(kind, ctypes.Structure) else ctypes.sizeof(kind)


@pytest.mark.skipif(ctypes.sizeof(ctypes.c_void_p) != 8, reason="sizes of a 64-bit machine")
def test_functions_are_declared_as_in_the_header() -> None:
    """Both packages put their header into the same place: whichever came last is there."""
    if not HEADER.exists():
        pytest.skip("no installed package brings a header")
    text = HEADER.read_text()
    dialect = Ik if "llama_kv_cache_seq_rm" in text else Library
    known = prototypes(text)
    declared = {**SHARED, **dialect.signatures}
    assert len(declared) > 30
    differing = {
        name: (known.get(dialect.names.get(name, name)), [size_declared(kind) for kind in kinds])
        for name, kinds in declared.items()
        if known.get(dialect.names.get(name, name)) != [size_declared(kind) for kind in kinds]
    }
    assert differing == {}


@pytest.mark.parametrize(
    ("module", "ours", "name"),
    [
        ("llama_cpp.llama_cpp", Library.ModelParams, "llama_model_params"),
        ("llama_cpp.llama_cpp", Library.ContextParams[0], "llama_context_params"),
        ("llama_cpp.llama_cpp", Library.Batch, "llama_batch"),
        ("ik_llama_cpp._ctypes_api", Ik.ModelParams, "llama_model_params"),
        ("ik_llama_cpp._ctypes_api", Ik.ContextParams[0], "llama_context_params"),
        ("ik_llama_cpp._ctypes_api", Ik.Batch, "llama_batch"),
    ],
)
def test_structures_are_laid_out_as_in_the_packages_own_bindings(
    module: str, ours: type[ctypes.Structure], name: str
) -> None:
    if util.find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"{module} is not installed")
    # In a process of its own: bindings load their library when they are imported.
    code = (
        "import importlib, json, sys\n"
        "kind = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])\n"
        "fields = [(f[0], getattr(kind, f[0])) for f in kind._fields_]\n"
        "print(json.dumps([[name, field.offset, field.size] for name, field in fields]))\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, module, name]
    theirs = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert [[f[0], getattr(ours, f[0]).offset, getattr(ours, f[0]).size] for f in ours._fields_] == theirs


class Foreign(Library):
    """As a later version might be: a field more, or another default."""


@pytest.mark.parametrize("change", ["default", "larger"])
def test_a_library_with_other_structures_is_refused(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    file = FILES[MAINLINE[0]]
    if change == "default":
        params = Library.ModelParams
        monkeypatch.setattr(params, "defaults", {**params.defaults, "lazy_mode": 7})
        expected = "lazy_mode is 1"
    else:

        class Shorter(Params):
            defaults = Library.ModelParams.defaults
            _fields_ = Library.ModelParams._fields_[:-8]

        monkeypatch.setattr(Foreign, "ModelParams", Shorter)
        expected = "larger than expected"
    with pytest.raises(LibraryRefused, match=expected):
        Foreign(file, ctypes.CDLL(str(file.path)))


def test_a_file_that_is_no_library_is_refused_by_name(tmp_path: Path) -> None:
    for name, content in (("text.so", b"no library"), ("missing.so", None)):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(SettingError) as caught:
            next(candidates(LoadOptions(library=str(path))))
        assert str(path) in caught.value.what and "--llama-library" in caught.value.way_out


def test_a_library_of_something_else_is_refused() -> None:
    other = importlib.import_module("_ctypes").__file__
    with pytest.raises(SettingError, match=r"not a library of llama\.cpp"):
        next(candidates(LoadOptions(library=str(other))))


def test_a_named_library_must_be_of_the_backend_that_was_asked_for() -> None:
    ours = {library.backend: library for library in candidates(LoadOptions())}
    path = str(ours["ik"].file.path)
    with pytest.raises(SettingError, match=r"ik_llama\.cpp"):
        next(candidates(LoadOptions(library=path, backend="llama.cpp")))


def test_without_a_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "installed", lambda: ())
    with pytest.raises(BackendError, match="pip install"):
        next(candidates(LoadOptions()))


def test_what_is_refused_is_passed_over_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "libllama.so"
    broken.write_bytes(b"\x7fELF")
    known = installed()
    monkeypatch.setattr(libraries, "installed", lambda: (LibraryFile(broken, "a broken package"), *known))
    with collect_notices() as notices:
        assert [library.backend for library in candidates(LoadOptions(gpu_layers=0))] == ["ik", "llama.cpp"]
    [line] = notices
    assert str(broken) in line and "cannot be loaded" in line


def test_a_library_with_a_gpu_comes_first_and_is_compared_with_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def uses_gpu(self: Library, options: LoadOptions) -> bool:
        return self.backend == "llama.cpp" and options.gpu_layers != 0

    monkeypatch.setattr(Library, "uses_gpu", uses_gpu)
    assert [library.backend for library in candidates(LoadOptions())] == ["llama.cpp", "ik"]
    assert [library.backend for library in candidates(LoadOptions(gpu_layers=0))] == ["ik", "llama.cpp"]
    model = write_tiny(tmp_path / "m.gguf")
    monkeypatch.setattr(tuning, "_MIN_FILE_BYTES", 1)
    assert choose_options(model, LoadOptions(threads=1)) == LoadOptions(threads=1), "nothing is tried"


def lacking_gomp(folder: Path, name: str) -> Path:
    """A library that is here, made to need one that is nowhere in place of its OpenMP runtime."""
    folders = {FILES[name].path.parent for name in MAINLINE}  # ik_llama.cpp brings its own
    needing = [
        path for place in folders for path in place.glob("*.so") if b"libgomp.so.1\0" in path.read_bytes()
    ]
    if not needing:
        pytest.skip("no library here needs an OpenMP runtime of the system")
    smallest = min(needing, key=lambda path: path.stat().st_size)
    copy = folder / "libllama.so"
    copy.write_bytes(smallest.read_bytes().replace(b"libgomp.so.1\0", name.encode() + b"\0"))
    return copy


@pytest.mark.skipif(sys.platform != "linux", reason="words of Linux's loader")
@pytest.mark.parametrize(
    ("name", "way_out"),
    [("libgomp.so.7", "apt install libgomp1"), ("libnone.so.7", "install what brings it")],
)
def test_a_library_that_lacks_another_one_says_which_and_where_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, way_out: str
) -> None:
    path = lacking_gomp(tmp_path, name)
    with pytest.raises(SettingError) as caught:
        next(candidates(LoadOptions(library=str(path))))
    assert caught.value.why.startswith(f"it needs {name}, which this machine lacks: ")
    assert way_out in caught.value.why and "\n" not in str(caught.value)
    monkeypatch.setattr(libraries, "installed", lambda: (LibraryFile(path, "xllamacpp", "1"),))
    with pytest.raises(BackendError) as alone:
        next(candidates(LoadOptions()))
    assert name in alone.value.why and way_out in alone.value.why


def test_options_that_ik_cannot_follow_are_left_to_llama_cpp() -> None:
    for options in (LoadOptions(full_window=False), LoadOptions(cache_type_v="q8_0")):
        assert [library.backend for library in candidates(options)] == ["llama.cpp"]


@pytest.mark.skipif(sys.platform != "linux", reason="how Linux's loader finds what a library needs")
@pytest.mark.slow
@pytest.mark.skipif("llama-cpp-python" not in BY_NAME, reason="needs llama-cpp-python")
def test_a_second_build_that_would_run_on_the_kernels_of_the_first_is_refused(tmp_path: Path) -> None:
    """In a process of its own: what is mapped once stays."""
    first = BY_NAME["llama-cpp-python"].path.parent
    shutil.copytree(first, tmp_path / "lib")
    code = (
        "import sys\n"
        "from outrider.backends.gguf.libraries import candidates\n"
        "from outrider.backends.gguf.options import LoadOptions\n"
        "from outrider.core.errors import SettingError\n"
        "next(candidates(LoadOptions(library=sys.argv[1])))\n"
        "try: next(candidates(LoadOptions(library=sys.argv[2])))\n"
        "except SettingError as error: print(error)\n"
    )
    copies = [str(folder / "libllama.so") for folder in (first, tmp_path / "lib")]
    shown = subprocess.run([sys.executable, "-c", code, *copies], capture_output=True, text=True, check=True)
    assert "would run on the kernels of" in shown.stdout and str(first) in shown.stdout


def test_quantizing_without_a_quantizer_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "installed", lambda: ())
    source = write_tiny(tmp_path / "tiny.gguf")
    with pytest.raises(BackendError, match="pip install"):
        quantize(source, "Q8_0", tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()
