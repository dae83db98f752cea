"""The table of architectures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tiny.metadata import (
    Metadata,
    layer_norm,
    no_heads,
    of_anchors,
    of_assistant,
    of_blocks,
    of_candidates,
    of_delta_nets,
    of_experts,
    of_features,
    of_glm,
    of_heads,
    of_jamba,
    of_layer_windows,
    of_lfm2,
    of_mamba,
    of_mamba2,
    of_rwkv6,
    of_rwkv7,
    of_sections,
    of_shared_expert,
    of_streams,
    of_windows,
)
from tiny.sizes import Sizes
from tiny.tensors import (
    Block,
    Tensors,
    attention,
    balanced_experts,
    biases,
    block_features,
    convolutions,
    delta_net,
    eagle3,
    experts,
    features,
    feed_forward,
    feed_forward_norm,
    gated_attention,
    jamba_norms,
    joined,
    joined_rates,
    joined_streams,
    latent_attention,
    mamba,
    mamba2,
    markov,
    next_token,
    normed_feed_forward,
    output,
    post_norm,
    query_norms,
    rates,
    rwkv6,
    rwkv7,
    selector,
    shared_expert,
    short_convolution,
    streams,
    ungated_feed_forward,
)

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
