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


# Metadata, under the keys of GGUF without the architecture's name

Value = bool | int | float | list[int] | list[bool]
Metadata = dict[str, Value]


def of_heads(s: Sizes) -> Metadata:
    return {
        "attention.head_count": s.heads,
        "attention.head_count_kv": s.kv_heads,
        "attention.key_length": s.head,
        "attention.value_length": s.head,
        "rope.dimension_count": s.head,
        "feed_forward_length": s.feed_forward,
    }


def of_windows(s: Sizes) -> Metadata:
    return {
        "attention.sliding_window": s.window,
        "attention.sliding_window_pattern": s.window_pattern,
    }


def of_experts(s: Sizes) -> Metadata:
    return {
        "expert_count": s.experts,
        "expert_used_count": s.experts_used,
        "expert_feed_forward_length": s.feed_forward,
    }


def of_shared_expert(s: Sizes) -> Metadata:
    return {"expert_shared_feed_forward_length": s.feed_forward}


def of_glm(s: Sizes) -> Metadata:
    return {
        "rope.dimension_count": s.head // 2,
        "expert_shared_count": 1,
        "leading_dense_block_count": 0,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.0,
        "expert_gating_func": 2,  # sigmoid
    }


def no_heads(s: Sizes) -> Metadata:
    del s
    return {"attention.head_count": 0, "feed_forward_length": 0}


def of_mamba(s: Sizes) -> Metadata:
    return {
        "ssm.conv_kernel": s.convolution,
        "ssm.inner_size": s.inner,
        "ssm.state_size": s.state,
        "ssm.time_step_rank": s.time_step_rank,
    }


def of_mamba2(s: Sizes) -> Metadata:
    return of_mamba(s) | {
        "ssm.state_size": s.mamba2_state,
        "ssm.time_step_rank": s.mamba2_heads,
        "ssm.group_count": s.mamba2_groups,
    }


def of_delta_nets(s: Sizes) -> Metadata:
    return of_mamba(s) | {
        "ssm.inner_size": s.delta_values,
        "ssm.state_size": s.delta_head,
        "ssm.time_step_rank": s.delta_heads,
        "ssm.group_count": s.delta_groups,
        "full_attention_interval": 4,
    }


