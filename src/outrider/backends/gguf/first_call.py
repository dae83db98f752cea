"""A program that loads a model, makes its first calls and ends: what `guard` runs in a child.

    python -m outrider.backends.gguf.first_call MODEL.gguf '{"gpu_layers": -1}'

Exit status 0 when all is well, 1 when the model cannot be loaded, WRONG when a call over many tokens gives
other logits than calls over few; a broken build kills it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from outrider.backends.gguf.guard import WRONG
from outrider.backends.gguf.model import GgufModel
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.gguf.weights import Weights
from outrider.core.data import Logits, Span
from outrider.core.errors import OutriderError

_PARTS = (8, 64)
"""Tokens per call in which the same text is read. They run through different kernels: ik_llama.cpp 0.1.5 has
ones for 32 rows and more that are wrong for Q4_1 and Q5_1."""
_COMPARED_ROWS = 8
_MIN_CORRELATION = 0.9
"""between the logits of the two. Rounding leaves 0.998 and more, wrong kernels left 0.57 to 0.68."""


def main(path: str, options: str) -> int:
    """Load `path` under the options (JSON), read one text in small calls and in a large one, and compare."""
    try:
        model = Weights(Path(path), LoadOptions(**json.loads(options))).open(2 * max(_PARTS))
        model.decode([Span(0, (_text(model)[0],), 0, 1)])
        small, large = (_read(model, part) for part in _PARTS)
    except OutriderError:
        return 1
    return 0 if _agree(small, large) else WRONG


def _text(model: GgufModel) -> tuple[int, ...]:
    size = model.vocabulary.size
    return tuple(int(token) for token in np.random.default_rng(1).integers(size // 8, size, max(_PARTS)))


def _read(model: GgufModel, part: int) -> Logits:
    """The logits of the text's last rows, read in calls over so many tokens."""
    model.truncate(0, 0)
    text = _text(model)
    for start in range(0, len(text), part):
        [rows] = model.decode([Span(0, text[start : start + part], start, _COMPARED_ROWS)])
    return rows.copy()


def _agree(small: Logits, large: Logits) -> bool:
    """Whether they differ by rounding alone. Rows that hold no number at all are a matter of the model."""
    if not (np.isfinite(small).all() and np.isfinite(large).all()):
        return True
    return float(np.corrcoef(small.ravel(), large.ravel())[0, 1]) >= _MIN_CORRELATION


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
