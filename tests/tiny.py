"""What tiny models of each architecture are made of: sizes, metadata and tensors. `tiny_gguf` writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Sizes:
    """Widths, in numbers of values, and counts."""

    width: int = 64
    heads: int = 2
    kv_heads: int = 1
    head: int = 32
    feed_forward: int = 96
    experts: int = 4
    experts_used: int = 2
    state: int = 8
    """of a Mamba layer, for each channel"""
    convolution: int = 4
    time_step_rank: int = 4
    mamba2_heads: int = 4
    mamba2_state: int = 16
    mamba2_groups: int = 2
    """of heads with the same keys"""
    delta_head: int = 64
    """With other widths than 64 and 128 ik_llama.cpp is wrong in calls over several tokens."""
    delta_heads: int = 2
    delta_groups: int = 1
    wkv_head: int = 64
    """With 32 llama-cpp-python 0.3.36 gives wrong logits on a processor with AVX-512."""
    wkv_rank: int = 8
    tokens: int = 0
    """of the vocabulary that a file has"""
    rank: int = 64
    """of what DFlash2 and DSpark multiply tokens with"""
    candidates: int = 4
    """of DFlash2, for a place"""
    streams: int = 4
    """of hidden states of a DeepSeek-V4 model; llama.cpp knows no other number"""
    window: int = 16
    window_pattern: int = 6
    """One layer in so many has no window; ik_llama.cpp knows no other number."""

    @classmethod
    def wide(cls, width: int = 1024) -> Sizes:
        """Those of a real model of that width, a multiple of 256."""
        return cls(
            width=width, heads=width // 128, kv_heads=width // 256, head=128, feed_forward=7 * width // 2,
            state=16, time_step_rank=width // 16, mamba2_heads=width // 32, mamba2_state=128, mamba2_groups=1,
            delta_head=128, delta_heads=width // 64, delta_groups=width // 64, wkv_head=64, wkv_rank=64,
        )  # fmt: skip

    @property
    def query(self) -> int:
        """of all heads"""
        return self.heads * self.head

    @property
    def keys(self) -> int:
        """of all heads of keys, or of values"""
        return self.kv_heads * self.head

    @property
    def inner(self) -> int:
        """channels of a Mamba layer"""
        return 2 * self.width

    @property
    def delta_values(self) -> int:
        """of all heads of a delta net"""
        return self.delta_head * self.delta_heads


Value = bool | int | float | list[int] | list[bool]
Metadata = dict[str, Value]

METADATA: dict[str, Callable[[Sizes], Metadata]] = {
    "heads": lambda s: {
        "attention.head_count": s.heads,
        "attention.head_count_kv": s.kv_heads,
        "attention.key_length": s.head,
        "attention.value_length": s.head,
        "rope.dimension_count": s.head,
        "feed_forward_length": s.feed_forward,
    },
    "no heads": lambda _: {"attention.head_count": 0, "feed_forward_length": 0},
    "windows": lambda s: {
        "attention.sliding_window": s.window,
        "attention.sliding_window_pattern": s.window_pattern,
    },
    "experts": lambda s: {
        "expert_count": s.experts,
        "expert_used_count": s.experts_used,
        "expert_feed_forward_length": s.feed_forward,
    },
    "shared expert": lambda s: {"expert_shared_feed_forward_length": s.feed_forward},
    "glm": lambda s: {
        "rope.dimension_count": s.head // 2,
        "expert_shared_count": 1,
        "leading_dense_block_count": 0,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.0,
        "expert_gating_func": 2,  # sigmoid
    },
    "mamba": lambda s: {
        "ssm.conv_kernel": s.convolution,
        "ssm.inner_size": s.inner,
        "ssm.state_size": s.state,
        "ssm.time_step_rank": s.time_step_rank,
    },
    "mamba2": lambda s: {
        "ssm.state_size": s.mamba2_state,
        "ssm.time_step_rank": s.mamba2_heads,
        "ssm.group_count": s.mamba2_groups,
    },
    "delta nets": lambda s: {
        "ssm.inner_size": s.delta_values,
        "ssm.state_size": s.delta_head,
        "ssm.time_step_rank": s.delta_heads,
        "ssm.group_count": s.delta_groups,
        "full_attention_interval": 4,
    },
    "sections": lambda s: {"rope.dimension_sections": [s.head // 4, s.head // 8, s.head // 8, 0]},
    "jamba": lambda s: {
        "attention.head_count": s.heads,
        "attention.head_count_kv": s.kv_heads,
        "feed_forward_length": s.feed_forward,
    },
    "lfm2": lambda s: {"shortconv.l_cache": s.convolution - 1},
    "layer norm": lambda _: {"attention.layer_norm_epsilon": 1e-5},
    "rwkv": lambda s: {
        "attention.head_count": 0,
        "feed_forward_length": s.feed_forward,
        "wkv.head_size": s.wkv_head,
        "token_shift_count": 2,
    },
    "rwkv6": lambda s: {"time_mix_extra_dim": s.wkv_rank, "time_decay_extra_dim": s.wkv_rank},
    "rwkv7": lambda s: {
        f"attention.{of}_lora_rank": s.wkv_rank for of in ("decay", "iclr", "value_residual_mix", "gate")
    },
    # An EAGLE-3 head's, for a target of four layers and the same width
    "features": lambda s: {"target_layers": [1, 2, 3], "target_hidden_size": s.width},
    # A block drafter's, for a target of the same width
    "blocks": lambda _: {"target_layers": [0, 1, 1], "block_size": 8},
    "candidates": lambda s: {
        "selector_top_k": s.candidates,
        "selector_rank": s.rank,
        "conv_kernel_size": s.convolution,
        "conv_group_size": s.width // 4,
    },
    # A DSpark drafter's, whose blocks begin with the last token
    "anchors": lambda _: {"sample_from_anchor": True, "has_confidence_head": True},
    # A DSpark drafter's of DeepSeek-V4's kind, of two layers
    "streams": lambda s: {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": s.rank,
        "attention.output_lora_rank": s.rank // 2,
        "attention.output_group_count": s.heads,
        "attention.sliding_window": s.window,
        "attention.compress_ratios": [0, 0],
        "hyper_connection.count": s.streams,
        "hyper_connection.sinkhorn_iterations": 4,
        "hyper_connection.epsilon": 1e-6,
        "swiglu_clamp_exp": 10.0,
        "expert_gating_func": 4,  # the root of softplus
    },
    # Gemma 4's, of four layers of which the last sees all; its assistant has two
    "layer windows": lambda s: {
        "attention.sliding_window": s.window,
        "attention.sliding_window_pattern": [True, True, True, False],
        "attention.key_length_swa": s.head,
        "attention.value_length_swa": s.head,
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
    },
    "assistant": lambda s: {
        "attention.sliding_window_pattern": [True, False],
        "embedding_length_out": 2 * s.width,
        "nextn_predict_layers": 2,
    },
}
"""Under the keys of GGUF without the architecture's name."""

