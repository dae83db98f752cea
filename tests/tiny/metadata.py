"""What a file says of its layers, under the keys of GGUF without the architecture's name."""

from __future__ import annotations

from tiny.sizes import Sizes

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
