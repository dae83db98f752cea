"""The native libraries that run GGUF models: one row for each dialect of llama.cpp's C API."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dialect:
    """A dialect: its name as a backend and in messages, the class that declares it, a function that only it
    has, and the packages that bring a library of it (distribution and module, the preferred one first)."""

    name: str
    title: str
    kind: str
    marker: str
    packages: tuple[tuple[str, str], ...]


DIALECTS = (
    Dialect(
        "ik",
        "ik_llama.cpp",
        "outrider.backends.gguf.ik:Ik",
        "llama_kv_cache_seq_rm",
        (("ik-llama-cpp-python", "ik_llama_cpp"),),
    ),
    Dialect(
        "llama.cpp",
        "llama.cpp",
        "outrider.backends.gguf.library:Library",
        "llama_memory_seq_rm",
        (("llama-cpp-python", "llama_cpp"), ("xllamacpp", "xllamacpp")),
    ),
)
"""The preferred one first."""
TITLES = {row.name: row.title for row in DIALECTS}