Tensors = dict[str, tuple[int, ...]]
"""Shapes by name, in numpy's order: outputs before inputs, experts first."""


def _feed_forward(s: Sizes, suffix: str = "") -> Tensors:
    return {
        f"ffn_gate{suffix}.weight": (s.feed_forward, s.width),
        f"ffn_up{suffix}.weight": (s.feed_forward, s.width),
        f"ffn_down{suffix}.weight": (s.width, s.feed_forward),
    }


def _normed(s: Sizes, *names: str) -> Tensors:
    return {f"{name}.{part}": (s.width,) for name in names for part in ("weight", "bias")}


def _time_mix(s: Sizes, *names: str) -> Tensors:
    return {f"time_mix_{name}.weight": (s.width, s.width) for name in ("key", "value", "receptance", *names)}


def _delta_mixed(s: Sizes) -> int:
    return 2 * s.delta_head * s.delta_groups + s.delta_values


def _mamba2_mixed(s: Sizes) -> int:
    return s.inner + 2 * s.mamba2_groups * s.mamba2_state


TENSORS: dict[str, Callable[[Sizes], Tensors]] = {
    "output": lambda s: {"output_norm.weight": (s.width,)},
    "attention": lambda s: {
        "attn_norm.weight": (s.width,),
        "attn_q.weight": (s.query, s.width),
        "attn_k.weight": (s.keys, s.width),
        "attn_v.weight": (s.keys, s.width),
        "attn_output.weight": (s.width, s.query),
    },
    "query-norms": lambda s: {"attn_q_norm.weight": (s.head,), "attn_k_norm.weight": (s.head,)},
    "biases": lambda s: {"attn_q.bias": (s.query,), "attn_k.bias": (s.keys,), "attn_v.bias": (s.keys,)},
    "gate": lambda s: {"attn_q.weight": (2 * s.query, s.width)},
    "post-norm": lambda s: {"post_attention_norm.weight": (s.width,)},
    "last-norm": lambda s: {"post_ffw_norm.weight": (s.width,)},
    "norm": lambda s: {"ffn_norm.weight": (s.width,)},
    "falcon-norm": lambda s: {"ffn_norm": (s.width,)},
    "feed-forward": _feed_forward,
    "ungated": lambda s: {
        "attn_norm.weight": (s.width,),
        "ffn_up.weight": (s.feed_forward, s.width),
        "ffn_down.weight": (s.width, s.feed_forward),
    },
    "experts": lambda s: {
        "ffn_gate_inp.weight": (s.experts, s.width),
        **{name: (s.experts, *shape) for name, shape in _feed_forward(s, "_exps").items()},
    },
    "shared-expert": lambda s: {"ffn_gate_inp_shexp.weight": (s.width,)} | _feed_forward(s, "_shexp"),
    "balance": lambda s: {"exp_probs_b.bias": (s.experts,)} | _feed_forward(s, "_shexp"),
    "mamba": lambda s: {
        "attn_norm.weight": (s.width,),
        "ssm_in.weight": (2 * s.inner, s.width),
        "ssm_conv1d.weight": (s.inner, s.convolution),
        "ssm_conv1d.bias": (s.inner,),
        "ssm_x.weight": (s.time_step_rank + 2 * s.state, s.inner),
        "ssm_dt.weight": (s.inner, s.time_step_rank),
        "ssm_dt.bias": (s.inner,),
        "ssm_a": (s.inner, s.state),
        "ssm_d": (s.inner,),
        "ssm_out.weight": (s.width, s.inner),
    },
    "jamba-norms": lambda s: {
        "ssm_dt_norm.weight": (s.time_step_rank,),
        "ssm_b_norm.weight": (s.state,),
        "ssm_c_norm.weight": (s.state,),
    },
    "mamba2": lambda s: {
        "attn_norm.weight": (s.width,),
        "ssm_in.weight": (s.inner + _mamba2_mixed(s) + s.mamba2_heads, s.width),
        "ssm_conv1d.weight": (_mamba2_mixed(s), s.convolution),
        "ssm_conv1d.bias": (_mamba2_mixed(s),),
        "ssm_dt.bias": (s.mamba2_heads,),
        "ssm_a": (s.mamba2_heads, 1),
        "ssm_d": (s.mamba2_heads, 1),
        "ssm_norm.weight": (s.mamba2_groups, s.inner // s.mamba2_groups),
        "ssm_out.weight": (s.width, s.inner),
    },
    "delta-net": lambda s: {
        "attn_norm.weight": (s.width,),
        "attn_qkv.weight": (_delta_mixed(s), s.width),
        "attn_gate.weight": (s.delta_values, s.width),
        "ssm_conv1d.weight": (_delta_mixed(s), s.convolution),
        "ssm_dt.bias": (s.delta_heads,),
        "ssm_a": (s.delta_heads,),
        "ssm_norm.weight": (s.delta_head,),
        "ssm_out.weight": (s.width, s.delta_values),
    },
    "rates": lambda s: {
        "ssm_beta.weight": (s.delta_heads, s.width),
        "ssm_alpha.weight": (s.delta_heads, s.width),
    },
    "joined-rates": lambda s: {"ssm_ba.weight": (2 * s.delta_heads, s.width)},
    "convolution": lambda s: {
        "attn_norm.weight": (s.width,),
        "shortconv.conv.weight": (s.width, s.convolution - 1),
        "shortconv.in_proj.weight": (3 * s.width, s.width),
        "shortconv.out_proj.weight": (s.width, s.width),
    },
    "rwkv-norms": lambda s: _normed(s, "attn_norm", "attn_norm_2", "time_mix_ln"),
    "channel-mix": lambda s: {
        "channel_mix_lerp_k.weight": (1, 1, s.width),
        "channel_mix_key.weight": (s.feed_forward, s.width),
        "channel_mix_value.weight": (s.width, s.feed_forward),
    },
    "rwkv6": lambda s: {
        **{f"time_mix_lerp_{of}.weight": (1, 1, s.width) for of in "xwkvrg"},
        **_time_mix(s, "gate", "output"),
    },
    "rwkv6-mix": lambda s: {
        "time_mix_w1.weight": (5 * s.wkv_rank, s.width),
        "time_mix_w2.weight": (5, s.width, s.wkv_rank),
        "time_mix_first.weight": (s.width // s.wkv_head, s.wkv_head),
        "time_mix_decay.weight": (s.width,),
        "time_mix_decay_w1.weight": (s.wkv_rank, s.width),
        "time_mix_decay_w2.weight": (s.width, s.wkv_rank),
        "channel_mix_lerp_r.weight": (1, 1, s.width),
        "channel_mix_receptance.weight": (s.width, s.width),
    },
    "rwkv7": lambda s: {
        **{f"time_mix_{name}.weight": (s.width,) for name in ("w0", "a0", "v0", "k_k", "k_a", "r_k")},
        **{f"time_mix_{of}1.weight": (s.wkv_rank, s.width) for of in "wavg"},
        **{f"time_mix_{of}2.weight": (s.width, s.wkv_rank) for of in "wavg"},
        "time_mix_lerp_fused.weight": (6, 1, 1, s.width),
        **_time_mix(s, "output"),
    },
    "next-token": lambda s: {
        "nextn.eh_proj.weight": (s.width, 2 * s.width),
        "nextn.enorm.weight": (s.width,),
        "nextn.hnorm.weight": (s.width,),
        "nextn.shared_head_norm.weight": (s.width,),
    },
    # What an EAGLE-3 head makes one state of three of its target's with
    "features": lambda s: {"fc.weight": (s.width, 3 * s.width)},
    # Its attention reads a token's embedding and a state, side by side
    "eagle3": lambda s: {
        f"attn_{of}.weight": (s.query if of == "q" else s.keys, 2 * s.width) for of in "qkv"
    },
    "second-norm": lambda s: {"attn_norm_2.weight": (s.width,)},
    # What a DFlash drafter makes its KV of, from the inputs of three layers
    "encoder": lambda s: {"enc.output_norm.weight": (s.width,)},
    # In four groups of channels, before and after attention and feed-forward
    "convolutions": lambda s: {
        f"{of}_conv_{name}": shape
        for of in ("attn", "ffn")
        for name, shape in (
            ("base", (2, s.convolution, s.width)),
            ("proj.weight", (2 * s.convolution * 4, s.width)),
        )
    },
    "selector": lambda s: {
        "selector_predecessor.weight": (s.tokens, s.rank),
        "selector_successor.weight": (s.tokens, s.rank),
        "selector_hidden.weight": (s.rank, s.width),
    },
    "markov": lambda s: {
        "markov_w1.weight": (s.tokens, s.rank),
        "markov_w2.weight": (s.tokens, s.rank),
        "conf_proj.weight": (1, s.width + s.rank),
        "conf_proj.bias": (1,),
    },
    # DeepSeek-V4's: queries and outputs go through few values, and all heads share a key that is the value
    "latent": lambda s: {
        "attn_norm.weight": (s.width,),
        "attn_sinks.weight": (s.heads,),
        "attn_q_a.weight": (s.rank, s.width),
        "attn_q_a_norm.weight": (s.rank,),
        "attn_q_b.weight": (s.query, s.rank),
        "attn_kv.weight": (s.head, s.width),
        "attn_kv_a_norm.weight": (s.head,),
        "attn_output_a.weight": (s.heads * (s.rank // 2), s.head),
        "attn_output_b.weight": (s.width, s.heads * (s.rank // 2)),
    },
    # Several hidden states of each token, mixed before and after attention and experts
    "streams": lambda s: {
        f"hc_{of}_{name}.weight": shape
        for of in ("attn", "ffn")
        for name, shape in (
            ("fn", ((2 + s.streams) * s.streams, s.streams * s.width)),
            ("base", ((2 + s.streams) * s.streams,)),
            ("scale", (3,)),
        )
    },
    # What makes one hidden state of them in the end
    "joined-streams": lambda s: {
        "output_hc_fn.weight": (s.streams, s.streams * s.width),
        "output_hc_base.weight": (s.streams,),
        "output_hc_scale.weight": (1,),
    },
    "scale": lambda _: {"layer_output_scale.weight": (1,)},
    "rope": lambda s: {"rope_freqs.weight": (s.head // 2,)},
    # An assistant's: it attends to its target's keys and values, and has none
    "assistant": lambda s: {
        "attn_norm.weight": (s.width,),
        "attn_q.weight": (s.query, s.width),
        "attn_output.weight": (s.width, s.query),
    },
    "query-norm": lambda s: {"attn_q_norm.weight": (s.head,)},
    # From a token and a state of its target, which is twice as wide, and back to such a state
    "projections": lambda s: {
        "nextn.pre_projection.weight": (s.width, 4 * s.width),
        "nextn.post_projection.weight": (2 * s.width, s.width),
    },
    "embedding-norm": lambda s: {"token_embd_norm.weight": (s.width,)},
    "rwkv-output": lambda s: _normed(s, "token_embd_norm", "output_norm"),
}
"""Of parts of layers, under the names of GGUF without the layer's (`blk.N.`)."""

ADDS = (
    "attn_output.weight", "ffn_down.weight", "ffn_down_exps.weight", "ffn_down_shexp.weight",
    "ssm_out.weight", "shortconv.out_proj.weight", "time_mix_output.weight", "channel_mix_value.weight",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Architecture:
    """A kind of model; parts are rows of the tables above.

    `describe`: its metadata, by commas. `layers`: what they are made of, in turn. `by_layer`: for each of
    these keys the name of a tensor; layers without it have 0 there. `of_whole`: tensors of no layer, beside
    the embedding and the output. `head`: an MTP layer, beside the tensors that all of them have. `name`: what
    files call it, where that differs. `adds`: the last tensors of parts whose outputs are added to the text's
    hidden states. `repeats_at`: the share of them at which greedy texts repeat themselves, with changes now
    and then.
    """

    describe: str
    layers: tuple[str, ...]
    num_layers: int = 2
    by_layer: Mapping[str, str] = field(default_factory=dict)
    of_whole: str = "output"
    head: str = ""
    name: str = ""
    adds: tuple[str, ...] = ADDS
    repeats_at: float = 0.05

    def layer(self, index: int, num_layers: int, sizes: Sizes) -> Tensors:
        """The tensors of a layer; those from `num_layers` on are MTP layers."""
        if index < num_layers:
            return _tensors(self.layers[index % len(self.layers)], sizes)
        assert self.head, "it has no MTP layers"
        return _tensors(f"{self.head} next-token", sizes)

    def whole(self, sizes: Sizes) -> Tensors:
        return _tensors(self.of_whole, sizes)

    def metadata(self, num_layers: int, num_heads: int, sizes: Sizes) -> Metadata:
        """Keys without the architecture's name, and their values."""
        parts = self.describe.split(", ")
        found = {key: value for part in parts for key, value in METADATA[part](sizes).items()}
        layers = [self.layer(i, num_layers, sizes) for i in range(num_layers + num_heads)]
        for key, tensor in self.by_layer.items():
            value = found[key]
            assert isinstance(value, int)
            found[key] = [value if tensor in layer else 0 for layer in layers]
        if num_heads:
            found["nextn_predict_layers"] = num_heads
        return found


def _tensors(parts: str, sizes: Sizes) -> Tensors:
    return {name: shape for part in parts.split() for name, shape in TENSORS[part](sizes).items()}


KV_HEADS = {"attention.head_count_kv": "attn_k.weight"}
GEMMA = "attention norm feed-forward query-norms post-norm last-norm"
GEMMA_ADDS = ("post_attention_norm.weight", "post_ffw_norm.weight")
DENSE = "attention norm feed-forward"
BLOCK = "attention query-norms norm feed-forward"
QWEN_DELTA = "delta-net rates post-norm feed-forward"
QWEN_ATTENTION = "attention gate query-norms post-norm feed-forward"
NEXT_DELTA = "delta-net joined-rates post-norm experts shared-expert"
NEXT_ATTENTION = "attention gate query-norms post-norm experts shared-expert"
GLM = "attention biases query-norms post-norm experts balance"

ARCHITECTURES = {
    "llama": Architecture("heads", (DENSE,)),
    "gemma3": Architecture("heads, windows", (GEMMA,), 6, adds=GEMMA_ADDS),
    "gemma4": Architecture(
        "heads, layer windows", (f"{GEMMA} scale",), 4, of_whole="output rope", adds=GEMMA_ADDS
    ),
    "qwen2moe": Architecture("heads, experts", ("attention biases norm experts shared-expert",)),
    "qwen3moe": Architecture("heads, experts", ("attention query-norms norm experts",)),
    "glm4moe": Architecture("heads, experts, glm", (GLM,), head=GLM),
    "mamba": Architecture("mamba, no heads", ("mamba",)),
    "mamba2": Architecture("mamba, mamba2, no heads", ("mamba2",), repeats_at=0.03),
    "rwkv6": Architecture(
        "layer norm, rwkv, rwkv6",
        ("rwkv-norms rwkv6 channel-mix rwkv6-mix",),
        of_whole="rwkv-output",
        repeats_at=0.3,
    ),
    "rwkv7": Architecture(
        "layer norm, rwkv, rwkv7", ("rwkv-norms rwkv7 channel-mix",), of_whole="rwkv-output", repeats_at=1.0
    ),
    "jamba": Architecture("mamba, jamba", ("mamba jamba-norms norm feed-forward", DENSE), by_layer=KV_HEADS),
    "falcon-h1": Architecture(
        "heads, mamba, mamba2", ("mamba2 attention feed-forward falcon-norm",), repeats_at=0.03
    ),
    "granitehybrid": Architecture(
        "heads, mamba, mamba2", ("mamba2 norm feed-forward", DENSE), by_layer=KV_HEADS
    ),
    "nemotron_h": Architecture(
        "heads, mamba, mamba2, layer norm",
        ("mamba2", "ungated", "attention", "mamba2"),
        4,
        KV_HEADS | {"feed_forward_length": "ffn_up.weight"},
    ),
    "lfm2": Architecture(
        "heads, lfm2", ("convolution norm feed-forward", BLOCK), 4, KV_HEADS, "embedding-norm"
    ),
    "qwen35": Architecture(
        "heads, mamba, delta nets, sections",
        (QWEN_DELTA, QWEN_DELTA, QWEN_DELTA, QWEN_ATTENTION),
        4,
        head=QWEN_ATTENTION,
    ),
    "hy_v3": Architecture("heads, experts", (BLOCK,), head=BLOCK),
    "qwen3next": Architecture(
        "heads, mamba, delta nets, experts, shared expert",
        (NEXT_DELTA, NEXT_DELTA, NEXT_DELTA, NEXT_ATTENTION),
        4,
        head=NEXT_ATTENTION,
    ),
}
"""The kinds of model that `write_tiny` can make."""

HEADS = {
    "eagle3": Architecture(
        "heads, features",
        ("attention eagle3 norm feed-forward second-norm",),
        1,
        of_whole="output features",
    ),
    "dflash": Architecture("heads, blocks", (BLOCK,), of_whole="output features encoder"),
    "dflash2": Architecture(
        "heads, blocks, candidates",
        (f"{BLOCK} convolutions",),
        of_whole="output features encoder selector",
        name="dflash",
    ),
    "gemma4-assistant": Architecture(
        "heads, layer windows, assistant",
        ("assistant norm feed-forward query-norm post-norm last-norm scale",),
        of_whole="output rope projections",
        adds=GEMMA_ADDS,
    ),
    "dspark": Architecture(
        "heads, blocks, anchors", (BLOCK,), of_whole="output features encoder markov", name="dflash"
    ),
    "dspark-v4": Architecture(
        "heads, experts, blocks, anchors, glm, streams",
        ("latent streams norm experts balance",),
        of_whole="output features encoder markov joined-streams",
        name="dflash",
    ),
}
"""The kinds of file that draft from another model's states."""

WITH_HEADS = tuple(name for name, architecture in ARCHITECTURES.items() if architecture.head)
"""Those that may have MTP layers."""
