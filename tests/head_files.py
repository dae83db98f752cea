"""GGUF files of heads, which draft from hidden states of a target: such as are right now and then, and such
that have real headers and no real weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from outrider.backends.gguf import LoadOptions
from outrider.core.errors import OutriderError
from outrider.session.pair import Pair
from tiny.sizes import Sizes
from tiny_gguf import MERGES, WIDTH, vocabulary, write_tiny

EVEN = tuple(range(0, 289, 2))
"""half of the default vocabulary"""


def write_eagle(path: Path, *, layers: Sequence[int] = (0, 1, 1), agrees: bool = True, **made: Any) -> Path:
    """An EAGLE-3 head for a tiny target that repeats itself, of two layers and the same seed. Where it
    `agrees` it says now and then what the target says next: its attention looks at a token by itself and
    passes on its embedding, to which the target's states add something. `made` are fields of Tiny."""
    sizes = Sizes(kv_heads=2)
    usual: dict[str, Any] = {"sizes": sizes, "left_out": ("token_embd.weight",)}
    read = {"target_layers": [*layers], "target_hidden_size": WIDTH} | made.pop("metadata", {})
    write_tiny(path, arch="eagle3", metadata=read, **usual | made)
    if not agrees:
        return path
    tensors = {tensor.name: tensor.data for tensor in GGUFReader(path, "r+").tensors}
    first = np.eye(sizes.query, 2 * WIDTH, dtype=np.float32)
    for name, scale in (("q", 4.0), ("k", 4.0), ("v", 1.0)):
        tensors[f"blk.0.attn_{name}.weight"][:] = scale * first
    tensors["blk.0.attn_output.weight"][:] = np.eye(WIDTH, dtype=np.float32)
    tensors["blk.0.ffn_down.weight"][:] *= 0.05
    tensors["fc.weight"][:] *= 0.15
    return path


def write_block(path: Path, target: Path, arch: str, *, agrees: bool = True, **made: Any) -> Path:
    """A block drafter ("dflash", "dflash2", "dspark") for a tiny target that repeats itself. Where it `agrees` it
    says now and then what the target says next: open places look at the last token, whose embedding they pass
    on; DSpark's Markov head says it of every place."""
    usual: dict[str, Any] = {
        "sizes": Sizes(kv_heads=2), "left_out": ("token_embd.weight", "output.weight")
    }
    near = {"rope.dimension_count": 2} if agrees else {}  # where a place is tells little
    write_tiny(path, arch=arch, metadata=near | made.pop("metadata", {}), **usual | made)
    if not agrees:
        return path
    tensors = {tensor.name: tensor.data for tensor in GGUFReader(path, "r+").tensors}
    of_target = {tensor.name: tensor.data for tensor in GGUFReader(target).tensors}
    for i in range(2):
        tensors[f"blk.{i}.attn_q.weight"][:] = -tensors[f"blk.{i}.attn_k.weight"]
        tensors[f"blk.{i}.attn_q_norm.weight"][:] *= 2.0
        tensors[f"blk.{i}.ffn_down.weight"][:] *= 0.05
        tensors[f"blk.{i}.attn_output.weight"][:] *= 0.05 if i else 0.0
    tensors["blk.0.attn_v.weight"][:] = 100 * np.eye(WIDTH)
    tensors["blk.0.attn_output.weight"][:] = np.eye(WIDTH)
    tensors["enc.output_norm.weight"][:] *= 0.02
    if arch == "dspark":
        tensors["markov_w1.weight"][:] = 60 * of_target["token_embd.weight"]
        tensors["markov_w2.weight"][:] = of_target["output.weight"]
    return path


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
    """A model, or a `part` of one, whose head says mostly what the model says next: its layers add little to
    the last token's embedding, and the head passes that on."""
    write_tiny(path, arch=arch, mtp_layers=1, context_length=512, repeating=True, **of_tiny)
    reader = GGUFReader(path, "r+")
    [tensor] = [tensor for tensor in reader.tensors if tensor.name.endswith("nextn.eh_proj.weight")]
    width = tensor.data.shape[0]
    tensor.data[:] = np.eye(width, 2 * width, dtype=np.float32)
    return path


OPTIONS = LoadOptions(backend="llama.cpp", threads=1, cache_type_k="f32", cache_type_v="f32")


@dataclass(frozen=True)
class Files:
    """A target and a file of heads for it; None: it has one of its own."""

    target: Path
    head: Path | None

    def why_refused(self, options: LoadOptions = OPTIONS) -> str:
        """Why they do not run together, in a line."""
        with pytest.raises(OutriderError) as caught:
            Pair.load(self.target, self.head, options=options).close()
        assert str(self.head) in caught.value.what and caught.value.way_out and "\n" not in str(caught.value)
        return caught.value.why


def write_files(folder: Path, kind: str, *, agrees: bool = True, **of_head: Any) -> Files:
    """Of a kind: "own", "eagle3", "mtp", a block drafter's or an assistant's, and the target's architecture;
    `of_head` are fields of Tiny for the latter two."""
    what, arch = kind.split(" ")
    if what in ("dflash", "dflash2", "dspark", "assistant", "gemma4-assistant"):
        target = write_tiny(folder / "target.gguf", arch=arch, context_length=512, repeating=True)
        head = folder / f"{what}.gguf"
        if "assistant" in what:
            made = {"sizes": Sizes(width=WIDTH // 2), "left_out": ("output.weight",), "repeating": agrees}
            return Files(target, write_tiny(head, arch="gemma4-assistant", **made | of_head))
        if arch == "qwen35":
            of_head = {"metadata": {"target_layers": [0, 2, 3]}} | of_head
        return Files(target, write_block(head, target, what, agrees=agrees, **of_head))
    if what == "own" and agrees:
        return Files(with_good_head(folder / "target.gguf", arch), None)
    if what == "own":
        return Files(write_tiny(folder / "target.gguf", arch=arch, mtp_layers=1, context_length=512), None)
    made: dict[str, Any] = {"arch": arch, "context_length": 512, "repeating": agrees}
    if what == "mtp":
        target = write_tiny(folder / "target.gguf", **made)
        write = with_good_head if agrees else write_tiny
        own = {} if agrees else {"mtp_layers": 1}
        return Files(target, write(folder / "head.gguf", arch=arch, part="heads", **own))
    target = write_tiny(folder / "target.gguf", **made)
    layers = (0, 2, 4) if arch == "qwen35" else (0, 1, 1)
    return Files(target, write_eagle(folder / "head.gguf", layers=layers, agrees=agrees, drafted=EVEN))
