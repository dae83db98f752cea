"""Which native libraries are here, and the one that a model is loaded with. A library is opened once for each
process. What cannot be used is passed over, with a line that says why."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import Any

from outrider.backends.gguf.c_types import LibraryRefused
from outrider.backends.gguf.devices import free_bytes, list_devices, preload_cuda
from outrider.backends.gguf.ik import Ik
from outrider.backends.gguf.library import Library, LibraryFile
from outrider.backends.gguf.log import clear_log, last_error, speaks_of_memory
from outrider.backends.gguf.memory import Contexts, what_would_fit
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.machine import processor_name
from outrider.backends.native import IK, MAINLINE, cuda_library, native_library
from outrider.core.errors import BackendError, ModelFileError, OutOfMemory, SettingError
from outrider.core.notices import notify
from outrider.core.numbers import gigabytes
from outrider.models.gguf import read_card

INSTALL = (
    "Install one: pip install xllamacpp ik-llama-cpp-python. Where there are no wheels: "
    "in a checkout, pip install '.[llama-cpp]'."
)
_BRINGS_GOMP = "install it (Debian and Ubuntu: apt install libgomp1; Fedora: dnf install libgomp)"
DIALECTS: tuple[type[Library], ...] = (Ik, Library)
"""of llama.cpp's C API, the preferred one first"""
_opened: dict[Path, Library] = {}
"""by this process"""


@cache
def installed() -> tuple[LibraryFile, ...]:
    """The preferred backend first: what was compiled here, and of each backend the preferred package's."""
    built = [
        (native_library(), "ik_llama.cpp for this CPU", IK.version),
        (cuda_library(), "llama.cpp for NVIDIA cards", MAINLINE.version),
    ]
    found = [LibraryFile(path, title, version) for path, title, version in built if path]
    for dialect in DIALECTS:
        found += [file for names in dialect.packages if (file := _file_of(*names))][:1]
    return tuple(found)


def _file_of(distribution: str, module: str) -> LibraryFile | None:
    try:
        spec, version = util.find_spec(module), metadata.version(distribution)
    except (ImportError, ValueError):
        return None
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    name = "libllama.dylib" if sys.platform == "darwin" else "libllama.so"
    for folder in folders:
        for path in (folder / "lib" / name, *sorted(folder.glob(f"{module}*.so"))):
            if path.is_file():
                return LibraryFile(path, distribution, version)
    return None


def build_id() -> str:
    """Names the builds of the libraries that this process has opened, or else of those that it could."""
    ids = [library.build_id for library in _opened.values()] or [str(file) for file in installed()]
    return "; ".join(ids) or "no library"


def device_names() -> tuple[str, ...]:
    """The processor, and what else the opened libraries can compute on."""
    names = [processor_name(), *(name for library in _opened.values() for name in library.device_names)]
    return tuple(dict.fromkeys(names))


def open_library(file: LibraryFile) -> Library:
    """The library of a file, opened once. Raises LibraryRefused."""
    path = file.path.resolve()
    if path not in _opened:
        _opened[path] = _open(file)
    return _opened[path]


def why_not(file: LibraryFile) -> str | None:
    """Why a library cannot be used; None where it can."""
    try:
        open_library(file)
    except LibraryRefused as refusal:
        return str(refusal)
    return None


def describe_gpus(file: LibraryFile) -> list[str]:
    """A line for each GPU of a library that can be used; why there are none."""
    library = open_library(file)
    gpus = [device for device in list_devices(library) if device.is_gpu]
    why = library.why_no_gpu or "it computes on the processor alone (docs/gpu.md: how to get another build)"
    lines = [f"{gpu.name}: {gpu.description}, {gigabytes(free_bytes(library, gpu))} free" for gpu in gpus]
    return lines or [f"no GPU: {why}"]


def _open(file: LibraryFile) -> Library:
    if any(file.path.parent.glob("libggml*cuda*")):
        built = cuda_library()
        preload_cuda([built.parent] if built else [])
    try:
        functions = ctypes.CDLL(str(file.path))
    except OSError as error:
        why = f"it cannot be loaded ({error})"
        if missing := re.match(r"(lib[^/:\s]+): cannot open shared object file", str(error)):
            way_out = _BRINGS_GOMP if missing[1].startswith("libgomp.so") else "install what brings it"
            why = f"it needs {missing[1]}, which this machine lacks: {way_out}"
        raise LibraryRefused(why) from None
    shared = {_ggml_of(library.functions): library for library in _opened.values()}
    if other := shared.get(_ggml_of(functions)):
        # The loader serves a library's needs with the first one of that name, wherever it lies.
        raise LibraryRefused(f"it would run on the kernels of {other.file.path}: use one of the two alone")
    for dialect in DIALECTS:
        if hasattr(functions, dialect.marker):
            return dialect(file, functions)
    raise LibraryRefused("it is not a library of llama.cpp, or of a version before 2025")


