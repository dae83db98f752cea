"""Files of the safetensors format: the length of a header, the header in JSON, the numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from outrider.core.errors import ModelFileError, SettingError
from outrider.distill.checkpoint import Array

__all__ = ["DataType", "read_tensors", "write_tensors"]

DataType = Literal["F32", "F16", "BF16"]

_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_MAX_HEADER_BYTES = 100_000_000
"""what readers of the format allow"""
_AGAIN = "Download it again."


def write_tensors(path: Path, tensors: Mapping[str, Array], kind: DataType) -> None:
    """Write the tensors as numbers of one type. Raises SettingError for what it cannot hold, and OSError."""
    ends = list(accumulate(values.size * _BYTES[kind] for values in tensors.values()))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for (name, values), end in zip(tensors.items(), ends, strict=True):
        offsets = [end - values.size * _BYTES[kind], end]
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": offsets}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name, values in tensors.items():
            with np.errstate(over="ignore"):
                stored = quantize(np.ascontiguousarray(values), GGMLQuantizationType[kind])
            if not np.isfinite(values).all() or (kind == "F16" and not np.isfinite(stored).all()):
                reason = f"{name} holds numbers that are infinite, none at all, or too large for {kind}"
                raise SettingError("the draft", reason, "Train it anew with a lower learning rate.")
            file.write(stored.tobytes())


def read_tensors(path: Path) -> Iterator[tuple[str, Array]]:
    """The tensors of a file, one after the other, in 32 bits. Raises ModelFileError when it is missing,
    damaged, or holds other types than F32, F16 and BF16."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise ModelFileError(str(path), "it is no safetensors file, or is cut short", _AGAIN)
            header = _header(path, file.read(length))
            for name, entry in header.items():
                start, end, kind, shape = _place(path, name, entry, size - 8 - length)
                file.seek(8 + length + start)
                yield name, _decoded(file.read(end - start), kind).reshape(shape)
    except OSError as error:
        reason = (error.strerror or "it cannot be read").lower()
        raise ModelFileError(str(path), reason, "Check the path.") from error


def _header(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(str(path), f"its header is no JSON ({error})", _AGAIN) from error
    if not isinstance(header, dict):
        raise ModelFileError(str(path), "its header is no JSON object", _AGAIN)
    header.pop("__metadata__", None)
    return header


def _place(path: Path, name: str, entry: Any, size: int) -> tuple[int, int, str, list[int]]:
    """Where a tensor's numbers lie behind the header, their type, and its shape."""
    try:
        kind, shape, (start, end) = entry["dtype"], list(entry["shape"]), entry["data_offsets"]
        counts = (*shape, start, end)
        is_sound = all(isinstance(n, int) and n >= 0 for n in counts) and start <= end <= size
    except (KeyError, TypeError, ValueError):
        raise ModelFileError(str(path), f"its entry for {name!r} is damaged", _AGAIN) from None
    if not isinstance(kind, str) or kind not in _BYTES:
        reason = f"{name} is of the type {kind}, and only {', '.join(_BYTES)} can be read"
        raise ModelFileError(str(path), reason, "Get the model without quantization.")
    if not is_sound or end - start != math.prod(shape) * _BYTES[kind]:
        raise ModelFileError(str(path), f"its entry for {name!r} is damaged, or it is cut short", _AGAIN)
    return start, end, kind, shape


def _decoded(data: bytes, kind: str) -> Array:
    values = dequantize(np.frombuffer(data, dtype=np.uint8), GGMLQuantizationType[kind])
    return np.array(values, dtype=np.float32)
