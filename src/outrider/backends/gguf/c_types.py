"""Structures and functions of a C library, declared in tables."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Mapping
from typing import Any, ClassVar

POINTER, TEXT, SIZE = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
INT, UINT, BOOL, ENUM, FLOAT = (
    ctypes.c_int32,
    ctypes.c_uint32,
    ctypes.c_bool,
    ctypes.c_int,
    ctypes.c_float,
)

_RESULT_BY_FIRST_ARGUMENT = ("x86_64", "amd64")
"""Processors on which a function that returns a large structure gets its address as the first argument."""
_ROOM_BYTES = 256
_UNTOUCHED = 0xA5

Signatures = Mapping[str, tuple[Any, ...]]
"""The result type and then the argument types of C functions, by name."""


class CLibrary:
    """A loaded library: `functions` are its own by mainline's names; each takes what was declared for it."""

    names: ClassVar[Mapping[str, str]] = {}
    """what it calls functions, where that differs"""

    def __init__(self, title: str, functions: Any) -> None:
        self.title = title
        """its name in messages"""
        self.functions = functions

    def declare(self, signatures: Signatures) -> None:
        """Say what the library's functions take and return. Raises LibraryRefused where one is missing."""
        for name, (result, *arguments) in signatures.items():
            own_name = self.names.get(name, name)
            try:
                function = getattr(self.functions, own_name)
            except AttributeError:
                raise LibraryRefused(f"it has no function {own_name}") from None
            function.restype, function.argtypes = result, arguments
            setattr(self.functions, name, function)


_Fields = list[tuple[str, Any, Any]]


class LibraryRefused(Exception):
    """A library cannot be used; the message says why."""


class Params(ctypes.Structure):
    """Parameters of a C function; `defaults`: what the library sets them to, where that is not 0."""

    defaults: ClassVar[Mapping[str, Any]] = {}


def fields(kind: Any, /, *names: str, **defaults: Any) -> _Fields:
    """Consecutive fields of one C type: those that default to 0 by name alone, then those that do not."""
    return [*((name, kind, 0) for name in names), *((name, kind, value) for name, value in defaults.items())]


def structure(name: str, *groups: _Fields) -> type[Params]:
    """A C structure from groups of fields, in the order in which they lie in memory."""
    declared = [field for group in groups for field in group]
    return type(
        name,
        (Params,),
        {
            "_fields_": [(field, kind) for field, kind, _ in declared],
            "defaults": {field: value for field, _, value in declared if value},
        },
    )


def functions(names: str, result: Any, *arguments: Any) -> Signatures:
    """The functions of these names (separated by spaces), which all have one signature."""
    return dict.fromkeys(names.split(), (result, *arguments))


def check_layout(function: Any, kind: type[Params], what: str) -> None:
    """Declare that a function returns default parameters of this structure. Raises LibraryRefused where what
    it returns is not laid out so."""
    what = what.replace("_", " ")
    if platform.machine().lower() in _RESULT_BY_FIRST_ARGUMENT and _bytes_beyond(function, kind):
        raise LibraryRefused(f"its {what} parameters are larger than expected")
    function.restype, function.argtypes = kind, []
    params = function()
    for name, *_ in kind._fields_:
        value = getattr(params, name) or 0
        if value != kind.defaults.get(name, 0):
            raise LibraryRefused(
                f"its {what} parameters are laid out in another way than expected: {name} is {value!r}"
            )


def _bytes_beyond(function: Any, kind: type[ctypes.Structure]) -> int:
    """How many bytes after its structure a function writes that returns `kind`."""
    size = ctypes.sizeof(kind)
    buffer = (ctypes.c_ubyte * (size + _ROOM_BYTES))(*[_UNTOUCHED] * (size + _ROOM_BYTES))
    function.restype, function.argtypes = None, [POINTER]
    function(buffer)
    return sum(byte != _UNTOUCHED for byte in buffer[size:])
