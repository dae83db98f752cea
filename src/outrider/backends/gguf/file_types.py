"""The types that a model file's weights can be quantized to, as llama.cpp's users write them."""

from __future__ import annotations

import re

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from outrider.core.errors import SettingError

TYPES = (
    *("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0", "Q4_K_M", "Q4_K_S"),
    *("Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS", "Q3_K_L", "Q3_K_M", "Q3_K_S", "IQ3_M", "IQ3_S", "Q2_K"),
)
"""What can be made, the most precise first within each group."""

UNQUANTIZED = ("F64", "F32", "F16", "BF16", "I8", "I16", "I32", "I64")
"""Types of tensors that lost nothing to quantization."""

_USUAL_SIZE = {"Q5_K": "Q5_K_M", "Q4_K": "Q4_K_M", "Q3_K": "Q3_K_M"}
_NEED_MATRIX = ("IQ3_XS", "IQ3_XXS", "IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S", "Q2_K_S")


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
    """The library's number (llama_ftype) for a type of `TYPES`: one in llama.cpp and ik_llama.cpp."""
    return LlamaFileType[f"ALL_{name}" if name == "F32" else f"MOSTLY_{name}"].value


def tensor_type(name: str) -> int:
    """The library's number (ggml_type) for one matrix of such a type; of a mixture, its most usual one."""
    return _tensor_type(name).value


def block_size(name: str) -> int:
    """How many weights of a row such a type, or such a type of tensors, stores together: rows of other
    lengths take another type."""
    return GGML_QUANT_SIZES[_tensor_type(name)][0]


def _tensor_type(name: str) -> GGMLQuantizationType:
    usual = "IQ3_S" if name == "IQ3_M" else re.sub(r"_K_[SML]$", "_K", name)
    return GGMLQuantizationType[usual]
