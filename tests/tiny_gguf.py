"""Tiny GGUF models for tests: under a megabyte, random weights, the same on every run.

llama.cpp loads and runs them. What they write is nonsense, but always the same nonsense.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.typing as npt
from gguf import GGUFWriter, LlamaFileType, TokenType

from outrider.models.reduced import OTHER_TOKEN, TARGET_TOKENIZER, TARGET_TOKENS

Weights = npt.NDArray[np.float32]
Tensor = tuple[str, tuple[int, ...]]
"""A tensor's name and its shape in numpy's order: outputs before inputs, experts first."""

WIDTH = 64
HEADS, KV_HEADS, HEAD_WIDTH = 2, 1, 32
FEED_FORWARD = 96
EXPERTS, EXPERTS_USED = 4, 2
INNER = 2 * WIDTH
STATE, CONVOLUTION, TIME_STEP_RANK = 8, 4, 4
DELTA_HEAD, DELTA_HEADS, DELTA_GROUPS = 16, 4, 2
SLIDING_WINDOW = 16
WINDOW_PATTERN = 6
"""One layer in so many has no window; ik_llama.cpp knows no other number."""

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


@dataclass(frozen=True, slots=True)
class Tiny:
    """What a tiny model is made of; see `write_tiny` for the meaning of each."""

    arch: str
    seed: int
    noise: float
    layers: int
    context_length: int
    merges: tuple[str, ...]
    padding: int
    chat_template: str | None
    file_type: LlamaFileType
    name: str
    confidence: float
    reduced: Reduced | None


def write_tiny(
    path: Path,
    *,
    arch: str = "llama",
    seed: int = 0,
    noise: float = 0.0,
    layers: int = 0,
    context_length: int = 512,
    merges: Sequence[str] = MERGES,
    padding: int = 0,
    chat_template: str | None = None,
    file_type: LlamaFileType = LlamaFileType.ALL_F32,
    name: str = "Tiny",
    confidence: float = 3.0,
    shards: int = 1,
    reduced: Reduced | None = None,
) -> Path:
    """Write a model that llama.cpp loads, and return the file to load (the first shard).

    `arch` is one of ARCHITECTURES: "llama" (plain attention), "qwen2moe" (4 experts, 2 used),
    "mamba" (recurrent), "jamba" (a recurrent layer, then an attention layer), "qwen35" and "lfm2"
    (the same, of kinds that llama.cpp keeps snapshots of), "gemma3" (a window of 16 tokens on all
    layers but each sixth). `seed` draws the weights; `noise` blurs
    them by that share of their spread, so that a model with the same seed and some noise is a
    draft that agrees now and then. `layers` 0 means 2, or 6 of gemma3. `padding` adds unused
    tokens to the vocabulary and leaves the rest of the model as it is. `confidence` scales the
    logits: the higher, the peakier. `file_type` only labels the file: the weights are 32-bit
    floats. With `shards` above 1 the path `x.gguf` becomes `x-00001-of-0000N.gguf` and its
    siblings. `reduced` keeps a part of the vocabulary and of the weights that belong to it, and
    adds the map.
    """
    tiny = Tiny(
        arch, seed, noise, layers or ARCHITECTURES[arch].layers, context_length, tuple(merges), padding,
        chat_template, file_type, name, confidence, reduced,
    )  # fmt: skip
    tensors = list(_weights(tiny))
    most = -(-len(tensors) // shards) if shards > 1 else 0
    writer = GGUFWriter(path, arch, split_max_tensors=most)
    _write_general(writer, tiny)
    _write_vocabulary(writer, tiny)
    ARCHITECTURES[arch].describe(writer)
    for tensor_name, values in tensors:
        writer.add_tensor(tensor_name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return writer.format_shard_names(path)[0]


def vocabulary(merges: Sequence[str] = MERGES, padding: int = 0) -> list[str]:
    """The tokens, in order of id: one per byte, one per merge, two control tokens, padding.

    Spelled as GPT-2 spells them, with a visible character for every byte.
    """
    merged = [merge.replace(" ", "") for merge in merges]
    return [*_byte_spellings(), *merged, BEGIN, END, *(f"[PAD{i}]" for i in range(padding))]


def _byte_spellings() -> Iterator[str]:
    """A visible character for each of the 256 bytes: itself, or the next free one from U+0100."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    free = 0x100
    for byte in range(256):
        yield chr(byte) if byte in visible else chr(free)
        free += byte not in visible


