"""A program that loads a model, makes its first calls and ends: what `guard` runs in a child.

    python -m outrider.backends.gguf.first_call MODEL.gguf '{"gpu_layers": -1}'

Exit status 0 when all is well, 1 when the model cannot be loaded; a broken build kills it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from outrider.backends.gguf.options import LoadOptions
from outrider.backends.gguf.weights import Weights
from outrider.core.data import Span
from outrider.core.errors import OutriderError

_SIZES = (1, 4, 48)
"""Tokens per call: one, a draft, a prompt. They run through different kernels."""


def main(path: str, options: str) -> int:
    """Load `path` under the options (JSON) and call it once for each size."""
    try:
        model = Weights(Path(path), LoadOptions(**json.loads(options))).open(128)
        for size in _SIZES:
            model.decode([Span(0, (1,) * size, model.length(0), 1)])
    except OutriderError:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
