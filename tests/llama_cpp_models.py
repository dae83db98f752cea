"""Tiny models on the llama.cpp backend, and what they say when asked token by token."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.backends.gguf import GgufModel, LoadOptions, Weights
from outrider.core.data import Logits, Span
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


def fresh(folder: Path, **options: Any) -> Weights:
    """Weights that are the caller's own to close."""
    return Weights(write_tiny(folder / "own.gguf", **options), SMALL)


def one_by_one(weights: Weights, tokens: Sequence[int]) -> Logits:
    """The logits behind each token, evaluated alone in a context of its own."""
    model = weights.open(512)
    rows = [model.decode([Span(0, (token,), i, 1)])[0][0].copy() for i, token in enumerate(tokens)]
    model.close()
    return np.array(rows)


def store(model: GgufModel, tokens: Sequence[int], sequence: int = 0) -> None:
    """Append tokens, at most 32 in a call: the window of a sliding cache moves on with each."""
    for i in range(0, len(tokens), 32):
        part = tuple(tokens[i : i + 32])
        model.decode([Span(sequence, part, model.length(sequence), 0)])


def next_rows(model: GgufModel, tokens: Sequence[int], sequence: int = 0) -> Logits:
    """The logits behind each of these next tokens."""
    span = Span(sequence, tuple(tokens), model.length(sequence), len(tokens))
    return model.decode([span])[0].copy()


def assert_near(actual: Logits, expected: Logits) -> None:
    """Equal but for sums in another order: 0.001 was seen, while the logits spread over several units
    and one wrong position moves them by tenths."""
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-2)


def resident_bytes() -> int:
    """Memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
