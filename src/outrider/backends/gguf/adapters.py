"""LoRA adapters: files of small matrices that are added to a model's own, each with a scale."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from outrider.backends.gguf.context import clear_log, last_error
from outrider.core.errors import BackendError, ModelFileError

if TYPE_CHECKING:
    from outrider.backends.gguf.library import Library

Adapters = list[tuple[int, float]]
"""Native adapters, each with its scale. They live as long as their model, and are freed with it."""


def load_adapters(library: Library, model: int, adapters: tuple[tuple[str, float], ...]) -> Adapters:
    """The native adapters of these files. Raises ModelFileError for one that the library cannot use."""
    found: Adapters = []
    for name, scale in adapters:
        path = Path(name).expanduser()
        if not path.is_file():
            raise ModelFileError(name, "there is no such file", "Name a LoRA adapter (GGUF).")
        clear_log()
        adapter = library.load_adapter(model, path)
        if not adapter:
            why = last_error(f"{library.title} could not load it")
            raise ModelFileError(name, why, "Name a LoRA adapter (GGUF) that was made for this model.")
        if library.needs_invocation(adapter):
            why = "it is an activated LoRA, which would change the text after certain tokens alone"
            raise ModelFileError(name, why, "Name an ordinary LoRA adapter.")
        found.append((adapter, scale))
    return found


def use_adapters(library: Library, context: int, adapters: Adapters) -> None:
    """Add adapters to what a context computes. Raises BackendError."""
    clear_log()
    if adapters and not library.use_adapters(context, adapters):
        raise BackendError("LoRA adapters", last_error(f"{library.title} could not apply them"))
