"""Structures and functions of a C library, declared as text: a C type, then the names that have it."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Mapping
from typing import Any, ClassVar

_TYPES: dict[str, Any] = {
    "void": None,
    "ptr": ctypes.c_void_p,
    "str": ctypes.c_char_p,
    "size": ctypes.c_size_t,
    "i8*": ctypes.POINTER(ctypes.c_int8),
    "i32": ctypes.c_int32,
    "i32*": ctypes.POINTER(ctypes.c_int32),
    "i32**": ctypes.POINTER(ctypes.POINTER(ctypes.c_int32)),
    "i64": ctypes.c_int64,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
    "bool": ctypes.c_bool,
    "enum": ctypes.c_int,
    "f32": ctypes.c_float,
    "f32*": ctypes.POINTER(ctypes.c_float),
}
_RESULT_BY_FIRST_ARGUMENT = ("x86_64", "amd64")
"""Processors on which a function that returns a large structure gets its address as the first argument."""
_ROOM_BYTES = 256
_UNTOUCHED = 0xA5

Signatures = Mapping[str, tuple[Any, ...]]
"""The result type and then the argument types of C functions, by name."""


class LibraryRefused(Exception):
    """A library cannot be used; the message says why."""


class CLibrary:
    """A loaded library: `functions` are its own by mainline's names; each takes what was declared for it."""

    title: ClassVar[str]
    """its name in messages"""
    names: ClassVar[Mapping[str, str]] = {}
    """what it calls functions, where that differs"""

    def __init__(self, functions: Any) -> None:
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


def functions(text: str, **kinds: Any) -> Signatures:
    """Lines of a result, names and arguments: `bool is_this is_that (ptr i32)`. `kinds`: further types."""
    types, found = _TYPES | kinds, dict[str, tuple[Any, ...]]()
    for line in text.strip().splitlines():
        head, _, arguments = line.partition("(")
        result, *names = head.split()
        signature = tuple(types[kind] for kind in (result, *arguments.rstrip(" )").split()))
        found |= dict.fromkeys(names, signature)
    return found


class Params(ctypes.Structure):
    """Parameters of a C function; `defaults`: what the library sets them to, where that is not 0."""

    defaults: ClassVar[Mapping[str, Any]] = {}


def structure(name: str, *texts: str) -> type[Params]:
    """A C structure of lines of a type and fields, with what a library sets them to where that is not 0:
    `i32 n_layers=-1 n_heads`. They lie so in memory."""
    declared, defaults = [], {}
    for line in "\n".join(texts).strip().splitlines():
        kind, *fields = line.split() or [""]
        for field in fields:
            key, _, default = field.partition("=")
            declared.append((key, _TYPES[kind]))
            if default:
                defaults[key] = float(default) if kind == "f32" else int(default, 0)
    return type(name, (Params,), {"_fields_": declared, "defaults": defaults})


def check_layout(function: Any, kind: type[Params], what: str) -> None:
    """Declare that a function returns default parameters of this structure. Raises LibraryRefused."""
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
    size = ctypes.sizeof(kind)
    buffer = (ctypes.c_ubyte * (size + _ROOM_BYTES))(*[_UNTOUCHED] * (size + _ROOM_BYTES))
    function.restype, function.argtypes = None, [ctypes.c_void_p]
    function(buffer)
    return sum(byte != _UNTOUCHED for byte in buffer[size:])
