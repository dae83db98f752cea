"""The tensors of parts of layers, under the names of GGUF without the layer's (`blk.N.`)."""

from __future__ import annotations

from collections.abc import Callable

from tiny.sizes import Sizes

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
