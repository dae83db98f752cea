"""Model files of real shapes with random weights: what a call takes does not depend on their values.

    python benchmarks/gpu/make_model.py 8b Q4_K_M /dev/shm/8b-q4.gguf
    python benchmarks/gpu/make_model.py 8b Q8_0 /dev/shm/8b-answers.gguf --answers smollm2.gguf

A file is written as fast as the disk takes it: blocks of valid scales and random bits, over and over. The
tokenizer is the embedded model's, with tokens added up to the size of the real vocabulary. `--answers` makes
a large model that says what a small one says: the small one's weights in a corner, zeros where it must not
hear the rest. Its costs are those of its shape, its texts and what a draft model gets right are real.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

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
    scales = 1e-4 * rng.uniform(0.5, 1.5, (len(blocks), 1))
    for number, offset in enumerate(SCALES[kind]):
        # Of Q4_K the second is taken off: 7.5 of the first make the mean zero, else logits overflow.
        part = (scales * (7.5 if number else 1)).astype(np.float16)
        blocks[:, offset : offset + 2] = part.view(np.uint8)
    return blocks.reshape(-1)


class Small:
    """A small Llama inside a larger shape of heads twice as wide: the same logits, but for rounding.

    The norms are over more values, all zero, and heads divide by a larger root: weights make up for both.
    Random weights stay where only zeros come in or nothing goes out.
    """

    def __init__(self, path: Path, shape: Shape) -> None:
        reader = GGUFReader(path)
        self._tensors, self._shape = {tensor.name: tensor for tensor in reader.tensors}, shape
        self._fields = {name.partition(".")[2]: field.contents() for name, field in reader.fields.items()}
        self._width, self._heads = self._field("embedding_length"), self._field("attention.head_count")
        self._group = self._heads // self._field("attention.head_count_kv")
        self.shape = shape._replace(vocabulary=self._field("vocab_size"))
        self.metadata = {
            "rope_freq_base": self._field("rope.freq_base"),
            "layer_norm_rms_eps": self._field("attention.layer_norm_rms_epsilon") * self._width / shape.width,
        }

    def _field(self, name: str) -> Any:
        return self._fields[name]

    def _head_rows(self, values: Any, group: int, slots: int, *, rotated: bool) -> Any:
        """Rows of heads at the places of the larger model's heads, whose groups may be larger. Every second
        pair of its `rotated` rows turns as fast as a pair of the small model's."""
        old, new = self._width // self._heads, self._shape.width // self._shape.heads
        within = np.arange(old)
        within += within // 2 * 2 * rotated
        placed = np.zeros((self._shape.heads * new, values.shape[1]), np.float32)
        for head in range(len(values) // old):
            start = (head // group * slots + head % group) * new
            placed[start + within] = values[head * old : (head + 1) * old]
        return placed

    def values(self, name: str) -> Any:
        """The corner of a tensor, or None where the small model has no such layer."""
        known = self._tensors.get(name) or (
            self._tensors["token_embd.weight"] if name == "output.weight" else None
        )
        if known is None:
            return None
        values, part = dequantize(known.data, known.tensor_type), name.split(".")[-2]
        slots = self._shape.heads // self._shape.kv_heads
        if part == "attn_q":
            wider = (self._shape.width / self._shape.heads) / (self._width / self._heads)
            return self._head_rows(values * np.float32(np.sqrt(wider)), self._group, slots, rotated=True)
        if part in ("attn_k", "attn_v"):
            return self._head_rows(values, 1, 1, rotated=part == "attn_k")[: self._shape.width // slots]
        if part == "attn_output":
            return self._head_rows(values.T.copy(), self._group, slots, rotated=False).T.copy()
        return values * np.float32(np.sqrt(self._width / self._shape.width)) if values.ndim == 1 else values

    def put(self, data: Any, name: str, kind: GGMLQuantizationType) -> Any:
        """The tensor's rows of bytes, with the corner in them."""
        part, values = name.split(".")[-2], self.values(name)
        if part in ("token_embd", "attn_q", "attn_output", "ffn_down"):
            data[:] = 0
        if values is not None:
            corner = quantize(np.atleast_2d(values), kind).view(np.uint8)
            data[: len(corner), : corner.shape[1]] = corner
        return data


def add_metadata(writer: GGUFWriter, shape: Shape, tokenizer: Path, other: dict[str, Any]) -> None:
    sizes = {"block_count": shape.layers, "embedding_length": shape.width, "head_count": shape.heads}
    sizes |= {"feed_forward_length": shape.feed_forward, "head_count_kv": shape.kv_heads}
    sizes |= {"rope_dimension_count": shape.width // shape.heads, "context_length": 32_768}
    for name, size in (sizes | {"vocab_size": shape.vocabulary, "layer_norm_rms_eps": 1e-5} | other).items():
        getattr(writer, f"add_{name}")(size)
    for key, field in GGUFReader(tokenizer).fields.items():
        if key.startswith("tokenizer."):
            value: Any = field.contents()
            if key.endswith((".tokens", ".token_type")):
                more = range(len(value), shape.vocabulary)
                value += [f"<unused{i}>" if key.endswith("s") else 1 for i in more]
            writer.add_key_value(key, value, *field.types[:1], *field.types[1:][-1:])


def write(path: Path, name: str, quantization: str, tokenizer: Path, answers: Path | None) -> None:
    small = Small(answers, SHAPES[name]) if answers else None
    shape, writer = small.shape if small else SHAPES[name], GGUFWriter(path, "llama")
    writer.add_name(f"random {name} {quantization}")
    writer.add_file_type(FILES[quantization])
    add_metadata(writer, shape, tokenizer, small.metadata if small else {})
    tensors = []
    for tensor, dimensions in shape.tensors():
        kind = shape.type_of(tensor, dimensions, quantization)
        values, block_bytes = GGML_QUANT_SIZES[kind]
        row_bytes = dimensions[-1] // values * block_bytes
        tensors.append((tensor, kind, int(np.prod(dimensions[:-1])), row_bytes))
        writer.add_tensor_info(tensor, dimensions, np.dtype(np.float32), tensors[-1][2] * row_bytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    pools = {kind: pool(kind) for kind in {kind for _, kind, _, _ in tensors}}
    assert writer.fout is not None
    file = writer.fout[0]
    writer.write_padding(file, file.tell())
    for tensor, kind, rows, row_bytes in tensors:
        size = rows * row_bytes
        if small:
            file.write(small.put(np.resize(pools[kind], (rows, row_bytes)), tensor, kind))
        for start in range(0, 0 if small else size, len(pools[kind])):
            file.write(pools[kind][: size - start])
        writer.write_padding(file, size)
    writer.close()


def main() -> None:
    parser = argument_parser(__doc__, out=False)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("quantization", choices=FILES)
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="a model file to take it from (the embedded model)")
    parser.add_argument("--answers", type=Path, help="a small Llama's file to answer as")
    given = parser.parse_args()
    tokenizer = given.answers or given.tokenizer or embedded_default()
    write(given.file, given.shape, given.quantization, tokenizer, given.answers)


if __name__ == "__main__":
    run_program(main)
