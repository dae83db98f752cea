"""Model files of real shapes with random weights: what a call takes does not depend on their values.

    python benchmarks/gpu/make_model.py 8b Q4_K_M /dev/shm/8b-q4.gguf

A file is written as fast as the disk takes it: blocks of valid scales and random bits, over and over. The
tokenizer is the embedded model's, with tokens added up to the size of the real vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import argument_parser, run_program
from outrider.models.embedded import embedded_default

T = GGMLQuantizationType
POOL_BYTES = 32 * 2**20
SCALES = {T.Q4_K: (0, 2), T.Q6_K: (208,), T.Q8_0: (0,), T.Q5_0: (0,)}  # where in a block they lie
FILES = {name: getattr(LlamaFileType, f"MOSTLY_{name}") for name in ("Q4_K_M", "Q8_0", "F16")}


class Shape(NamedTuple):
    """A dense model: sizes, and whether the output shares the embedding."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int
    tied: bool = False

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes, rows first."""
        wide, kv, fed = self.width, self.width // self.heads * self.kv_heads, self.feed_forward
        layer = {"attn_norm": (wide,), "attn_q": (wide, wide), "attn_k": (kv, wide), "attn_v": (kv, wide)}
        layer |= {"attn_output": (wide, wide), "ffn_norm": (wide,), "ffn_gate": (fed, wide)}
        layer |= {"ffn_up": (fed, wide), "ffn_down": (wide, fed)}
        yield "token_embd.weight", (self.vocabulary, wide)
        for i in range(self.layers):
            yield from ((f"blk.{i}.{name}.weight", shape) for name, shape in layer.items())
        yield "output_norm.weight", (wide,)
        if not self.tied:
            yield "output.weight", (self.vocabulary, wide)

    def type_of(self, name: str, shape: tuple[int, ...], quantization: str) -> GGMLQuantizationType:
        """As llama.cpp's quantizer chooses it."""
        if len(shape) == 1 or quantization != "Q4_K_M":
            return T.F32 if len(shape) == 1 else getattr(T, quantization)
        layer, eighth = int(name.split(".")[1]) if name.startswith("blk") else 0, self.layers // 8
        is_fine = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
        is_larger = is_fine and name.split(".")[-2] in ("attn_v", "ffn_down")
        is_output = name == ("token_embd.weight" if self.tied else "output.weight")
        if shape[-1] % 256:  # of no block of 256 values
            return T.Q8_0 if is_larger or is_output else T.Q5_0
        return T.Q6_K if is_larger or is_output else T.Q4_K


SHAPES = {
    "tiny": Shape(2, 256, 4, 2, 512, 50_000, tied=True),
    "0.5b": Shape(24, 896, 14, 2, 4864, 151_936, tied=True),
    "1.5b": Shape(28, 1536, 12, 2, 8960, 151_936, tied=True),
    "8b": Shape(32, 4096, 32, 8, 14_336, 128_256),
    "32b": Shape(64, 5120, 40, 8, 27_648, 152_064),
}


def pool(kind: GGMLQuantizationType) -> Any:
    """Random blocks of a type, as bytes."""
    rng = np.random.default_rng(int(kind))
    if kind in (T.F16, T.F32):
        values = rng.standard_normal(POOL_BYTES // 4, dtype=np.float32) * 0.02
        return (values * 0 + 1 if kind == T.F32 else values.astype(np.float16)).view(np.uint8)
    block = GGML_QUANT_SIZES[kind][1]
    blocks = rng.integers(0, 256, (POOL_BYTES // block, block), dtype=np.uint8)
    for offset in SCALES[kind]:
        scales = (1e-4 * rng.uniform(0.5, 1.5, (len(blocks), 1))).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8)
    return blocks.reshape(-1)


def add_metadata(writer: GGUFWriter, shape: Shape, tokenizer: Path) -> None:
    sizes = {"block_count": shape.layers, "embedding_length": shape.width, "head_count": shape.heads}
    sizes |= {"feed_forward_length": shape.feed_forward, "head_count_kv": shape.kv_heads}
    sizes |= {"rope_dimension_count": shape.width // shape.heads, "context_length": 32_768}
    for name, size in (sizes | {"vocab_size": shape.vocabulary}).items():
        getattr(writer, f"add_{name}")(size)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, field in GGUFReader(tokenizer).fields.items():
        if key.startswith("tokenizer."):
            value: Any = field.contents()
            if key.endswith((".tokens", ".token_type")):
                more = range(len(value), shape.vocabulary)
                value += [f"<unused{i}>" if key.endswith("s") else 1 for i in more]
            writer.add_key_value(key, value, *field.types[:1], *field.types[1:][-1:])


def write(path: Path, name: str, quantization: str, tokenizer: Path) -> None:
    shape, writer = SHAPES[name], GGUFWriter(path, "llama")
    writer.add_name(f"random {name} {quantization}")
    writer.add_file_type(FILES[quantization])
    add_metadata(writer, shape, tokenizer)
    sizes = []
    for tensor, dimensions in shape.tensors():
        kind = shape.type_of(tensor, dimensions, quantization)
        values, block_bytes = GGML_QUANT_SIZES[kind]
        sizes.append((kind, int(np.prod(dimensions)) // values * block_bytes))
        writer.add_tensor_info(tensor, dimensions, np.dtype(np.float32), sizes[-1][1], kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    pools = {kind: pool(kind) for kind in {kind for kind, _ in sizes}}
    assert writer.fout is not None
    file = writer.fout[0]
    writer.write_padding(file, file.tell())
    for kind, size in sizes:
        for start in range(0, size, len(pools[kind])):
            file.write(pools[kind][: size - start])
        writer.write_padding(file, size)
    writer.close()


def main() -> None:
    parser = argument_parser(__doc__, out=False)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("quantization", choices=FILES)
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="a model file to take it from (the embedded model)")
    given = parser.parse_args()
    write(given.file, given.shape, given.quantization, given.tokenizer or embedded_default())


if __name__ == "__main__":
    run_program(main)
