"""Llama-like models in PyTorch, over a dict of tensors with GGUF's names.

`transformers` has these models too. It is not used: target and draft are GGUF files on both sides, so that
its names, layouts and configurations would be one more conversion each way, in a package of its own size.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping
from copy import copy
from functools import cache, partial
from timeit import repeat
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention as attention

from outrider.lab.distill.checkpoint import Checkpoint, Shape

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_NEVER_TRIM_BYTES = 2**31 - 1
_CLEARLY_FASTER = 1.5
_TRIALS = 20


def device_of() -> torch.device:
    """A GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@cache
def has_fast_half(device: torch.device) -> bool:
    """Whether products of bfloat16 numbers are clearly faster there than those of 32 bits: on GPUs they are;
    on a processor it is tried out, since its instructions alone do not tell (AVX-512's own 16-bit products
    brought 4 times the speed on one processor and nothing on another)."""
    if device.type != "cpu":
        return True
    best_s = []
    for dtype in (torch.float32, torch.bfloat16):
        # as large as a product of a small model's layer
        left, right = (torch.ones(*size, dtype=dtype) for size in ((256, 512), (512, 1536)))
        best_s.append(min(repeat(partial(torch.mm, left, right), number=1, repeat=_TRIALS)))
    return best_s[0] > _CLEARLY_FASTER * best_s[1]


def keep_freed_memory() -> None:
    """Let glibc keep what is freed for the next step, in this process from now on.

    Large blocks are otherwise handed back to the system after every operation and fetched again, page by
    page: a quarter of all time on the machine where it was measured. Elsewhere nothing changes.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, _NEVER_TRIM_BYTES)


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""How a layer attends: its number, queries (batch, heads, tokens, head_width), keys and values (batch,
kv_heads, tokens, head_width); what comes out is shaped as the queries."""


def causal(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Every token sees itself and those before it in its own row."""
    del layer
    return attention(queries, keys, values, is_causal=True, enable_gqa=True)


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

    `weights`: by their GGUF names, on one device; they may require gradients. Qwen2 has biases on queries,
    keys and values, Qwen3 norms on queries and keys: both are used where the weights are there.
    """

    def __init__(self, shape: Shape, weights: Mapping[str, Tensor], max_tokens: int) -> None:
        self.shape = shape
        self.weights = dict(weights)
        self.device = next(iter(self.weights.values())).device
        self._rotation = Rotation(shape, max_tokens, self.device)

    @classmethod
    def of(cls, checkpoint: Checkpoint, max_tokens: int, *, dtype: torch.dtype, device: torch.device) -> Self:
        """A checkpoint's network for texts of up to `max_tokens`."""
        weights = {
            name: torch.tensor(values, device=device, dtype=dtype)
            for name, values in checkpoint.weights.items()
        }
        return cls(checkpoint.shape, weights, max_tokens)

    def with_weights(self, weights: Mapping[str, Tensor]) -> Self:
        other = copy(self)
        other.weights = dict(weights)
        return other

    def reach(self, max_tokens: int) -> None:
        """See to it that texts of so many tokens can be run."""
        if max_tokens > self._rotation.length:
            self._rotation = Rotation(self.shape, max_tokens, self.device)

    def states(self, tokens: Tensor) -> Tensor:
        """The last layer's states (batch, tokens, width) of texts side by side."""
        self.reach(tokens.shape[1])
        return self.hidden(
            tokens, torch.arange(tokens.shape[1], device=self.device).expand_as(tokens), causal
        )

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The last layer's states (batch, tokens, width) of `tokens` (batch, tokens) at `positions`."""
        x = functional.embedding(tokens, self.weights["token_embd.weight"])
        for layer in range(self.shape.layers):
            x = self.layer(layer, x, positions, attend)
        return self.normed(x)

    def layer(self, layer: int, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """What one layer makes of its input `x` (batch, tokens, width)."""
        name = f"blk.{layer}."
        x = x + self._attention(name, layer, self._norm(x, f"{name}attn_norm"), positions, attend)
        return x + self._feed_forward(name, self._norm(x, f"{name}ffn_norm"))

    def normed(self, x: Tensor) -> Tensor:
        """The output of the last layer as the output layer takes it."""
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
        mixed = attend(layer, queries, keys, self._heads(x, f"{name}attn_v"))
        return self._linear(mixed.transpose(1, 2).flatten(-2), f"{name}attn_output")

    def _feed_forward(self, name: str, x: Tensor) -> Tensor:
        gated = functional.silu(self._linear(x, f"{name}ffn_gate")) * self._linear(x, f"{name}ffn_up")
        return self._linear(gated, f"{name}ffn_down")
