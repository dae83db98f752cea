"""The header of a GGUF file: its fields and its tensors' shapes, without the weights.

Written by hand because `gguf.GGUFReader` takes 7 s on a model with a vocabulary of 151,936 tokens (here they
are skipped in 0.1 s), and goes on without end, or without a bound on memory, where a damaged file claims a
long array. The layout is that of docs/gguf.md in the ggml repository, versions 2 and 3."""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outrider.core.errors import ModelFileError
from outrider.core.files import reason_of
from outrider.models.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGMLQuantizationType,
    GGUFValueType,
    Keys,
)

_MAX_STRING_BYTES = 16 * 2**20
_MAX_DIMENSIONS = 4
_DOWNLOAD_AGAIN = "Download it again."
_BROKE_OFF = "The download was cut short: download it again."
_CONVERT = "Get the model's GGUF file, or convert it with llama.cpp's convert_hf_to_gguf.py."
_POSITIVE = ".block_count", ".wkv.head_size"
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_NAMES = (
    *("UINT8", "INT8", "UINT16", "INT16", "UINT32", "INT32"),
    *("UINT64", "INT64", "FLOAT32", "FLOAT64", "BOOL"),
)
SCALARS = {
    GGUFValueType[name]: struct.Struct(f"<{code}") for name, code in zip(_NAMES, "BbHhIiQqfd?", strict=True)
}
"""The layout of each kind of value but strings and arrays."""


@dataclass(frozen=True, slots=True)
class Array:
    """An array field: its length, the kind of its entries, and which bytes of the file they take."""

    length: int
    kind: GGUFValueType
    start_byte: int
    num_bytes: int


