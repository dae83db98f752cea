"""GGUF files of heads, which draft from hidden states of a target: real headers, no real weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from tiny_gguf import MERGES, WIDTH, vocabulary


def write_heads(
    path: Path,
    arch: str,
    *,
    layers: int = 1,
    mtp_layers: int = 0,
    held: Sequence[int] = (0,),
    tokens: Sequence[str] | None = None,
) -> Path:
    """A file of `arch` that says it has so many layers, of which it holds `held`. `tokens` None is the tiny
    models' vocabulary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(path, arch)
    writer.add_block_count(layers)
    if mtp_layers:
        writer.add_nextn_predict_layers(mtp_layers)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(list(vocabulary(MERGES) if tokens is None else tokens))
    for name in ("token_embd", *(f"blk.{layer}.attn_norm" for layer in held)):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
