"""GGUF files of heads, which draft from hidden states of a target: such as are right now and then, and such
that have real headers and no real weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from outrider.backends.gguf.options import LoadOptions
from outrider.core.errors import OutriderError
from outrider.session.pair import Pair
from tiny import Sizes
from tiny_gguf import MERGES, WIDTH, finish, vocabulary, write_tiny

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
    """A block drafter ("dflash", "dflash2", "dspark", "dspark-v4": in DeepSeek-V4's layers) for a tiny target
    that repeats itself. Where it `agrees` it says now and then what the target says next: open places look at
    the last token, whose embedding they pass on; DSpark's Markov head says it of every place."""
    usual: dict[str, Any] = {"sizes": Sizes(kv_heads=2), "left_out": ("token_embd.weight", "output.weight")}
    near = {"rope.dimension_count": 2} if agrees else {}  # where a place is tells little
    write_tiny(path, arch=arch, metadata=near | made.pop("metadata", {}), **usual | made)
    if not agrees:
        return path
    tensors = {tensor.name: tensor.data for tensor in GGUFReader(path, "r+").tensors}
    of_target = {tensor.name: tensor.data for tensor in GGUFReader(target).tensors}
    if arch.startswith("dspark"):
        tensors["markov_w1.weight"][:] = 60 * of_target["token_embd.weight"]
        tensors["markov_w2.weight"][:] = of_target["output.weight"]
    if arch == "dspark-v4":
        tensors["output_norm.weight"][:] *= 0.05
        return path
    for i in range(2):
        tensors[f"blk.{i}.attn_q.weight"][:] = -tensors[f"blk.{i}.attn_k.weight"]
        tensors[f"blk.{i}.attn_q_norm.weight"][:] *= 2.0
        tensors[f"blk.{i}.ffn_down.weight"][:] *= 0.05
        tensors[f"blk.{i}.attn_output.weight"][:] *= 0.05 if i else 0.0
    tensors["blk.0.attn_v.weight"][:] = 100 * np.eye(WIDTH)
    tensors["blk.0.attn_output.weight"][:] = np.eye(WIDTH)
    tensors["enc.output_norm.weight"][:] *= 0.002
    if arch == "dflash2":  # convolutions that change nothing, and candidates in the order of their logits
        for name, data in tensors.items():
            if name.endswith("conv_base"):
                data[:] = np.eye(1, data.shape[1]).T
            elif "conv_proj" in name or "selector_hidden" in name:
                data[:] *= 0.01
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
    finish(writer)
    return path


def with_good_head(path: Path, arch: str, **of_tiny: Any) -> Path:
    """A model, or a `part` of one, whose head says mostly what the model says next: its layers add little to
    the last token's embedding, and the head passes that on."""
    usual: dict[str, Any] = {"mtp_layers": 1, "context_length": 512, "repeating": True}
    write_tiny(path, arch=arch, **usual | of_tiny)
    for tensor in GGUFReader(path, "r+").tensors:
        if tensor.name.endswith("nextn.eh_proj.weight"):
            tensor.data[:] = np.eye(*tensor.data.shape, dtype=np.float32)
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


def write_assistant(path: Path, target: Path, *, agrees: bool = True, **made: Any) -> Path:
    """A Gemma 4 assistant for a tiny target. Where it `agrees` it looks at half of the last token's
    embedding, and knows as much of the target's output."""
    small: dict[str, Any] = {"sizes": Sizes(width=WIDTH // 2), "left_out": ("output.weight",)}
    write_tiny(path, arch="gemma4-assistant", repeating=agrees, **small | made)
    if agrees:
        tensors = {tensor.name: tensor.data for tensor in GGUFReader(path, "r+").tensors}
        [output] = [tensor.data for tensor in GGUFReader(target).tensors if tensor.name == "output.weight"]
        tensors["nextn.pre_projection.weight"][:] = np.eye(WIDTH // 2, 2 * WIDTH)
        tensors["token_embd.weight"][:] = output[:, : WIDTH // 2]
    return path


def write_files(
    folder: Path, kind: str, *, agrees: bool = True, target: Mapping[str, Any] | None = None, **of_head: Any
) -> Files:
    """Of a kind, and the target's architecture: "own" layers, a "chain" of two, "eagle3", "mtp", a block
    drafter's kind or "assistant"; `target` and `of_head` are fields of Tiny."""
    what, arch = kind.split(" ")
    of_target: dict[str, Any] = {"arch": arch, "context_length": 512, **(target or {})}
    if what in ("own", "chain"):
        write = with_good_head if agrees else write_tiny
        return Files(write(folder / "target.gguf", mtp_layers=1 + (what == "chain"), **of_target), None)
    head, usual = folder / "head.gguf", {"context_length": 512}
    of_target = {"repeating": agrees or what not in ("mtp", "eagle3")} | of_target
    path = write_tiny(folder / "target.gguf", **of_target)
    if what == "mtp":
        write = with_good_head if agrees else write_tiny
        layers = {"arch": arch, "part": "heads", "mtp_layers": 2 if arch == "hy_v3" else 1}
        return Files(path, write(head, **layers | of_head))
    if what == "eagle3":
        reads = {"layers": (0, 2, 4) if arch == "qwen35" else (0, 1, 1), "drafted": EVEN}
        return Files(path, write_eagle(head, agrees=agrees, **reads | of_head))
    if what == "assistant":
        return Files(path, write_assistant(head, path, agrees=agrees, **usual | of_head))
    if arch == "qwen35":
        of_head = {"metadata": {"target_layers": [0, 2, 3]}} | of_head
    return Files(path, write_block(head, path, what, agrees=agrees, **usual | of_head))