def _write_general(writer: GGUFWriter, tiny: Tiny) -> None:
    writer.add_name(tiny.name)
    writer.add_file_type(tiny.file_type)
    writer.add_context_length(tiny.context_length)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(tiny.layers)
    writer.add_layer_norm_rms_eps(1e-5)
    if tiny.arch in ("jamba", "lfm2"):
        writer.add_head_count_kv([0 if _is_recurrent(tiny, i) else KV_HEADS for i in range(tiny.layers)])


def _write_vocabulary(writer: GGUFWriter, tiny: Tiny) -> None:
    tokens, merges = vocabulary(tiny.merges, tiny.padding), tiny.merges
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
    writer.add_add_bos_token(False)
    if tiny.chat_template is not None:
        writer.add_chat_template(tiny.chat_template)


def _write_map(writer: GGUFWriter, reduced: Reduced, kept: Sequence[int]) -> None:
    right = (*kept, -1)
    writer.add_array(TARGET_TOKENS, [*(right if reduced.target_tokens is None else reduced.target_tokens)])
    writer.add_uint32(OTHER_TOKEN, len(kept))
    writer.add_string(TARGET_TOKENIZER, reduced.target_tokenizer)


def _describe_attention(writer: GGUFWriter) -> None:
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_WIDTH)
    writer.add_value_length(HEAD_WIDTH)
    writer.add_rope_dimension_count(HEAD_WIDTH)
    writer.add_feed_forward_length(FEED_FORWARD)


def _describe_window(writer: GGUFWriter) -> None:
    _describe_attention(writer)
    writer.add_sliding_window(SLIDING_WINDOW)
    writer.add_sliding_window_pattern(WINDOW_PATTERN)


def _describe_experts(writer: GGUFWriter) -> None:
    _describe_attention(writer)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(EXPERTS_USED)
    writer.add_expert_feed_forward_length(FEED_FORWARD)


def _describe_recurrent(writer: GGUFWriter, heads: int = 0, feed_forward: int = 0) -> None:
    writer.add_ssm_conv_kernel(CONVOLUTION)
    writer.add_ssm_inner_size(INNER)
    writer.add_ssm_state_size(STATE)
    writer.add_ssm_time_step_rank(TIME_STEP_RANK)
    writer.add_head_count(heads)
    writer.add_feed_forward_length(feed_forward)


def _describe_hybrid(writer: GGUFWriter) -> None:
    _describe_recurrent(writer, HEADS, FEED_FORWARD)


