"""Widths of tiny models, and of wide ones."""

from __future__ import annotations

from dataclasses import dataclass


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
