"""Structures and functions of a C library, declared in tables."""

from __future__ import annotations

import ctypes
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

Signatures = Mapping[str, tuple[Any, ...]]
"""The result type and then the argument types of C functions, by name."""

_Fields = list[tuple[str, Any, Any]]


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
