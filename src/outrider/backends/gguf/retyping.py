"""Matrices of one type made into another, by the installed library's own functions."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from outrider.backends.gguf.libraries import candidates
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.machine import physical_cores

Bytes = npt.NDArray[np.uint8]
"""(rows, bytes of a row)"""
Type = GGMLQuantizationType

_SIZES: dict[Type, tuple[int, int]] = GGML_QUANT_SIZES
_PART_ROWS = 4096
"""converted at once by a thread: enough to be worth the call, few enough to fit memory as floats"""
_NEED_MATRIX = (Type.IQ1_S, Type.IQ1_M, Type.IQ2_XXS, Type.IQ2_XS)


def row_bytes(kind: Type, columns: int) -> int:
    """Bytes of a row of so many numbers; 0 where they do not fill the type's blocks."""
    block, block_bytes = _SIZES[kind]
    return 0 if columns % block else columns // block * block_bytes


def as_floats(rows: Bytes, kind: Type) -> npt.NDArray[np.float32]:
    """The numbers of some rows. Raises NotImplementedError for a type that cannot be read here."""
    return np.ascontiguousarray(dequantize(np.ascontiguousarray(rows), kind), dtype=np.float32)


def can_make(kind: Type) -> bool:
    """Whether rows of the type can be made of floats alone, without statistics of a text."""
    return kind not in _NEED_MATRIX


def of_floats(floats: npt.NDArray[np.float32], kind: Type) -> Bytes:
    """Rows of floats as a type, whose blocks they fill. Raises BackendError where no library is here."""
    made = np.empty((len(floats), row_bytes(kind, floats.shape[1])), dtype=np.uint8)
    # With weights for the columns, even equal ones, the library looks for the scale of least error.
    equal = np.ones(floats.shape[1], dtype=np.float32)
    if made.size:
        _quantizer()(int(kind), floats.ctypes.data, made.ctypes.data, 0, *floats.shape, equal.ctypes.data)
    return made


def retyped(rows: Bytes, kind: Type, to: Type) -> Bytes:
    """The same rows in another type, on all cores."""
    if kind == to:
        return rows
    made = np.empty((len(rows), row_bytes(to, _columns(rows, kind))), dtype=np.uint8)
    starts = range(0, len(rows), _PART_ROWS)

    def convert(start: int) -> None:
        part = slice(start, start + _PART_ROWS)
        made[part] = of_floats(as_floats(rows[part], kind), to)

    with ThreadPoolExecutor(physical_cores()) as pool:
        list(pool.map(convert, starts))
    return made


def _columns(rows: Bytes, kind: Type) -> int:
    block, block_bytes = _SIZES[kind]
    return int(rows.shape[1] // block_bytes * block)


def _quantizer() -> Callable[..., Any]:
    functions = next(candidates(LoadOptions())).functions
    sizes = [ctypes.c_int64] * 3
    pointers = [ctypes.c_void_p] * 2
    prototype = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_int, *pointers, *sizes, ctypes.c_void_p)
    found: Callable[..., Any] = prototype(("ggml_quantize_chunk", functions))
    return found