def _describe_delta(writer: GGUFWriter) -> None:
    _describe_attention(writer)
    writer.add_ssm_conv_kernel(CONVOLUTION)
    writer.add_ssm_inner_size(DELTA_HEAD * DELTA_HEADS)
    writer.add_ssm_state_size(DELTA_HEAD)
    writer.add_ssm_time_step_rank(DELTA_HEADS)
    writer.add_ssm_group_count(DELTA_GROUPS)
    writer.add_full_attention_interval(2)
    writer.add_rope_dimension_sections([HEAD_WIDTH // 4, HEAD_WIDTH // 8, HEAD_WIDTH // 8, 0])


def _describe_short_convolution(writer: GGUFWriter) -> None:
    writer.add_head_count(HEADS)
    writer.add_rope_dimension_count(HEAD_WIDTH)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_shortconv_l_cache(CONVOLUTION - 1)


def _attention() -> list[Tensor]:
    return [
        ("attn_norm.weight", (WIDTH,)),
        ("attn_q.weight", (HEADS * HEAD_WIDTH, WIDTH)),
        ("attn_k.weight", (KV_HEADS * HEAD_WIDTH, WIDTH)),
        ("attn_v.weight", (KV_HEADS * HEAD_WIDTH, WIDTH)),
        ("attn_output.weight", (WIDTH, HEADS * HEAD_WIDTH)),
    ]


def _feed_forward(suffix: str = "") -> list[Tensor]:
    return [
        (f"ffn_gate{suffix}.weight", (FEED_FORWARD, WIDTH)),
        (f"ffn_up{suffix}.weight", (FEED_FORWARD, WIDTH)),
        (f"ffn_down{suffix}.weight", (WIDTH, FEED_FORWARD)),
    ]


def _dense_layer() -> list[Tensor]:
    return [*_attention(), ("ffn_norm.weight", (WIDTH,)), *_feed_forward()]


def _gemma_layer() -> list[Tensor]:
    norms = [("attn_q_norm.weight", HEAD_WIDTH), ("attn_k_norm.weight", HEAD_WIDTH)]
    norms += [("post_attention_norm.weight", WIDTH), ("post_ffw_norm.weight", WIDTH)]
    return [*_dense_layer(), *((name, (width,)) for name, width in norms)]


def _expert_layer() -> list[Tensor]:
    experts = [(name, (EXPERTS, *shape)) for name, shape in _feed_forward("_exps")]
    router: list[Tensor] = [
        ("ffn_norm.weight", (WIDTH,)),
        ("ffn_gate_inp.weight", (EXPERTS, WIDTH)),
        ("ffn_gate_inp_shexp.weight", (WIDTH,)),
    ]
    biases = [("attn_q.bias", HEADS), ("attn_k.bias", KV_HEADS), ("attn_v.bias", KV_HEADS)]
    attention = [*_attention(), *((name, (heads * HEAD_WIDTH,)) for name, heads in biases)]
    return [*attention, *router, *experts, *_feed_forward("_shexp")]


def _recurrent_layer() -> list[Tensor]:
    return [
        ("attn_norm.weight", (WIDTH,)),
        ("ssm_in.weight", (2 * INNER, WIDTH)),
        ("ssm_conv1d.weight", (INNER, CONVOLUTION)),
        ("ssm_conv1d.bias", (INNER,)),
        ("ssm_x.weight", (TIME_STEP_RANK + 2 * STATE, INNER)),
        ("ssm_dt.weight", (INNER, TIME_STEP_RANK)),
        ("ssm_dt.bias", (INNER,)),
        ("ssm_a", (INNER, STATE)),
        ("ssm_d", (INNER,)),
        ("ssm_out.weight", (WIDTH, INNER)),
    ]


def _hybrid_recurrent_layer() -> list[Tensor]:
    norms = [
        ("ssm_dt_norm.weight", TIME_STEP_RANK),
        ("ssm_b_norm.weight", STATE),
        ("ssm_c_norm.weight", STATE),
    ]
    feed_forward = [("ffn_norm.weight", (WIDTH,)), *_feed_forward()]
    return [*_recurrent_layer(), *((name, (width,)) for name, width in norms), *feed_forward]


def _delta_attention_layer() -> list[Tensor]:
    gated = [
        (name, (2 * shape[0], *shape[1:])) if name == "attn_q.weight" else (name, shape)
        for name, shape in _attention()
    ]
    norms = [("attn_q_norm.weight", HEAD_WIDTH), ("attn_k_norm.weight", HEAD_WIDTH)]
    norms += [("post_attention_norm.weight", WIDTH)]
    return [*gated, *((name, (width,)) for name, width in norms), *_feed_forward()]


def _delta_layer() -> list[Tensor]:
    value = DELTA_HEAD * DELTA_HEADS
    mixed = 2 * DELTA_HEAD * DELTA_GROUPS + value
    return [
        ("attn_norm.weight", (WIDTH,)),
        ("post_attention_norm.weight", (WIDTH,)),
        ("attn_qkv.weight", (mixed, WIDTH)),
        ("attn_gate.weight", (value, WIDTH)),
        ("ssm_conv1d.weight", (mixed, CONVOLUTION)),
        ("ssm_dt.bias", (DELTA_HEADS,)),
        ("ssm_a", (DELTA_HEADS,)),
        ("ssm_beta.weight", (DELTA_HEADS, WIDTH)),
        ("ssm_alpha.weight", (DELTA_HEADS, WIDTH)),
        ("ssm_norm.weight", (DELTA_HEAD,)),
        ("ssm_out.weight", (WIDTH, value)),
        *_feed_forward(),
    ]


def _normed_attention_layer() -> list[Tensor]:
    norms = [("attn_q_norm.weight", HEAD_WIDTH), ("attn_k_norm.weight", HEAD_WIDTH)]
    return [*_dense_layer(), *((name, (width,)) for name, width in norms)]


def _short_convolution_layer() -> list[Tensor]:
    return [
        ("attn_norm.weight", (WIDTH,)),
        ("shortconv.conv.weight", (WIDTH, CONVOLUTION - 1)),
        ("shortconv.in_proj.weight", (3 * WIDTH, WIDTH)),
        ("shortconv.out_proj.weight", (WIDTH, WIDTH)),
        ("ffn_norm.weight", (WIDTH,)),
        *_feed_forward(),
    ]


def _is_recurrent(tiny: Tiny, layer: int) -> bool:
    return tiny.arch == "mamba" or (tiny.arch in ("jamba", "qwen35", "lfm2") and layer % 2 == 0)


def _weights(tiny: Tiny) -> Iterator[tuple[str, Weights]]:
    for name, shape in _tensors(tiny):
        # A generator for each tensor: padding the vocabulary leaves all other weights as they are.
        rng = np.random.default_rng([tiny.seed, crc32(name.encode())])
        values = _draw(rng, name, shape)
        if tiny.noise and len(shape) > 1 and not name.endswith("ssm_a"):
            blur = np.random.default_rng([tiny.seed, crc32(name.encode()), 1])
            values += tiny.noise * values.std() * blur.standard_normal(shape)
        if name == "output.weight":
            values *= tiny.confidence
            values[len(values) - tiny.padding :] = 0
        if tiny.reduced is not None and name in ("token_embd.weight", "output.weight"):
            kept = tiny.reduced.kept(tiny.merges)
            others = np.delete(values, kept, axis=0)
            values = np.vstack([values[kept], others.mean(axis=0) if len(others) else np.zeros(WIDTH)])
        yield name, values.astype(np.float32)


def _tensors(tiny: Tiny) -> Iterator[Tensor]:
    size = len(vocabulary(tiny.merges, tiny.padding))
    yield "token_embd.weight", (size, WIDTH)
    yield ("token_embd_norm.weight" if tiny.arch == "lfm2" else "output_norm.weight"), (WIDTH,)
    # Tied to the embedding, an untrained model would only ever repeat its last token.
    yield "output.weight", (size, WIDTH)
    kind = ARCHITECTURES[tiny.arch]
    for layer in range(tiny.layers):
        tensors = kind.recurrent_layer if _is_recurrent(tiny, layer) else kind.layer
        yield from ((f"blk.{layer}.{name}", shape) for name, shape in tensors())


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    if name.endswith("ssm_a"):
        # A state that decays must have negative rates: minus the exponential of what is trained.
        return -np.broadcast_to(np.arange(1, shape[-1] + 1, dtype=np.float64), shape).copy()
    if "_norm." in name:
        return 1 + 0.1 * rng.standard_normal(shape)
    if len(shape) == 1:
        return 0.1 * rng.standard_normal(shape)
    return rng.normal(0, shape[-1] ** -0.5, shape)


@dataclass(frozen=True, slots=True)
class _Architecture:
    describe: Callable[[GGUFWriter], None]
    layer: Callable[[], list[Tensor]]
    recurrent_layer: Callable[[], list[Tensor]] = _recurrent_layer
    layers: int = 2


ARCHITECTURES = {
    "llama": _Architecture(_describe_attention, _dense_layer),
    "qwen2moe": _Architecture(_describe_experts, _expert_layer),
    "mamba": _Architecture(_describe_recurrent, _recurrent_layer),
    "jamba": _Architecture(_describe_hybrid, _dense_layer, _hybrid_recurrent_layer),
    "qwen35": _Architecture(_describe_delta, _delta_attention_layer, _delta_layer, layers=4),
    "lfm2": _Architecture(
        _describe_short_convolution, _normed_attention_layer, _short_convolution_layer, layers=4
    ),
    "gemma3": _Architecture(_describe_window, _gemma_layer, layers=WINDOW_PATTERN),
}
"""The kinds of model that `write_tiny` can make."""
