"""What a native library can compute on, and where a model is put: devices, shares, single tensors."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from outrider.backends.gguf.c_types import CLibrary, LibraryRefused, functions, structure
from outrider.core.errors import SettingError

NO_DEVICE = "none"
"""As the only device: nothing is computed on a GPU."""
_GPUS = (1, 2)
"""of ggml_backend_dev_type: with memory of its own, and with the host's"""
_INTEGRATED = 2

_DEVICES = functions("""
    size ggml_backend_dev_count
    ptr ggml_backend_dev_get (size)
    str ggml_backend_dev_description ggml_backend_dev_name (ptr)
    enum ggml_backend_dev_type (ptr)
    void ggml_backend_dev_memory (ptr ptr ptr)
    ptr ggml_backend_dev_buffer_type (ptr)
""")
_LOADING = functions("void ggml_backend_load_all_from_path (str)\nptr ggml_backend_load (str)")
_PARTS = "libggml-*.so*"
"""the files that a library's processors and GPUs are in, where each has one"""
_CUDA_RUNTIME = ("libcudart.so.*", "libcublasLt.so.*", "libcublas.so.*")
"""each needed by those after it"""
_BUFFERS = functions("str ggml_backend_buft_name (ptr)\nptr ggml_backend_cpu_buffer_type")

_Override = structure("llama_model_tensor_buft_override", "str pattern\nptr buft")


@dataclass(frozen=True, slots=True)
class Device:
    """A processor or GPU: its name as options have it (CUDA0), and what it calls itself."""

    name: str
    description: str
    is_gpu: bool
    shares_memory: bool
    """whether its memory is the machine's"""
    pointer: int
    buffer_type: int


def list_devices(library: CLibrary) -> list[Device]:
    """All that the library can compute on; empty where it does not say."""
    try:
        library.declare(_DEVICES)
    except LibraryRefused:
        return []
    native, found = library.functions, []
    for pointer in map(native.ggml_backend_dev_get, range(native.ggml_backend_dev_count())):
        kind = native.ggml_backend_dev_type(pointer)
        name, description = (
            native.ggml_backend_dev_name(pointer),
            native.ggml_backend_dev_description(pointer),
        )
        texts = name.decode(errors="replace"), description.decode(errors="replace")
        buffer = native.ggml_backend_dev_buffer_type(pointer)
        found.append(Device(*texts, kind in _GPUS, kind in (0, _INTEGRATED), pointer, buffer))
    return found


def preload_cuda(folders: Iterable[Path]) -> None:
    """Load what is found of CUDA's own libraries in some folders and in installed packages (PyTorch brings
    them): a library that needs them takes those, whatever the system has."""
    packaged = (found for place in sys.path for found in Path(place).glob("nvidia/*/lib"))
    places = [*folders, *packaged]
    for pattern in _CUDA_RUNTIME:
        for file in (found for place in places for found in place.glob(pattern)):
            with suppress(OSError):
                ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)


def load_parts(library: CLibrary, folder: Path) -> str:
    """Load a library's processors and GPUs, where they lie beside it in files that only a program in the same
    folder would find; why there is no GPU, as far as that is said."""
    try:
        library.declare({**_DEVICES, **_LOADING})
    except LibraryRefused:
        return ""
    native, files = library.functions, sorted(folder.glob(_PARTS))
    if native.ggml_backend_dev_count() or not files:
        return ""
    native.ggml_backend_load_all_from_path(os.fsencode(folder))
    parts = [file for file in files if not file.name.startswith("libggml-base")]
    if not native.ggml_backend_dev_count():  # some packages put a hash into each name
        for file in parts:
            native.ggml_backend_load(os.fsencode(file))
    return "" if any(device.is_gpu for device in list_devices(library)) else _why_unloadable(parts)


def _why_unloadable(files: Sequence[Path]) -> str:
    for file in files:
        try:
            ctypes.CDLL(str(file))
        except OSError as error:
            return f"{file.name} cannot be loaded ({error})"
    return ""


