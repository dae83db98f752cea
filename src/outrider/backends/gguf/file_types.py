"""The types that a model file's weights can be quantized to, as llama.cpp's users write them."""

from __future__ import annotations

from outrider.core.errors import SettingError

__all__ = ["TYPES", "UNQUANTIZED", "block_size", "file_type", "read_type", "tensor_type"]

_NUMBERS = {
    "F32": (0, 0),
    "F16": (1, 1),
    "BF16": (32, 30),
    "Q8_0": (7, 8),
    "Q6_K": (18, 14),
    "Q5_K_M": (17, 13),
    "Q5_K_S": (16, 13),
    "Q5_1": (9, 7),
    "Q5_0": (8, 6),
    "Q4_K_M": (15, 12),
    "Q4_K_S": (14, 12),
    "Q4_1": (3, 3),
    "Q4_0": (2, 2),
    "IQ4_NL": (25, 20),
    "IQ4_XS": (30, 23),
    "Q3_K_L": (13, 11),
    "Q3_K_M": (12, 11),
    "Q3_K_S": (11, 11),
    "IQ3_M": (27, 21),
    "IQ3_S": (26, 21),
    "Q2_K": (10, 10),
}
"""llama_ftype of a file and ggml_type of its usual matrix: the same in llama.cpp and ik_llama.cpp."""

TYPES = tuple(_NUMBERS)
"""What can be made, the most precise first within each group."""

UNQUANTIZED = ("F64", "F32", "F16", "BF16", "I8", "I16", "I32", "I64")
"""Types of tensors that lost nothing to quantization."""

_USUAL_SIZE = {"Q5_K": "Q5_K_M", "Q4_K": "Q4_K_M", "Q3_K": "Q3_K_M"}
_NEED_MATRIX = ("IQ3_XS", "IQ3_XXS", "IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S", "Q2_K_S")
_WIDE_BLOCKS = ("_K", "IQ4_XS", "IQ3_")


def read_type(name: str) -> str:
    """The type as `TYPES` has it, in whatever case it is written. Raises SettingError."""
    wanted = name.strip().upper()
    wanted = _USUAL_SIZE.get(wanted, wanted)
    if wanted in _NEED_MATRIX:
        why = "llama.cpp makes it only with an importance matrix, measured on a text, which is not supported"
        raise SettingError(name, why, "Choose another type, or make it with llama-quantize --imatrix.")
    if wanted not in TYPES:
        raise SettingError(name or "''", "it is no type to quantize to", f"Choose among {', '.join(TYPES)}.")
    return wanted


def file_type(name: str) -> int:
    """The library's number for a type of `TYPES`."""
    return _NUMBERS[name][0]


def tensor_type(name: str) -> int:
    """The library's number for one matrix of such a type; of a mixture, for its most usual one."""
    return _NUMBERS[name][1]


def block_size(name: str) -> int:
    """How many weights of a row such a type stores together: rows of other lengths take another type."""
    if name in UNQUANTIZED:
        return 1
    return 256 if any(part in name for part in _WIDE_BLOCKS) else 32