Value = bool | int | float | str | Array
"""What a field holds."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's entry in the header. `shape` is in GGUF's order: a row's length first,
    experts last. `num_bytes` is None for a type that the `gguf` package does not know."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset_bytes: int
    num_bytes: int | None

    @property
    def num_parameters(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """All that a GGUF file says before its weights begin."""

    fields: dict[str, Value]
    kinds: dict[str, GGUFValueType]
    """of the fields"""
    tensors: tuple[TensorInfo, ...]
    file_bytes: int
    data_byte: int
    """where the weights begin, from which their offsets count"""

    def text(self, key: str) -> str | None:
        value = self.fields.get(key)
        return value if isinstance(value, str) else None

    def number(self, key: str) -> int | None:
        """An integer field; None when it is absent or of another type."""
        value = self.fields.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def numbers(self, key: str, path: Path) -> tuple[int, ...]:
        """The 32-bit numbers of an array, read from the file at `path`; none of any other field."""
        array = self.fields.get(key)
        if not isinstance(array, Array) or array.kind not in (GGUFValueType.INT32, GGUFValueType.UINT32):
            return ()
        return tuple(np.fromfile(path, "<i4", array.length, offset=array.start_byte).tolist())


def read_header(path: Path) -> Header:
    """Read the header of one GGUF file and check that its weights are all there. Whatever the file claims,
    the work and the memory are bounded by its size. Raises ModelFileError."""
    try:
        with path.open("rb") as file:
            file_bytes = file.seek(0, 2)
            if not file_bytes:
                raise ModelFileError(str(path), "the file is empty", _DOWNLOAD_AGAIN)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).header()
    except (OSError, ValueError) as error:
        raise ModelFileError(
            str(path), f"it cannot be read ({reason_of(error)})", "Check the file."
        ) from error


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = 0

    def header(self) -> Header:
        self._check_kind()
        num_tensors, num_fields = self._next(_U64), self._next(_U64)
        found = [self._field() for _ in range(num_fields)]
        fields = {key: value for key, _, value in found}
        tensors = tuple(self._tensor() for _ in range(num_tensors))
        # llama.cpp asserts that there are layers, and dies; a state of no values it can give no room.
        for key, value in fields.items():
            if key.endswith(_POSITIVE) and not (isinstance(value, int) and value > 0):
                raise self._error(f"its field {key} is {value}")
        start = self._check_weights(tensors, fields.get(Keys.General.ALIGNMENT, GGUF_DEFAULT_ALIGNMENT))
        return Header(fields, {key: kind for key, kind, _ in found}, tensors, self._size, start)

    def _check_kind(self) -> None:
        magic = self._data[:4]
        if magic != b"GGUF" and b"GGUF".startswith(magic):
            raise self._cut_short()
        if magic != b"GGUF":
            raise self._error(*_what_it_is(self._data[:512]))
        self._at = 4
        version = self._next(_U32)
        if version not in (2, 3):
            what = f"GGUF version {version}" if version & 0xFFFF else "a big-endian GGUF"
            way_out = "Get a current conversion of the model, or update Outrider."
            raise self._error(f"it is {what}, and only versions 2 and 3, little-endian, can be read", way_out)

    def _field(self) -> tuple[str, GGUFValueType, Value]:
        key, kind = self._string(), self._value_type()
        if kind is GGUFValueType.ARRAY:
            return key, kind, self._array()
        is_text = kind is GGUFValueType.STRING
        value: Value = self._string() if is_text else self._next(SCALARS[kind])
        return key, kind, value

    def _array(self) -> Array:
        kind, length = self._value_type(), self._next(_U64)
        start = self._at
        if kind is GGUFValueType.ARRAY:
            raise self._error("its header holds an array of arrays, which no model has")
        if kind is GGUFValueType.STRING:
            self._skip_strings(length)
        else:
            self._at += length * SCALARS[kind].size
        if self._at > self._size:
            raise self._cut_short()
        return Array(length, kind, start, self._at - start)

    def _skip_strings(self, count: int) -> None:
        """Step over a vocabulary: a loop of its own, since it is most of the header."""
        at, last, data, read_length = self._at, self._size - 8, self._data, _U64.unpack_from
        for _ in range(count):
            if at > last:
                raise self._cut_short()
            at += 8 + read_length(data, at)[0]
        self._at = at

    def _tensor(self) -> TensorInfo:
        name = self._string()
        num_dimensions = self._next(_U32)
        if num_dimensions > _MAX_DIMENSIONS:
            raise self._error(f"its tensor {name!r} claims {num_dimensions} dimensions")
        shape = tuple(self._next(_U64) for _ in range(num_dimensions))
        kind, offset = self._next(_U32), self._next(_U64)
        parameters = math.prod(shape)
        if max(parameters, offset) >= 2**63:
            raise self._error(f"its tensor {name!r} claims an impossible size")
        try:
            tensor_type = GGMLQuantizationType(kind)
        except ValueError:
            return TensorInfo(name, shape, f"type {kind}", offset, None)
        block, block_bytes = GGML_QUANT_SIZES[tensor_type]
        return TensorInfo(name, shape, tensor_type.name, offset, parameters // block * block_bytes)

    def _check_weights(self, tensors: tuple[TensorInfo, ...], alignment: Value) -> int:
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._error(f"its alignment of {alignment} is not a power of two")
        start = -(-self._at // alignment) * alignment
        end = max((start + tensor.offset_bytes + (tensor.num_bytes or 0) for tensor in tensors), default=0)
        if end > self._size:
            raise self._error(f"{end - self._size:,} of {end:,} bytes are missing at its end", _BROKE_OFF)
        return start

    def _string(self) -> str:
        length = self._next(_U64)
        if length > self._size - self._at:
            raise self._cut_short()
        if length > _MAX_STRING_BYTES:
            raise self._error(f"its header holds a string of {length:,} bytes")
        self._at += length
        return self._data[self._at - length : self._at].decode(errors="replace")

    def _value_type(self) -> GGUFValueType:
        kind = self._next(_U32)
        try:
            return GGUFValueType(kind)
        except ValueError:
            raise self._error(f"its header has a field of unknown type {kind}") from None

    def _next(self, layout: struct.Struct) -> Any:
        if layout.size > self._size - self._at:
            raise self._cut_short()
        [value] = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return value

    def _cut_short(self) -> ModelFileError:
        return self._error(f"it ends after {self._size:,} bytes, within its header", _BROKE_OFF)

    def _error(self, reason: str, way_out: str = _DOWNLOAD_AGAIN) -> ModelFileError:
        return ModelFileError(str(self._path), reason, way_out)


_OTHER_FILES = {
    (b"version https://git-lfs",): (
        "a Git LFS pointer, not the model itself",
        "Fetch it with `git lfs pull`.",
    ),
    (b"<!doctype", b"<html", b"<?xml"): (
        "a web page, not a GGUF",
        "Download the file itself, from the page's download link.",
    ),
}
"""How other files begin, in lower case, and what they are."""


def _what_it_is(start: bytes) -> tuple[str, str]:
    if start[8:9] == b"{":
        return "it is a safetensors file, not a GGUF", _CONVERT
    for beginnings, (what, way_out) in _OTHER_FILES.items():
        if start.lstrip().lower().startswith(beginnings):
            return f"it is {what}", way_out
    return "not a GGUF file", _CONVERT


# What a file that is made of another carries over


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a GGUF header; `items`: the kind of an array's entries. Strings are bytes."""

    value: Any
    kind: GGUFValueType
    items: GGUFValueType | None = None

    @property
    def text(self) -> str:
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
        [length] = _U64.unpack_from(data, at)
        texts.append(data[at + 8 : at + 8 + length])
        at += 8 + length
    return texts