def free_bytes(library: CLibrary, device: Device) -> int:
    """The memory that a device has left. Asking a GPU prepares it for use, which takes some of it."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    library.functions.ggml_backend_dev_memory(device.pointer, ctypes.byref(free), ctypes.byref(total))
    return free.value


# The arrays that parameters point to. Libraries keep the pointers, so the arrays stay: one for each value.


@cache
def device_array(library: CLibrary, names: tuple[str, ...]) -> Any:
    """Pointers, and a last one that is null. Raises SettingError for what is no GPU of the library's."""
    gpus = {device.name: device.pointer for device in list_devices(library) if device.is_gpu}
    wanted = [name for name in names if name != NO_DEVICE]
    for name in wanted:
        if name not in gpus:
            there = f"its devices are {', '.join(gpus)}" if gpus else "it computes on the processor alone"
            raise SettingError(f"device {name}", f"{library.title} has none: {there}", "Name another (-dev).")
    return (ctypes.c_void_p * (len(wanted) + 1))(*(gpus[name] for name in wanted), None)


@cache
def share_array(library: CLibrary, shares: tuple[float, ...]) -> Any:
    """As many as a library reads. Raises SettingError for too many, where there are GPUs at all."""
    library.declare(functions("size llama_max_devices"))
    most = library.functions.llama_max_devices()
    if len(shares) > most and library.functions.llama_supports_gpu_offload():
        why = f"{len(shares)} shares are given, and {library.title} knows {most} devices at most"
        raise SettingError("tensor split", why, "Give fewer (-ts).")
    return (ctypes.c_float * max(most, len(shares)))(*shares)


@cache
def override_array(library: CLibrary, overrides: tuple[str, ...]) -> Any:
    """PATTERN=BUFFER each, the first match counts; the last entry is null. Raises SettingError."""
    library.declare(_BUFFERS)
    native, entries = library.functions, []
    there = (native.ggml_backend_cpu_buffer_type(), *(each.buffer_type for each in list_devices(library)))
    buffers = {native.ggml_backend_buft_name(buffer).decode(): buffer for buffer in there if buffer}
    for text in overrides:
        pattern, _, buffer = text.rpartition("=")
        if buffer not in buffers:
            why = f"{library.title} has no buffer {buffer}"
            raise SettingError(f"-ot {text}", why, f"Choose one of {', '.join(buffers)}.")
        entries.append(_Override(pattern=pattern.encode(), buft=buffers[buffer]))
    return (_Override * (len(entries) + 1))(*entries)


class Places:
    """The shares of GPUs, and where single tensors lie, as a library decides. Raises LibraryRefused."""

    def __init__(self, library: CLibrary) -> None:
        library.declare({**_BUFFERS, **functions("size llama_max_devices llama_max_tensor_buft_overrides")})
        native = library.functions
        self._name = native.ggml_backend_buft_name
        self.shares = (ctypes.c_float * native.llama_max_devices())()
        self.overrides = (_Override * native.llama_max_tensor_buft_overrides())()

    def decided(self) -> dict[str, Any]:
        found = [f"{e.pattern.decode()}={self._name(e.buft).decode()}" for e in self.overrides if e.pattern]
        shares = tuple(self.shares) if any(self.shares) else ()
        return {"tensor_split": shares, "tensor_overrides": tuple(found)}


def check_overrides(overrides: Sequence[str]) -> None:
    """Raise SettingError for what is no PATTERN=BUFFER."""
    for text in overrides:
        pattern, equals, buffer = text.rpartition("=")
        if not (equals and pattern and buffer):
            raise SettingError(
                f"-ot {text}", "it is not PATTERN=BUFFER", "Give, for instance, ffn_.*_exps=CPU."
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise SettingError(f"-ot {text}", f"its pattern is broken: {error}", "Correct it.") from None


_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""The names of tensors of a feed-forward network with and without experts."""


def experts_on_host(layers: int | None) -> tuple[str, ...]:
    """The overrides that keep the experts of the first layers off the GPU; None: of all."""
    if layers is None:
        return (f"{_EXPERTS}=CPU",)
    return tuple(rf"blk\.{layer}{_EXPERTS}=CPU" for layer in range(layers))
