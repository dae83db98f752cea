"""The native libraries that run GGUF models: one row for each dialect of llama.cpp's C API."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dialect:
    """A dialect: its name as a backend and in messages, the module that declares it (as its `Dialect`), a
    function that only it has, and the packages that bring a library of it (distribution and module, the
    preferred one first)."""

    name: str
    title: str
    module: str
    marker: str
    packages: tuple[tuple[str, str], ...]


DIALECTS = (
    Dialect(
        "ik",
        "ik_llama.cpp",
        "outrider.backends.gguf.ik",
        "llama_kv_cache_seq_rm",
        (("ik-llama-cpp-python", "ik_llama_cpp"),),
    ),
    Dialect(
        "llama.cpp",
        "llama.cpp",
        "outrider.backends.gguf.mainline",
        "llama_memory_seq_rm",
        (("llama-cpp-python", "llama_cpp"), ("xllamacpp", "xllamacpp")),
    ),
)
"""The preferred one first."""
TITLES = {row.name: row.title for row in DIALECTS}
