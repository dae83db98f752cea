"""GGUF models through the C API of llama.cpp or ik_llama.cpp, whichever library is there."""

from outrider.backends.gguf.guard import check_build, check_head
from outrider.backends.gguf.libraries import (
    build_id,
    candidates,
    describe_gpus,
    device_names,
    installed,
    refusals,
    why_not,
)
from outrider.backends.gguf.library import Library, LibraryFile
from outrider.backends.gguf.log import show_log
from outrider.backends.gguf.model import GgufModel, Weights
from outrider.backends.gguf.options import BACKENDS, CONTEXT_TYPES, LoadOptions
from outrider.backends.machine import physical_cores

__all__ = [
    "BACKENDS",
    "CONTEXT_TYPES",
    "GgufModel",
    "Library",
    "LibraryFile",
    "LoadOptions",
    "Weights",
    "build_id",
    "candidates",
    "check_build",
    "check_head",
    "describe_gpus",
    "device_names",
    "installed",
    "physical_cores",
    "refusals",
    "show_log",
    "why_not",
]
