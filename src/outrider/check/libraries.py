"""Which native library to take for a file: what a trial found here before, or when the file was loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from outrider.backends.gguf import LoadOptions
from outrider.backends.tuning import tuned_options


def library_to_take(path: Path, options: LoadOptions, measured: str) -> str:
    """A sentence that names the faster library for the file, where several were tried side by side under
    these options; empty where that never happened, or where a library of one's own was asked for. `measured`
    is the backend that all else was measured with. Nothing is measured here."""
    if options.library:
        return ""
    kept = tuned_options(path, replace(options, backend="auto"))
    if kept is None or not kept.compared:
        return ""
    take = kept.options.backend
    other = "" if take == measured else f", not {measured}, which was asked for"
    return f"take --backend {take}{other} ({kept.compared})"
