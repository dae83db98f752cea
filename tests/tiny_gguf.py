"""Tiny GGUF models for tests: under a megabyte, random weights, the same on every run.

llama.cpp loads and runs them. What they write is nonsense, but always the same nonsense.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType
from gguf.quants import quantize

from outrider.models.vocab.subset import OTHER_TOKEN, TARGET_TOKENIZER, TARGET_TOKENS
from tiny import ARCHITECTURES, HEADS, Architecture, Sizes, Value

Weights = npt.NDArray[np.float32]
Part = Literal["all", "trunk", "heads"]

DEFAULT = Sizes()
WIDTH, FEED_FORWARD, EXPERTS, SLIDING_WINDOW = (
    DEFAULT.width, DEFAULT.feed_forward, DEFAULT.experts, DEFAULT.window
)  # fmt: skip

_WRITTEN: dict[str, bytes] = {}
"""Files by what they were made of: tests ask for the same ones again and again."""

BEGIN = "<|begin|>"
END = "<|end|>"
OTHER = "<|other|>"
MERGES = (
    "Ġ t", "h e", "Ġt he", "i n", "Ġ a", "r e", "o n", "e r", "Ġ s", "a t",
    "e n", "Ġ o", "o u", "in g", "a n", "e d", "Ġ i", "o r", "Ġa n", "Ġan d",
    "Ġ =", "Ġ (", "1 0", "Ċ Ċ", "Ġ Ġ", "d e", "de f", "re t", "ret u", "retu r", "retur n",
)  # fmt: skip
"""Byte-pair merges of the default vocabulary, in order of rank."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """A vocabulary that is a part of the default one: all bytes, the first merges, the control tokens, and
    `<|other|>`. `target_tokenizer` is the whole one's id; `target_tokens` stands in for the right map."""

    num_merges: int
    target_tokenizer: str
    target_tokens: tuple[int, ...] | None = None

    def kept(self, merges: Sequence[str]) -> list[int]:
        """The whole vocabulary's ids of the tokens that are known."""
        return [*range(256 + self.num_merges), 256 + len(merges), 257 + len(merges)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiny:
    """What a tiny model is made of.

    `arch` is one of ARCHITECTURES or HEADS. `seed` draws the weights; `noise` blurs them by that share of
    their spread, so that a model with the same seed and some noise is a draft that agrees now and then.
    `layers` 0 means the architecture's number; `mtp_layers` come on top. `part`: which of these two the file
    holds.
    `padding` adds unused tokens to the vocabulary and leaves the rest of the model as it is. `confidence`
    scales the logits: the higher, the peakier. `repeating`: layers add little to the last token's embedding,
    so that greedy texts repeat themselves, with changes now and then. `file_type` only labels the file: the
    weights are 32-bit floats. `reduced` keeps a part of the vocabulary and of its weights, and adds the map.
    `letters`: the only characters that the vocabulary has, in place of all bytes.
    `metadata` is added to the architecture's own. `left_out`: tensors that the file does not hold.
    `drafted`: the only tokens that a head gives, in the order of its output. `mask`: the token of a block
    drafter's open places, `<|begin|>` by default. `quantized`: the type of matrices.
    """

    arch: str = "llama"
    sizes: Sizes = DEFAULT
    seed: int = 0
    noise: float = 0.0
    layers: int = 0
    mtp_layers: int = 0
    part: Part = "all"
    context_length: int = 512
    letters: str = ""
    merges: Sequence[str] = MERGES
    padding: int = 0
    chat_template: str | None = None
    file_type: LlamaFileType = LlamaFileType.ALL_F32
    name: str = "Tiny"
    confidence: float = 3.0
    repeating: bool = False
    reduced: Reduced | None = None
    metadata: Mapping[str, Value] = field(default_factory=dict)
    left_out: Sequence[str] = ()
    drafted: Sequence[int] = ()
    mask: int | None = None
    quantized: GGMLQuantizationType | None = None

    @property
    def architecture(self) -> Architecture:
        return (ARCHITECTURES | HEADS)[self.arch]

    @property
    def tokens(self) -> list[str]:
        """the whole vocabulary"""
        return vocabulary(self.merges, self.padding, self.letters)

    @property
    def num_layers(self) -> int:
        """without MTP layers"""
        return self.layers or self.architecture.num_layers


def write_tiny(path: Path, *, shards: int = 1, **made: Any) -> Path:
    """Write a model that llama.cpp loads, and return the file to load (the first shard).

    `made` are fields of Tiny. With `shards` above 1 the path `x.gguf` becomes `x-00001-of-0000N.gguf` and its
    siblings.
    """
    tiny = Tiny(**made)
    made_of = f"{shards} {tiny}"
    if made_of in _WRITTEN:
        path.write_bytes(_WRITTEN[made_of])
        return path
    tensors = list(_weights(tiny))
    most = -(-len(tensors) // shards) if shards > 1 else 0
    writer = GGUFWriter(path, tiny.architecture.name or tiny.arch, split_max_tensors=most)
    _write_metadata(writer, tiny)
    _write_vocabulary(writer, tiny)
    for tensor_name, values in tensors:
        kind = tiny.quantized if values.ndim == 2 else None
        writer.add_tensor(tensor_name, values if kind is None else quantize(values, kind), raw_dtype=kind)
    if tiny.drafted:
        writer.add_tensor("d2t", np.array(tiny.drafted, np.int64))
    finish(writer)
    if shards == 1:
        _WRITTEN[made_of] = path.read_bytes()
    return writer.format_shard_names(path)[0]


def finish(writer: GGUFWriter) -> None:
    """Write what was added, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def vocabulary(merges: Sequence[str] = MERGES, padding: int = 0, letters: str = "") -> list[str]:
    """The tokens, in order of id: one per byte (or letter), one per merge, two control tokens, padding.

    Spelled as GPT-2 spells them, with a visible character for every byte.
    """
    merged = [merge.replace(" ", "") for merge in merges]
    return [*(letters or _byte_spellings()), *merged, BEGIN, END, *(f"[PAD{i}]" for i in range(padding))]


def _byte_spellings() -> Iterator[str]:
    """A visible character for each of the 256 bytes: itself, or the next free one from U+0100."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    free = 0x100
    for byte in range(256):
        yield chr(byte) if byte in visible else chr(free)
        free += byte not in visible


def _write_metadata(writer: GGUFWriter, tiny: Tiny) -> None:
    writer.add_name(tiny.name)
    writer.add_file_type(tiny.file_type)
    writer.add_context_length(tiny.context_length)
    writer.add_embedding_length(tiny.sizes.width)
    writer.add_block_count(tiny.num_layers + tiny.mtp_layers)
    writer.add_layer_norm_rms_eps(1e-5)
    found = tiny.architecture.metadata(tiny.num_layers, tiny.mtp_layers, tiny.sizes)
    for key, value in {**found, **tiny.metadata}.items():
        add: dict[type, Callable[[str, Any], None]] = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            list: writer.add_array,
        }
        add[type(value)](f"{writer.arch}.{key}", value)


def _write_vocabulary(writer: GGUFWriter, tiny: Tiny) -> None:
    tokens, merges = tiny.tokens, tiny.merges
    num_text = len(tokens) - tiny.padding - 2
    types = [TokenType.NORMAL] * num_text + [TokenType.CONTROL] * 2 + [TokenType.UNUSED] * tiny.padding
    if tiny.reduced is not None:
        kept, merges = tiny.reduced.kept(merges), merges[: tiny.reduced.num_merges]
        tokens = [*(tokens[i] for i in kept), OTHER]
        types = [*(types[i] for i in kept), TokenType.CONTROL]
        _write_map(writer, tiny.reduced, kept)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index(BEGIN))
    writer.add_eos_token_id(tokens.index(END))
    if tiny.arch in HEADS:
        writer.add_mask_token_id(tokens.index(BEGIN) if tiny.mask is None else tiny.mask)
    writer.add_add_bos_token(False)
    if tiny.chat_template is not None:
        writer.add_chat_template(tiny.chat_template)


