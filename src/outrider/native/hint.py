"""The line that says, once on each machine, that a library can be compiled for its CPU."""

from __future__ import annotations

import os

from outrider.core.errors import BuildError
from outrider.native.cpu import cpu_id
from outrider.native.place import IK, builds_dir, native_library
from outrider.native.tools import check_compilers

__all__ = ["hint_once"]

_HINT = (
    "`outrider setup --native` compiles ik_llama.cpp for this CPU in some minutes; on the machines where "
    "that was measured, such a build was 1.1 to 1.25x as fast as the ready-made one"
)


def hint_once() -> str | None:
    """The line; None where it was said before, where the library is there, where there are no compilers, and
    where the cache cannot keep that it was said."""
    if native_library() is not None:
        return None
    try:
        check_compilers(IK.name, os.environ)
        builds_dir().mkdir(parents=True, exist_ok=True)
        # The cache may be shared between machines.
        (builds_dir() / f"hint-{cpu_id()}").open("x").close()
    except (BuildError, OSError):
        return None
    return _HINT
