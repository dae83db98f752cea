"""GGUF files of heads, which draft from hidden states of a target: real headers, no real weights, and models
whose own head is right now and then."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFWriter

from tiny_gguf import MERGES, WIDTH, vocabulary, write_tiny


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


def with_good_head(path: Path, arch: str, **of_tiny: Any) -> Path:
    """A model whose head says mostly what the model says next: its layers add little to the last token's
    embedding, and the head passes that on."""
    write_tiny(path, arch=arch, mtp_layers=1, context_length=512, repeating=True, **of_tiny)
    reader = GGUFReader(path, "r+")
    [tensor] = [tensor for tensor in reader.tensors if tensor.name.endswith("nextn.eh_proj.weight")]
    width = tensor.data.shape[0]
    tensor.data[:] = np.eye(width, 2 * width, dtype=np.float32)
    return path