def _write_map(writer: GGUFWriter, reduced: Reduced, kept: Sequence[int]) -> None:
    right = (*kept, -1)
    writer.add_array(TARGET_TOKENS, [*(right if reduced.target_tokens is None else reduced.target_tokens)])
    writer.add_uint32(OTHER_TOKEN, len(kept))
    writer.add_string(TARGET_TOKENIZER, reduced.target_tokenizer)


def _weights(tiny: Tiny) -> Iterator[tuple[str, Weights]]:
    for name, shape in _tensors(tiny):
        # A generator for each tensor: padding the vocabulary leaves all other weights as they are.
        rng = np.random.default_rng([tiny.seed, crc32(name.encode())])
        values = _draw(rng, name, shape)
        if tiny.noise and len(shape) > 1 and not name.endswith("ssm_a"):
            blur = np.random.default_rng([tiny.seed, crc32(name.encode()), 1])
            values += tiny.noise * values.std() * blur.standard_normal(shape)
        if tiny.repeating and name.endswith(tiny.architecture.adds):
            values *= tiny.architecture.repeats_at
        if name == "output.weight":
            values *= tiny.confidence
            values[len(values) - tiny.padding :] = 0
        if tiny.reduced is not None and name in ("token_embd.weight", "output.weight"):
            kept = tiny.reduced.kept(tiny.merges)
            others = np.delete(values, kept, axis=0)
            mean = others.mean(axis=0) if len(others) else np.zeros(tiny.sizes.width)
            values = np.vstack([values[kept], mean])
        if name == "output.weight" and tiny.drafted:
            values = values[[token % len(values) for token in tiny.drafted]]
        if name not in tiny.left_out:
            yield name, values.astype(np.float32)


def _tensors(tiny: Tiny) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, in numpy's order."""
    embedding = (len(tiny.tokens), tiny.sizes.width)
    yield "token_embd.weight", embedding
    yield from tiny.architecture.whole(replace(tiny.sizes, tokens=len(tiny.tokens))).items()
    # Tied to the embedding, an untrained model would only ever repeat its last token.
    yield "output.weight", embedding
    start = tiny.num_layers if tiny.part == "heads" else 0
    end = tiny.num_layers + (0 if tiny.part == "trunk" else tiny.mtp_layers)
    for layer in range(start, end):
        tensors = tiny.architecture.layer(layer, tiny.num_layers, tiny.sizes)
        yield from ((f"blk.{layer}.{name}", shape) for name, shape in tensors.items())


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    if name.endswith("ssm_a"):
        # A state that decays must have negative rates: minus the exponential of what is trained.
        rates = np.arange(1, max(shape[-1], shape[0] if shape[-1] == 1 else 1) + 1, dtype=np.float64)
        return -np.broadcast_to(rates[:, None] if shape[-1] == 1 else rates, shape).copy()
    if name.endswith(".weight") and re.search(r"norm[.\d_]|_ln\.|_scale\.|rope_freqs", name):
        return 1 + 0.1 * rng.standard_normal(shape)
    if len(shape) == 1:
        return 0.1 * rng.standard_normal(shape)
    values = rng.normal(0, shape[-1] ** -0.5, shape)
    if name.endswith("eh_proj.weight"):
        # What a head is to say depends on the last token above all, as in the model itself.
        values += np.eye(shape[0], shape[1])
    return values
