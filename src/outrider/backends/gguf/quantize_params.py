"""llama_model_quantize_params in both dialects, and the library that quantizes."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.backends.gguf.libraries import installed, open_library
from outrider.backends.gguf.library import BOOL, INT, POINTER, TEXT, Library, LibraryRefused
from outrider.core.errors import BackendError

__all__ = ["Quantizer", "find_quantizer"]

ENUM = ctypes.c_int
_Fields = list[tuple[str, Any]]


def _of(kind: Any, *names: str) -> _Fields:
    return [(name, kind) for name in names]


class _Mainline(ctypes.Structure):
    _fields_ = [
        ("nthread", INT),
        *_of(ENUM, "ftype", "output_tensor_type", "token_embedding_type"),
        *_of(
            BOOL, "allow_requantize", "quantize_output_tensor", "only_copy", "pure", "keep_split", "dry_run"
        ),
        *_of(POINTER, "imatrix", "kv_overrides", "tt_overrides", "prune_layers"),
        ("max_buf_size", ctypes.c_size_t),
    ]


_IK_TYPES = (
    *("output_tensor_type", "token_embedding_type", "attn_q_type", "attn_k_type", "attn_v_type"),
    *("attn_qkv_type", "attn_output_type", "ffn_gate_type", "ffn_down_type", "ffn_up_type"),
    "ffn_gate_inp_type",
)


class _Ik(ctypes.Structure):
    _fields_ = [
        ("nthread", INT),
        *_of(ENUM, "ftype", *_IK_TYPES),
        *_of(BOOL, "allow_requantize", "quantize_output_tensor", "only_copy", "pure", "keep_split"),
        *_of(BOOL, "ignore_imatrix_rules", "only_repack", "dry_run", "partial_requant"),
        *_of(POINTER, "imatrix", "kv_overrides", "custom_quants", "repack_pattern"),
    ]


_EIGHT_GIB = 8 * 2**30
_DIALECTS: dict[str, tuple[type[ctypes.Structure], int, Mapping[str, Any]]] = {
    "llama.cpp": (
        _Mainline,
        43,
        {"ftype": 7, "output_tensor_type": 43, "token_embedding_type": 43, "max_buf_size": _EIGHT_GIB},
    ),
    "ik": (_Ik, 400, {"ftype": 9, **dict.fromkeys(_IK_TYPES, 400)}),
}
"""The structure, ggml's number for "no type", and the defaults that are not 0. Were the structure laid out in
another way, these would not stand where they are looked for."""


@dataclass(frozen=True, slots=True)
class Quantizer:
    """A library that quantizes. `params` are its defaults, `no_type` the number of "leave it open"."""

    library: Library
    params: Any
    no_type: int

    def run(self, source: bytes, output: bytes) -> bool:
        """Quantize a file under `params`; False where the library refuses (its log says why)."""
        function = self.library.functions.llama_model_quantize
        function.restype = ctypes.c_uint32
        function.argtypes = [TEXT, TEXT, ctypes.POINTER(type(self.params))]
        return bool(function(source, output, ctypes.byref(self.params)) == 0)


def find_quantizer() -> Quantizer:
    """The first installed library that quantizes, llama.cpp before ik_llama.cpp. Raises BackendError."""
    reasons = []
    for file in sorted(installed(), key=lambda file: file.source.startswith("ik")):
        try:
            return _quantizer(open_library(file))
        except LibraryRefused as refusal:
            reasons.append(f"{file}: {refusal}")
    why = "; ".join(reasons) or "no library is installed"
    raise BackendError("quantizer", why, "Install one: pip install ik-llama-cpp-python.")


def _quantizer(library: Library) -> Quantizer:
    kind, no_type, expected = _DIALECTS[library.backend]
    expected = {"quantize_output_tensor": True, **expected}
    try:
        function = library.functions.llama_model_quantize_default_params
        _ = library.functions.llama_model_quantize
    except AttributeError:
        raise LibraryRefused("it has no quantizer") from None
    function.restype, function.argtypes = kind, []
    params = function()
    for name, *_ in kind._fields_:
        if (getattr(params, name) or 0) != expected.get(name, 0):
            raise LibraryRefused(f"its quantizer's parameters are laid out in another way ({name})")
    return Quantizer(library, params, no_type)
