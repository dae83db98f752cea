"""GGUF models through llama.cpp's C API (llama-cpp-python's low-level bindings)."""

from outrider.backends.llama_cpp.guard import check_build
from outrider.backends.llama_cpp.library import build_id, show_log
from outrider.backends.llama_cpp.model import LlamaCppModel, Weights
from outrider.backends.llama_cpp.options import CONTEXT_TYPES, FLASH_ATTENTION, SPLIT_MODES, LoadOptions

__all__ = [
    "CONTEXT_TYPES",
    "FLASH_ATTENTION",
    "SPLIT_MODES",
    "LlamaCppModel",
    "LoadOptions",
    "Weights",
    "build_id",
    "check_build",
    "show_log",
]
