"""GGUF models through llama.cpp's C API (llama-cpp-python's low-level bindings)."""

from outrider.backends.llama_cpp.guard import check_build, cpu_id
from outrider.backends.llama_cpp.library import build_id, device_names, show_log
from outrider.backends.llama_cpp.memory import available_bytes
from outrider.backends.llama_cpp.model import LlamaCppModel, Weights
from outrider.backends.llama_cpp.options import (
    CONTEXT_TYPES,
    FLASH_ATTENTION,
    SPLIT_MODES,
    LoadOptions,
    physical_cores,
)

__all__ = [
    "CONTEXT_TYPES",
    "FLASH_ATTENTION",
    "SPLIT_MODES",
    "LlamaCppModel",
    "LoadOptions",
    "Weights",
    "available_bytes",
    "build_id",
    "check_build",
    "cpu_id",
    "device_names",
    "physical_cores",
    "show_log",
]
