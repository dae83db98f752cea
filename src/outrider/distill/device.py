"""Where PyTorch computes, whether it is fast there with 16-bit numbers, and the memory that it works in."""

from __future__ import annotations

import ctypes
import sys

import torch

__all__ = ["device_of", "has_fast_half", "keep_freed_memory"]

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_NEVER_TRIM_BYTES = 2**31 - 1


def device_of() -> torch.device:
    """A GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def has_fast_half(device: torch.device) -> bool:
    """Whether bfloat16 products are computed by the hardware there: on GPUs, and on processors with AMX.

    AVX-512's own 16-bit products are hardly faster than those of 32 bits.
    """
    return device.type == "cuda" or bool(torch.cpu._is_amx_tile_supported())


def keep_freed_memory() -> None:
    """Let glibc keep what is freed for the next step, in this process from now on.

    Large blocks are otherwise handed back to the system after every operation and fetched anew, page by page:
    a quarter of all time on the machine where it was measured. Elsewhere nothing changes.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, _NEVER_TRIM_BYTES)
