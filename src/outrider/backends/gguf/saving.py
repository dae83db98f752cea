"""All that a library stores of a sequence, as bytes: out of a context, and into one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from outrider.backends.gguf.context import clear_log, last_error
from outrider.core.errors import RewindUnsupported
from outrider.core.saved import Bytes

if TYPE_CHECKING:
    from outrider.backends.gguf.library import Library


def copy_out(library: Library, context: int, sequence: int, name: str) -> Bytes:
    """What a sequence of the context of the model `name` stores. Raises RewindUnsupported where the library
    cannot say."""
    native, flags = library.functions, library.state_flags
    clear_log()
    data = np.empty(native.llama_state_seq_get_size(context, sequence, *flags), dtype=np.uint8)
    size = native.llama_state_seq_get_data(context, data.ctypes.data, data.nbytes, sequence, *flags)
    if not size:
        raise RewindUnsupported(name, last_error(f"{library.title} cannot copy its state"))
    return data[:size]


def copy_in(library: Library, context: int, sequence: int, data: Bytes, name: str) -> None:
    """Give an empty sequence what `copy_out` copied. Raises RewindUnsupported where the library cannot; the
    sequence is empty then."""
    native, flags = library.functions, library.state_flags
    clear_log()

    def is_read() -> bool:
        given = data.ctypes.data, data.nbytes
        return bool(native.llama_state_seq_set_data(context, *given, sequence, *flags))

    if not is_read() and not (library.make_room(context) and is_read()):
        native.llama_memory_seq_rm(library.memory(context), sequence, -1, -1)
        raise RewindUnsupported(name, last_error(f"{library.title} cannot copy its state"))


def cut_from(window_tokens: int, length: int) -> int:
    """A copy of `length` tokens can be cut to any number of them from this one on: of a window no more is
    copied than the next token looks back at."""
    return length - 1 if 0 < window_tokens < length else 0
