"""Where PyTorch computes, and whether it is fast there with 16-bit numbers."""

from __future__ import annotations

import torch

__all__ = ["device_of", "has_fast_half"]


def device_of() -> torch.device:
    """A GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def has_fast_half(device: torch.device) -> bool:
    """Whether bfloat16 products are computed by the hardware there: on GPUs, and on processors with AMX.

    AVX-512's own 16-bit products are hardly faster than those of 32 bits.
    """
    return device.type == "cuda" or bool(torch.cpu._is_amx_tile_supported())
