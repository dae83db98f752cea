"""Llama-like models in PyTorch, over a dict of tensors with GGUF's names. `transformers` has these models
too; its names, layouts and configurations would be one more conversion each way, since both sides are GGUF
files."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from timeit import repeat

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention as attention

from outrider.lab.distill.checkpoint import Checkpoint, Shape

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_NEVER_TRIM_BYTES = 2**31 - 1
_CLEARLY_FASTER = 1.5
_TRIALS = 3


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
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, _NEVER_TRIM_BYTES)


class Cache:
    """Keys and values of texts that end together: shorter ones are padded up to `starts` (texts,)."""

    def __init__(self, starts: Tensor) -> None:
        self._starts = starts[:, None]
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}

    def positions(self, layer: int, count: int) -> Tensor:
        """Where the next tokens of a layer are (texts, count), each in its own text."""
        read = self._stored[layer][0].shape[2] if layer in self._stored else 0
        at = torch.arange(read, read + count, device=self._starts.device)
        return (at - self._starts).clamp(min=0)

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Every token sees its own text up to itself; padding, which no text sees, sees itself alone."""
        if layer in self._stored:
            known_keys, known_values = self._stored[layer]
            keys, values = torch.cat([known_keys, keys], dim=2), torch.cat([known_values, values], dim=2)
        self._stored[layer] = keys, values
        place = torch.arange(keys.shape[2], device=keys.device)
        own = place[-queries.shape[2] :, None]
        visible = (place <= own) & (place >= self._starts[:, None]) | (place == own)
        return attention(queries, keys, values, attn_mask=visible[:, None], enable_gqa=True)


@dataclass(frozen=True, slots=True)
class Network:
    """A model's weights by their GGUF names, on one device, and what it makes of tokens; they may require
    gradients. Qwen2 has biases on queries, keys and values, Qwen3 norms on queries and keys: both are used
    where the weights are there."""

    shape: Shape
    weights: Mapping[str, Tensor]

    @classmethod
    def of(cls, checkpoint: Checkpoint, device: torch.device) -> Network:
        weights = checkpoint.weights.items()
        return cls(checkpoint.shape, {name: torch.tensor(values, device=device) for name, values in weights})

    def states(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """The last layer's states (texts, tokens, width) of texts side by side, (texts, tokens) more of each:
        without a cache they begin here."""
        x = functional.embedding(tokens, self.weights["token_embd.weight"])
        for layer in range(self.shape.layers):
            x = self.layer(layer, x, cache)
        return self.normed(x)

    def layer(self, layer: int, x: Tensor, cache: Cache | None = None) -> Tensor:
        name = f"blk.{layer}."
        x = x + self._attention(name, layer, self._norm(x, f"{name}attn_norm"), cache)
        return x + self._feed_forward(name, self._norm(x, f"{name}ffn_norm"))

    def normed(self, x: Tensor) -> Tensor:
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
        """(texts, tokens, heads * head_width) to (texts, heads, tokens, head_width), normed if wanted."""
        x = self._linear(x, name).unflatten(-1, (-1, self.shape.head_width))
        if f"{name}_norm.weight" in self.weights:
            x = self._norm(x, f"{name}_norm")
        return x.transpose(1, 2)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """`x` (texts, heads, tokens, head_width) rotated to `positions` (tokens,) or (texts, tokens)."""
        half = self.shape.head_width // 2
        exponents = torch.arange(half, dtype=torch.float64, device=x.device) / half
        angles = (positions[..., None] * self.shape.rope_base**-exponents).unsqueeze(-3)
        cos, sin = angles.cos().float(), angles.sin().float()
        # GGUF's "llama" turns neighbours against each other, the others the two halves of a head.
        are_neighbours = self.shape.architecture == "llama"
        pairs = x.float().unflatten(-1, (half, 2) if are_neighbours else (2, half))
        first, second = pairs.unbind(-1 if are_neighbours else -2)
        turned = first * cos - second * sin, second * cos + first * sin
        return torch.stack(turned, dim=-1 if are_neighbours else -2).flatten(-2).to(x.dtype)

    def _attention(self, name: str, layer: int, x: Tensor, cache: Cache | None) -> Tensor:
        count = x.shape[1]
        positions = cache.positions(layer, count) if cache else torch.arange(count, device=x.device)
        queries = self._rotated(self._heads(x, f"{name}attn_q"), positions)
        keys = self._rotated(self._heads(x, f"{name}attn_k"), positions)
        values = self._heads(x, f"{name}attn_v")
        if cache is None:
            mixed = attention(queries, keys, values, is_causal=True, enable_gqa=True)
        else:
            mixed = cache.attend(layer, queries, keys, values)
        return self._linear(mixed.transpose(1, 2).flatten(-2), f"{name}attn_output")

    def _feed_forward(self, name: str, x: Tensor) -> Tensor:
        gated = functional.silu(self._linear(x, f"{name}ffn_gate")) * self._linear(x, f"{name}ffn_up")
        return self._linear(gated, f"{name}ffn_down")
