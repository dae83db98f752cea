"""The constants of the package gguf without the rest of it, for whose readers, writers and YAML each start
would wait."""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

_MODULE = "gguf.constants"


def _load_alone() -> None:
    """Import the module as if its package were loaded, which finds it there if it is imported later."""
    package = find_spec("gguf")
    if _MODULE in sys.modules or package is None or package.origin is None:
        return
    spec = spec_from_file_location(_MODULE, Path(package.origin).with_name("constants.py"))
    assert spec is not None and spec.loader is not None, "it is a file of Python"
    module = sys.modules[_MODULE] = module_from_spec(spec)
    spec.loader.exec_module(module)


_load_alone()

from gguf.constants import (  # noqa: E402 (it is there by now)
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGMLQuantizationType,
    GGUFValueType,
    Keys,
    LlamaFileType,
    TokenType,
)

__all__ = [
    "GGML_QUANT_SIZES",
    "GGUF_DEFAULT_ALIGNMENT",
    "GGMLQuantizationType",
    "GGUFValueType",
    "Keys",
    "LlamaFileType",
    "TokenType",
]
