"""The forward pass of Llama-like models in PyTorch, over a dict of tensors with GGUF's names.

What a layer is: RMS norm, attention with rotary positions (grouped keys and values), RMS norm, gated
feed-forward, each added to what came in. Qwen2 has biases on queries, keys and values, Qwen3 norms on
queries and keys; both are used where the weights are there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from outrider.distill.checkpoint import Checkpoint, Shape

__all__ = ["Attend", "Network", "causal"]

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""How a layer attends: its number, queries (batch, heads, tokens, head_width), keys and values (batch,
kv_heads, tokens, head_width); what comes out is shaped as the queries."""


def causal(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Every token sees itself and those before it in its own row."""
    del layer
    groups = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    return functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)


class Rotation:
    """Cosines and sines of the rotary positions 0 … length - 1: (length, head_width / 2) each, float32."""

    def __init__(self, shape: Shape, length: int, device: torch.device) -> None:
        self.length = length
        half = shape.head_width // 2
        frequencies = shape.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
        self.cos = angles.cos().float().to(device)
        self.sin = angles.sin().float().to(device)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate `x` (batch, heads, tokens, head_width) to `positions` (batch, tokens)."""
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Network:
    """A model's weights as tensors, and what it makes of tokens.

    `weights`: by their GGUF names, on one device; they may require gradients.
    """

    def __init__(self, shape: Shape, weights: Mapping[str, Tensor], max_tokens: int) -> None:
        self.shape = shape
        self.weights = dict(weights)
        self.device = next(iter(self.weights.values())).device
        self._rotation = Rotation(shape, max_tokens, self.device)

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, max_tokens: int, *, dtype: torch.dtype, device: torch.device
    ) -> Network:
        """A checkpoint's network for texts of up to `max_tokens`."""
        weights = {
            name: torch.tensor(values, device=device, dtype=dtype)
            for name, values in checkpoint.weights.items()
        }
        return cls(checkpoint.shape, weights, max_tokens)

    def with_weights(self, weights: Mapping[str, Tensor]) -> Network:
        """The same shape with other weights."""
        other = copy(self)
        other.weights = dict(weights)
        return other

    def reach(self, max_tokens: int) -> None:
        """See to it that texts of so many tokens can be run."""
        if max_tokens > self._rotation.length:
            self._rotation = Rotation(self.shape, max_tokens, self.device)

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The last layer's states (batch, tokens, width) of `tokens` (batch, tokens) at `positions`."""
        x = functional.embedding(tokens, self.weights["token_embd.weight"])
        for layer in range(self.shape.layers):
            name = f"blk.{layer}."
            x = x + self._attention(name, layer, self._norm(x, f"{name}attn_norm"), positions, attend)
            x = x + self._feed_forward(name, self._norm(x, f"{name}ffn_norm"))
        return self._norm(x, "output_norm")

    def logits(self, states: Tensor) -> Tensor:
        """Logits (…, vocabulary) of states (…, width)."""
        name = "output.weight" if "output.weight" in self.weights else "token_embd.weight"
        return functional.linear(states, self.weights[name])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        return functional.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), self.shape.norm_epsilon)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _heads(self, x: Tensor, name: str) -> Tensor:
        """(batch, tokens, heads * head_width) to (batch, heads, tokens, head_width), normed if wanted."""
        x = self._linear(x, name).unflatten(-1, (-1, self.shape.head_width))
        if f"{name}_norm.weight" in self.weights:
            x = self._norm(x, f"{name}_norm")
        return x.transpose(1, 2)

    def _attention(self, name: str, layer: int, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        queries = self._rotation(self._heads(x, f"{name}attn_q"), positions)
        keys = self._rotation(self._heads(x, f"{name}attn_k"), positions)
        values = self._linear(x, f"{name}attn_v").unflatten(-1, (-1, self.shape.head_width)).transpose(1, 2)
        mixed = attend(layer, queries, keys, values)
        return self._linear(mixed.transpose(1, 2).flatten(-2), f"{name}attn_output")

    def _feed_forward(self, name: str, x: Tensor) -> Tensor:
        gated = functional.silu(self._linear(x, f"{name}ffn_gate")) * self._linear(x, f"{name}ffn_up")
        return self._linear(gated, f"{name}ffn_down")
