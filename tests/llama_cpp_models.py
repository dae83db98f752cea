"""Tiny models on the llama.cpp backend, and what they say when asked token by token."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from outrider.backends.gguf.model import Weights
from outrider.backends.gguf.options import LoadOptions
from tiny_gguf import write_tiny

TEXT = tuple(int(i) for i in np.random.default_rng(5).integers(0, 280, 480))
"""tokens without meaning"""

SMALL = LoadOptions(
    micro_batch_tokens=8, threads=1, flash_attention="off", cache_type_k="f32", cache_type_v="f32"
)
"""Several micro-batches in most calls, and no rounding that would hide a wrong row."""

Load = Callable[..., Weights]
"""Weights of a tiny model by its architecture and options, loaded once for each."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Load:
    folder = tmp_path_factory.mktemp("tiny")
    loaded: dict[tuple[str, LoadOptions], Weights] = {}

    def load(arch: str = "llama", options: LoadOptions = SMALL) -> Weights:
        path = folder / f"{arch}.gguf"
        if not path.exists():
            write_tiny(path, arch=arch)
        if (arch, options) not in loaded:
            loaded[arch, options] = Weights(path, options)
        return loaded[arch, options]

    return load


def resident_bytes() -> int:
    """Memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
