"""The fields of a GGUF file with their kinds: what a file that is made of it carries over."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outrider.models.constants import GGUFValueType
from outrider.models.header import SCALARS, Array, Header

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a GGUF header; `items`: the kind of an array's entries. Strings are bytes."""

    value: Any
    kind: GGUFValueType
    items: GGUFValueType | None = None

    @property
    def text(self) -> str:
        """The value of a string."""
        return self.value.decode(errors="replace") if isinstance(self.value, bytes) else str(self.value)


def fields_of(path: Path, header: Header, prefixes: tuple[str, ...] = ("",)) -> dict[str, Field]:
    """The fields of a file whose header was read, with the entries of arrays: those whose keys begin so."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        found = {}
        for key, value in header.fields.items():
            if not key.startswith(prefixes):
                continue
            kind = header.kinds[key]
            if isinstance(value, Array):
                found[key] = Field(_entries(data, value), kind, value.kind)
            else:
                found[key] = Field(value.encode() if isinstance(value, str) else value, kind)
    return found


def _entries(data: mmap.mmap, array: Array) -> list[Any]:
    if array.kind is not GGUFValueType.STRING:
        return list(np.frombuffer(data, SCALARS[array.kind].format, array.length, array.start_byte).tolist())
    at, texts = array.start_byte, []
    for _ in range(array.length):
        [length] = _LENGTH.unpack_from(data, at)
        texts.append(data[at + 8 : at + 8 + length])
        at += 8 + length
    return texts
