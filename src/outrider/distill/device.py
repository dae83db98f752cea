"""Where PyTorch computes, whether it is fast there with 16-bit numbers, and the memory that it works in."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from time import perf_counter

import torch

__all__ = ["device_of", "has_fast_half", "keep_freed_memory"]

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
    wide = _product_s(torch.float32)
    return wide > _CLEARLY_FASTER * _product_s(torch.bfloat16)


def _product_s(dtype: torch.dtype) -> float:
    """Seconds of a product as large as one of a small model's layer, the best of a few."""
    left, right = (torch.ones(*size, dtype=dtype) for size in ((256, 512), (512, 1536)))
    times = []
    for _ in range(_TRIALS):
        started = perf_counter()
        torch.mm(left, right)
        times.append(perf_counter() - started)
    return min(times)


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
