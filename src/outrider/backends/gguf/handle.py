"""Ownership of native memory: freed once, when it is closed or when nobody refers to it any more."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from outrider.core.errors import BackendError


class Handle:
    """A native object. What it rests on (`keeps`) lives at least as long as it does."""

    def __init__(self, name: str, pointer: Any, free: Callable[[Any], None], keeps: object = None) -> None:
        self._name = name
        self._pointer = pointer
        self._finalizer = weakref.finalize(self, _free, free, pointer, keeps)
        # The process gives everything back at its end, in an order that is always right.
        self._finalizer.atexit = False

    @property
    def pointer(self) -> Any:
        """The native pointer. Raises BackendError when it was closed."""
        if not self._finalizer.alive:
            raise BackendError(self._name, "the model was closed", "Load it again.")
        return self._pointer

    def close(self) -> None:
        """Free it now. Closing twice is harmless."""
        self._finalizer()


def _free(free: Callable[[Any], None], pointer: Any, _keeps: object) -> None:
    free(pointer)
