"""The fields of a GGUF file with their kinds: what a file that is made of it carries over."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFValueType, ReaderField
from gguf.constants import Keys

from outrider.models.header import Array, Header

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a GGUF header; `items`: the kind of an array's entries. Strings are bytes."""

    value: Any
    kind: GGUFValueType
    items: GGUFValueType | None = None


def token_spellings(metadata: Mapping[str, ReaderField]) -> list[bytes]:
    """The tokens that a file's metadata lists, in order of id; none where there is no list."""
    found = metadata.get(Keys.Tokenizer.LIST)
    return [] if found is None else read_field(found).value


def read_field(found: ReaderField) -> Field:
    """A field of a file that was read, strings as they are in it: not all are valid UTF-8."""
    kind = found.types[0]
    items = found.types[-1] if kind is GGUFValueType.ARRAY else None
    if items is GGUFValueType.STRING:
        return Field([found.parts[place].tobytes() for place in found.data], kind, items)
    if kind is GGUFValueType.STRING:
        return Field(found.parts[-1].tobytes(), kind)
    return Field(found.contents(), kind, items)


def fields_of(path: Path, header: Header) -> dict[str, Field]:
    """All fields of a file whose header was read, with the entries of its arrays."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        found = {}
        for key, value in header.fields.items():
            kind = header.kinds[key]
            if isinstance(value, Array):
                found[key] = Field(_entries(data, value), kind, value.kind)
            else:
                found[key] = Field(value.encode() if isinstance(value, str) else value, kind)
    return found


def _entries(data: mmap.mmap, array: Array) -> list[Any]:
    if array.kind is not GGUFValueType.STRING:
        return list(np.frombuffer(data, _DTYPES[array.kind], array.length, array.start_byte).tolist())
    at, texts = array.start_byte, []
    for _ in range(array.length):
        [length] = _LENGTH.unpack_from(data, at)
        texts.append(data[at + 8 : at + 8 + length])
        at += 8 + length
    return texts


_KINDS: tuple[str, ...] = (
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float32",
    "float64",
    "bool",
)
_DTYPES = {GGUFValueType[kind.upper()]: np.dtype(kind).newbyteorder("<") for kind in _KINDS}
