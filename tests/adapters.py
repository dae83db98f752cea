"""LoRA adapters for the tiny models: random matrices for one weight."""

from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from tiny_gguf import WIDTH

_RANK = 2


def write_adapter(path: Path, *, seed: int = 0, size: float = 0.05, width: int = WIDTH) -> Path:
    """Write an adapter of the first layer's attention output, whose product is about `size` large."""
    random = np.random.default_rng(seed)
    writer = GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(_RANK))
    for part, shape in (("a", (_RANK, width)), ("b", (width, _RANK))):
        values = random.normal(0, size**0.5, shape).astype(np.float32)
        writer.add_tensor(f"blk.0.attn_output.weight.lora_{part}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