def _ggml_of(functions: ctypes.CDLL) -> str:
    """The file that a library's kernels come from; a name of its own where that cannot be found out."""
    try:
        address = ctypes.cast(functions.ggml_init, ctypes.c_void_p)
        find, found = ctypes.CDLL(None).dladdr, (ctypes.c_void_p * 4)()
    except (AttributeError, OSError, TypeError):
        return f"unknown {id(functions)}"
    find.argtypes, find.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_int
    file = found[0] if find(address, found) else None  # the first field of a Dl_info
    return os.fsdecode(ctypes.string_at(file)) if file else f"unknown {id(functions)}"


def candidates(options: LoadOptions) -> Iterator[Library]:
    """The libraries that can do what the options ask for, the preferred one first; notices say which cannot
    be used at all. Raises SettingError for one that is named, BackendError where there is none."""
    if options.library:
        yield _named(options)
        return
    files, found, refusals = installed(), list[Library](), list[str]()
    for file in files:
        try:
            library = open_library(file)
        except LibraryRefused as refusal:
            refusals.append(f"{file.path} is not used: {refusal}")
            continue
        if options.backend == library.backend or (options.backend == "auto" and library.suits(options)):
            found.append(library)
    notify(*refusals)
    if found:
        yield from sorted(found, key=lambda library: not library.uses_gpu(options))
        return
    if options.backend == "auto" and not files:
        raise BackendError("native library", "no package that brings one is installed", INSTALL)
    what = "native library" if options.backend == "auto" else f"backend {options.backend}"
    why = "; ".join(refusals) or "no installed library does what is asked for"
    raise BackendError(what, why, f"Choose another (--backend), or name a file (--llama-library). {INSTALL}")


def _named(options: LoadOptions) -> Library:
    what, path = f"llama library {options.library}", Path(options.library).expanduser()
    way_out = (
        "Name another libllama of llama.cpp or ik_llama.cpp (--llama-library), or install what it lacks."
    )
    if not path.is_file():
        raise SettingError(what, "there is no such file", way_out)
    known = [file for file in installed() if file.path.resolve() == path.resolve()]
    try:
        library = open_library(known[0] if known else LibraryFile(path.resolve(), path.name))
    except LibraryRefused as refusal:
        raise SettingError(what, str(refusal), way_out) from None
    if options.backend not in ("auto", library.backend):
        raise SettingError(what, f"it is {library.title}, and the backend asked for is {options.backend}")
    return library


def find_quantizer() -> tuple[Library, Any]:
    """A library that quantizes, llama.cpp before ik_llama.cpp, and its parameters. Raises BackendError."""
    reasons = []
    for file in sorted(installed(), key=lambda file: file.source.startswith("ik")):
        try:
            library = open_library(file)
            return library, library.quantize_params()
        except LibraryRefused as refusal:
            reasons.append(f"{file}: {refusal}")
    why = "; ".join(reasons) or "no library is installed"
    raise BackendError("quantizer", why, "Install one: pip install ik-llama-cpp-python.")


def load_model(path: Path, options: LoadOptions) -> tuple[Library, int]:
    """The library that runs the file, and the native model. Raises ModelFileError, OutOfMemory or more."""
    failure: ModelFileError | None = None
    for library in candidates(options):
        library.take_log()
        clear_log()
        model = library.load_model(path, options)
        if model is not None and not (why := library.why_not(model)):
            return library, model
        if model is not None:
            library.functions.llama_model_free(model)
            failure = ModelFileError(str(path), why, "Choose another library (--backend), or another model.")
            continue
        why = last_error(f"{library.title} could not load it").replace("error loading model: ", "")
        if speaks_of_memory(why.replace(str(path), "")):
            way_out = "Choose a smaller quantization, or offload fewer layers (-ngl)."
            fitting = what_would_fit(library, Contexts(read_card(path).layout, options))
            raise OutOfMemory(str(path), why, fitting or way_out)
        way_out = f"Fetch the file again, or choose a model that this build of {library.title} supports."
        failure = ModelFileError(str(path), why, way_out)
    assert failure is not None, "candidates raises where there is none"
    raise failure