def of_sections(s: Sizes) -> Metadata:
    return {"rope.dimension_sections": [s.head // 4, s.head // 8, s.head // 8, 0]}


def of_jamba(s: Sizes) -> Metadata:
    names = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
    return of_mamba(s) | {name: of_heads(s)[name] for name in names}


def of_lfm2(s: Sizes) -> Metadata:
    return of_heads(s) | {"shortconv.l_cache": s.convolution - 1}


def layer_norm(s: Sizes) -> Metadata:
    del s
    return {"attention.layer_norm_epsilon": 1e-5}


def of_rwkv(s: Sizes) -> Metadata:
    return layer_norm(s) | {
        "attention.head_count": 0,
        "feed_forward_length": s.feed_forward,
        "wkv.head_size": s.wkv_head,
        "token_shift_count": 2,
    }


def of_rwkv6(s: Sizes) -> Metadata:
    return of_rwkv(s) | {"time_mix_extra_dim": s.wkv_rank, "time_decay_extra_dim": s.wkv_rank}


def of_rwkv7(s: Sizes) -> Metadata:
    ranks = ("decay", "iclr", "value_residual_mix", "gate")
    return of_rwkv(s) | {f"attention.{of}_lora_rank": s.wkv_rank for of in ranks}


def of_features(s: Sizes) -> Metadata:
    """An EAGLE-3 head's, for a target of four layers and the same width."""
    return {"target_layers": [1, 2, 3], "target_hidden_size": s.width}


def of_blocks(s: Sizes) -> Metadata:
    """A block drafter's, for a target of the same width."""
    del s
    return {"target_layers": [0, 1, 1], "block_size": 8}


def of_candidates(s: Sizes) -> Metadata:
    return {
        "selector_top_k": s.candidates,
        "selector_rank": s.rank,
        "conv_kernel_size": s.convolution,
        "conv_group_size": s.width // 4,
    }


def of_anchors(s: Sizes) -> Metadata:
    """A DSpark drafter's, whose blocks begin with the last token."""
    del s
    return {"sample_from_anchor": True, "has_confidence_head": True}


def of_streams(s: Sizes) -> Metadata:
    """A DSpark drafter's of DeepSeek-V4's kind, of two layers."""
    return of_glm(s) | {
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
    }


def of_layer_windows(s: Sizes) -> Metadata:
    """Gemma 4's, of four layers of which the last sees all; its assistant has two."""
    return {
        "attention.sliding_window": s.window,
        "attention.sliding_window_pattern": [True, True, True, False],
        "attention.key_length_swa": s.head,
        "attention.value_length_swa": s.head,
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
    }


def of_assistant(s: Sizes) -> Metadata:
    return {
        "attention.sliding_window_pattern": [True, False],
        "embedding_length_out": 2 * s.width,
        "nextn_predict_layers": 2,
    }


# Tensors of parts of layers, under the names of GGUF without the layer's (`blk.N.`)

Tensors = dict[str, tuple[int, ...]]
"""Shapes by name, in numpy's order: outputs before inputs, experts first."""
Block = Callable[[Sizes], Tensors]


def joined(*blocks: Block) -> Block:
    """A layer of these parts."""
    return lambda s: {name: shape for block in blocks for name, shape in block(s).items()}


def output(s: Sizes) -> Tensors:
    return {"output_norm.weight": (s.width,)}


def attention(s: Sizes) -> Tensors:
    return {
        "attn_norm.weight": (s.width,),
        "attn_q.weight": (s.query, s.width),
        "attn_k.weight": (s.keys, s.width),
        "attn_v.weight": (s.keys, s.width),
        "attn_output.weight": (s.width, s.query),
    }


def query_norms(s: Sizes) -> Tensors:
    return {"attn_q_norm.weight": (s.head,), "attn_k_norm.weight": (s.head,)}


def biases(s: Sizes) -> Tensors:
    return {"attn_q.bias": (s.query,), "attn_k.bias": (s.keys,), "attn_v.bias": (s.keys,)}


def gated_attention(s: Sizes) -> Tensors:
    return attention(s) | {"attn_q.weight": (2 * s.query, s.width)} | query_norms(s)


def post_norm(s: Sizes) -> Tensors:
    return {"post_attention_norm.weight": (s.width,)}


def feed_forward_norm(s: Sizes) -> Tensors:
    return {"ffn_norm.weight": (s.width,)}


def feed_forward(s: Sizes, suffix: str = "") -> Tensors:
    return {
        f"ffn_gate{suffix}.weight": (s.feed_forward, s.width),
        f"ffn_up{suffix}.weight": (s.feed_forward, s.width),
        f"ffn_down{suffix}.weight": (s.width, s.feed_forward),
    }


def normed_feed_forward(s: Sizes) -> Tensors:
    return feed_forward_norm(s) | feed_forward(s)


def ungated_feed_forward(s: Sizes) -> Tensors:
    names = ("ffn_up.weight", "ffn_down.weight")
    return {"attn_norm.weight": (s.width,)} | {name: feed_forward(s)[name] for name in names}


def experts(s: Sizes) -> Tensors:
    chosen = {name: (s.experts, *shape) for name, shape in feed_forward(s, "_exps").items()}
    return {"ffn_gate_inp.weight": (s.experts, s.width)} | chosen


def shared_expert(s: Sizes) -> Tensors:
    return {"ffn_gate_inp_shexp.weight": (s.width,)} | feed_forward(s, "_shexp")


def balanced_experts(s: Sizes) -> Tensors:
    return experts(s) | {"exp_probs_b.bias": (s.experts,)} | feed_forward(s, "_shexp")


def mamba(s: Sizes) -> Tensors:
    return {
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
    }


def jamba_norms(s: Sizes) -> Tensors:
    norms = {"ssm_dt_norm": s.time_step_rank, "ssm_b_norm": s.state, "ssm_c_norm": s.state}
    return {f"{name}.weight": (width,) for name, width in norms.items()}


def mamba2(s: Sizes) -> Tensors:
    mixed = s.inner + 2 * s.mamba2_groups * s.mamba2_state
    return {
        "attn_norm.weight": (s.width,),
        "ssm_in.weight": (s.inner + mixed + s.mamba2_heads, s.width),
        "ssm_conv1d.weight": (mixed, s.convolution),
        "ssm_conv1d.bias": (mixed,),
        "ssm_dt.bias": (s.mamba2_heads,),
        "ssm_a": (s.mamba2_heads, 1),
        "ssm_d": (s.mamba2_heads, 1),
        "ssm_norm.weight": (s.mamba2_groups, s.inner // s.mamba2_groups),
        "ssm_out.weight": (s.width, s.inner),
    }


def delta_net(s: Sizes) -> Tensors:
    mixed = 2 * s.delta_head * s.delta_groups + s.delta_values
    return {
        "attn_norm.weight": (s.width,),
        "attn_qkv.weight": (mixed, s.width),
        "attn_gate.weight": (s.delta_values, s.width),
        "ssm_conv1d.weight": (mixed, s.convolution),
        "ssm_dt.bias": (s.delta_heads,),
        "ssm_a": (s.delta_heads,),
        "ssm_norm.weight": (s.delta_head,),
        "ssm_out.weight": (s.width, s.delta_values),
    }


def rates(s: Sizes) -> Tensors:
    return {"ssm_beta.weight": (s.delta_heads, s.width), "ssm_alpha.weight": (s.delta_heads, s.width)}


def joined_rates(s: Sizes) -> Tensors:
    return {"ssm_ba.weight": (2 * s.delta_heads, s.width)}


def short_convolution(s: Sizes) -> Tensors:
    return {
        "attn_norm.weight": (s.width,),
        "shortconv.conv.weight": (s.width, s.convolution - 1),
        "shortconv.in_proj.weight": (3 * s.width, s.width),
        "shortconv.out_proj.weight": (s.width, s.width),
    }


def rwkv_norms(s: Sizes) -> Tensors:
    names = ("attn_norm", "attn_norm_2", "time_mix_ln")
    return {f"{name}.{part}": (s.width,) for name in names for part in ("weight", "bias")}


def channel_mix(s: Sizes) -> Tensors:
    return {
        "channel_mix_lerp_k.weight": (1, 1, s.width),
        "channel_mix_key.weight": (s.feed_forward, s.width),
        "channel_mix_value.weight": (s.width, s.feed_forward),
    }


def time_mix(s: Sizes, *names: str) -> Tensors:
    return {f"time_mix_{name}.weight": (s.width, s.width) for name in ("key", "value", "receptance", *names)}


def rwkv6(s: Sizes) -> Tensors:
    lerps = {f"time_mix_lerp_{of}.weight": (1, 1, s.width) for of in "xwkvrg"}
    return rwkv_norms(s) | lerps | time_mix(s, "gate", "output") | channel_mix(s) | {
        "time_mix_w1.weight": (5 * s.wkv_rank, s.width),
        "time_mix_w2.weight": (5, s.width, s.wkv_rank),
        "time_mix_first.weight": (s.width // s.wkv_head, s.wkv_head),
        "time_mix_decay.weight": (s.width,),
        "time_mix_decay_w1.weight": (s.wkv_rank, s.width),
        "time_mix_decay_w2.weight": (s.width, s.wkv_rank),
        "channel_mix_lerp_r.weight": (1, 1, s.width),
        "channel_mix_receptance.weight": (s.width, s.width),
    }  # fmt: skip


def rwkv7(s: Sizes) -> Tensors:
    vectors = {f"time_mix_{name}.weight": (s.width,) for name in ("w0", "a0", "v0", "k_k", "k_a", "r_k")}
    inner = {f"time_mix_{of}1.weight": (s.wkv_rank, s.width) for of in "wavg"}
    outer = {f"time_mix_{of}2.weight": (s.width, s.wkv_rank) for of in "wavg"}
    fused: Tensors = {"time_mix_lerp_fused.weight": (6, 1, 1, s.width)}
    return rwkv_norms(s) | vectors | inner | outer | fused | time_mix(s, "output") | channel_mix(s)


def next_token(s: Sizes) -> Tensors:
    return {
        "nextn.eh_proj.weight": (s.width, 2 * s.width),
        "nextn.enorm.weight": (s.width,),
        "nextn.hnorm.weight": (s.width,),
        "nextn.shared_head_norm.weight": (s.width,),
    }


def features(s: Sizes) -> Tensors:
    """What an EAGLE-3 head makes one state of three of its target's with."""
    return output(s) | {"fc.weight": (s.width, 3 * s.width)}


def eagle3(s: Sizes) -> Tensors:
    """Attention reads a token's embedding and a state, side by side."""
    inputs = {f"attn_{of}.weight": (s.query if of == "q" else s.keys, 2 * s.width) for of in "qkv"}
    return attention(s) | inputs | normed_feed_forward(s) | {"attn_norm_2.weight": (s.width,)}


def block_features(s: Sizes) -> Tensors:
    """What a DFlash drafter makes its KV of, from the inputs of three layers."""
    return features(s) | {"enc.output_norm.weight": (s.width,)}


def convolutions(s: Sizes) -> Tensors:
    """In four groups of channels, before and after attention and feed-forward."""
    of_side = {"base": (2, s.convolution, s.width), "proj.weight": (2 * s.convolution * 4, s.width)}
    return {f"{of}_conv_{name}": shape for of in ("attn", "ffn") for name, shape in of_side.items()}


def selector(s: Sizes) -> Tensors:
    return {
        "selector_predecessor.weight": (s.tokens, s.rank),
        "selector_successor.weight": (s.tokens, s.rank),
        "selector_hidden.weight": (s.rank, s.width),
    }


def markov(s: Sizes) -> Tensors:
    return {
        "markov_w1.weight": (s.tokens, s.rank),
        "markov_w2.weight": (s.tokens, s.rank),
        "conf_proj.weight": (1, s.width + s.rank),
        "conf_proj.bias": (1,),
    }


def latent_attention(s: Sizes) -> Tensors:
    """DeepSeek-V4's: queries and outputs go through few values, and all heads share a key that is the value,
    too."""
    of_outputs = s.heads * (s.rank // 2)
    return {
        "attn_norm.weight": (s.width,),
        "attn_sinks.weight": (s.heads,),
        "attn_q_a.weight": (s.rank, s.width),
        "attn_q_a_norm.weight": (s.rank,),
        "attn_q_b.weight": (s.query, s.rank),
        "attn_kv.weight": (s.head, s.width),
        "attn_kv_a_norm.weight": (s.head,),
        "attn_output_a.weight": (of_outputs, s.head),
        "attn_output_b.weight": (s.width, of_outputs),
    }


def streams(s: Sizes) -> Tensors:
    """Several hidden states of each token, mixed before and after attention and experts."""
    mixes = (2 + s.streams) * s.streams
    of_part = {"fn": (mixes, s.streams * s.width), "base": (mixes,), "scale": (3,)}
    return {f"hc_{of}_{name}.weight": shape for of in ("attn", "ffn") for name, shape in of_part.items()}


def joined_streams(s: Sizes) -> Tensors:
    """What makes one hidden state of them in the end."""
    return {
        "output_hc_fn.weight": (s.streams, s.streams * s.width),
        "output_hc_base.weight": (s.streams,),
        "output_hc_scale.weight": (1,),
    }


# Architectures

ADDS = (
    "attn_output.weight", "ffn_down.weight", "ffn_down_exps.weight", "ffn_down_shexp.weight",
    "ssm_out.weight", "shortconv.out_proj.weight", "time_mix_output.weight", "channel_mix_value.weight",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Architecture:
    """A kind of model.

    `layers`: what they are made of, in turn. `by_layer`: for each of these keys the name of a tensor; layers
    without it have 0 there. `whole`: tensors of no layer, beside the embedding and the output. `head`: an MTP
    layer, beside the tensors that all of them have. `name`: what files call it, where that differs. `adds`:
    the last tensors of parts whose outputs are added to the text's hidden states. `repeats_at`: the share of
    them at which greedy texts repeat themselves, with changes now and then.
    """

    describe: tuple[Callable[[Sizes], Metadata], ...]
    layers: tuple[Block, ...]
    num_layers: int = 2
    by_layer: Mapping[str, str] = field(default_factory=dict)
    whole: Block = output
    head: Block | None = None
    name: str = ""
    adds: tuple[str, ...] = ADDS
    repeats_at: float = 0.05

    def layer(self, index: int, num_layers: int, sizes: Sizes) -> Tensors:
        """The tensors of a layer; those from `num_layers` on are MTP layers."""
        if index < num_layers:
            return self.layers[index % len(self.layers)](sizes)
        assert self.head is not None, "it has no MTP layers"
        return self.head(sizes) | next_token(sizes)

    def metadata(self, num_layers: int, num_heads: int, sizes: Sizes) -> Metadata:
        """Keys without the architecture's name, and their values."""
        found = {key: value for describe in self.describe for key, value in describe(sizes).items()}
        layers = [self.layer(i, num_layers, sizes) for i in range(num_layers + num_heads)]
        for key, tensor in self.by_layer.items():
            value = found[key]
            assert isinstance(value, int)
            found[key] = [value if tensor in layer else 0 for layer in layers]
        if num_heads:
            found["nextn_predict_layers"] = num_heads
        return found


KV_HEADS = {"attention.head_count_kv": "attn_k.weight"}

block_layer = joined(attention, query_norms, normed_feed_forward)
dense = joined(attention, normed_feed_forward)
mixture = joined(attention, query_norms, feed_forward_norm, experts)
qwen35_delta = joined(delta_net, rates, post_norm, feed_forward)
qwen35_attention = joined(gated_attention, post_norm, feed_forward)
qwen3next_delta = joined(delta_net, joined_rates, post_norm, experts, shared_expert)
qwen3next_attention = joined(gated_attention, post_norm, experts, shared_expert)
glm_experts = joined(attention, biases, query_norms, post_norm, balanced_experts)


def gemma3_layer(s: Sizes) -> Tensors:
    return dense(s) | query_norms(s) | post_norm(s) | {"post_ffw_norm.weight": (s.width,)}


def gemma4_layer(s: Sizes) -> Tensors:
    return gemma3_layer(s) | {"layer_output_scale.weight": (1,)}


def gemma4_output(s: Sizes) -> Tensors:
    return output(s) | {"rope_freqs.weight": (s.head // 2,)}


def assistant_layer(s: Sizes) -> Tensors:
    """It attends to its target's keys and values, and has none."""
    own = gemma4_layer(s)
    return {name: shape for name, shape in own.items() if name[:6] not in ("attn_k", "attn_v")}


def projections(s: Sizes) -> Tensors:
    """From a token and a state of its target, which is twice as wide, and back to such a state."""
    return gemma4_output(s) | {
        "nextn.pre_projection.weight": (s.width, 4 * s.width),
        "nextn.post_projection.weight": (2 * s.width, s.width),
    }


def falcon_h1_layer(s: Sizes) -> Tensors:
    return mamba2(s) | attention(s) | feed_forward(s) | {"ffn_norm": (s.width,)}


def lfm2_output(s: Sizes) -> Tensors:
    return {"token_embd_norm.weight": (s.width,)}


def rwkv_output(s: Sizes) -> Tensors:
    names = ("token_embd_norm", "output_norm")
    return {f"{name}.{part}": (s.width,) for name in names for part in ("weight", "bias")}


jamba_mamba = joined(mamba, jamba_norms, normed_feed_forward)
granite_mamba = joined(mamba2, normed_feed_forward)
lfm2_convolution = joined(short_convolution, normed_feed_forward)
lfm2_attention = joined(attention, query_norms, normed_feed_forward)
qwen2_experts = joined(attention, biases, feed_forward_norm, experts, shared_expert)

ARCHITECTURES = {
    "llama": Architecture((of_heads,), (dense,)),
    "gemma3": Architecture(
        (of_heads, of_windows),
        (gemma3_layer,),
        num_layers=6,
        adds=("post_attention_norm.weight", "post_ffw_norm.weight"),
    ),
    "gemma4": Architecture(
        (of_heads, of_layer_windows),
        (gemma4_layer,),
        num_layers=4,
        whole=gemma4_output,
        adds=("post_attention_norm.weight", "post_ffw_norm.weight"),
    ),
    "qwen2moe": Architecture((of_heads, of_experts), (qwen2_experts,)),
    "qwen3moe": Architecture((of_heads, of_experts), (mixture,)),
    "glm4moe": Architecture((of_heads, of_experts, of_glm), (glm_experts,), head=glm_experts),
    "mamba": Architecture((of_mamba, no_heads), (mamba,)),
    "mamba2": Architecture((of_mamba2, no_heads), (mamba2,), repeats_at=0.03),
    "rwkv6": Architecture((of_rwkv6,), (rwkv6,), whole=rwkv_output, repeats_at=0.3),
    "rwkv7": Architecture((of_rwkv7,), (rwkv7,), whole=rwkv_output, repeats_at=1.0),
    "jamba": Architecture((of_jamba,), (jamba_mamba, dense), by_layer=KV_HEADS),
    "falcon-h1": Architecture((of_heads, of_mamba2), (falcon_h1_layer,), repeats_at=0.03),
    "granitehybrid": Architecture((of_heads, of_mamba2), (granite_mamba, dense), by_layer=KV_HEADS),
    "nemotron_h": Architecture(
        (of_heads, of_mamba2, layer_norm),
        (mamba2, ungated_feed_forward, attention, mamba2),
        num_layers=4,
        by_layer=KV_HEADS | {"feed_forward_length": "ffn_up.weight"},
    ),
    "lfm2": Architecture(
        (of_lfm2,), (lfm2_convolution, lfm2_attention), num_layers=4, by_layer=KV_HEADS, whole=lfm2_output
    ),
    "qwen35": Architecture(
        (of_heads, of_delta_nets, of_sections),
        (qwen35_delta, qwen35_delta, qwen35_delta, qwen35_attention),
        num_layers=4,
        head=qwen35_attention,
    ),
    "hy_v3": Architecture((of_heads, of_experts), (block_layer,), head=block_layer),
    "qwen3next": Architecture(
        (of_heads, of_delta_nets, of_experts, of_shared_expert),
        (qwen3next_delta, qwen3next_delta, qwen3next_delta, qwen3next_attention),
        num_layers=4,
        head=qwen3next_attention,
    ),
}
"""The kinds of model that `write_tiny` can make."""

HEADS = {
    "eagle3": Architecture((of_heads, of_features), (eagle3,), num_layers=1, whole=features),
    "dflash": Architecture((of_heads, of_blocks), (block_layer,), whole=block_features),
    "dflash2": Architecture(
        (of_heads, of_blocks, of_candidates),
        (joined(block_layer, convolutions),),
        whole=joined(block_features, selector),
        name="dflash",
    ),
    "gemma4-assistant": Architecture(
        (of_heads, of_layer_windows, of_assistant),
        (assistant_layer,),
        whole=projections,
        adds=("post_attention_norm.weight", "post_ffw_norm.weight"),
    ),
    "dspark": Architecture(
        (of_heads, of_blocks, of_anchors), (block_layer,), whole=joined(block_features, markov), name="dflash"
    ),
    "dspark-v4": Architecture(
        (of_heads, of_experts, of_blocks, of_anchors, of_streams),
        (joined(latent_attention, streams, feed_forward_norm, balanced_experts),),
        whole=joined(block_features, markov, joined_streams),
        name="dflash",
    ),
}
"""The kinds of file that draft from another model's states."""

WITH_HEADS = tuple(name for name, architecture in ARCHITECTURES.items() if architecture.head)
"""Those that may have MTP layers."""
