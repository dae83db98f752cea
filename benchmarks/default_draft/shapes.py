"""What a step of a draft costs, by its shape: random weights, timed alone and between calls of the target.

    python benchmarks/default_draft/shapes.py --out benchmarks/default_draft/results/shapes.jsonl

Every draft has the embedded default's width. "Alone": one call after the other. "First" and "fourth": that
step after a call of the target over four tokens, which has driven the draft's weights out of the near caches.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Row, append, argument_parser, describe, resume, run_program
from outrider.backends.gguf import GgufModel, LoadOptions, Weights
from outrider.core.data import Span
from outrider.lab.distill.checkpoint import Checkpoint, read_gguf
from outrider.lab.distill.export import Provenance, write_gguf
from outrider.lab.distill.starting import random_weights
from outrider.models.embedded import embedded_default
from outrider.models.vocab.subset import Subset, choose_subset

SHAPES = [
    (1, 1536, 8192, "Q4_0", "Q8_0"),
    (2, 1536, 8192, "Q4_0", "Q8_0"),
    (3, 1536, 8192, "Q4_0", "Q8_0"),
    (4, 1536, 8192, "Q4_0", "Q8_0"),
    (6, 1536, 8192, "Q4_0", "Q8_0"),
    (4, 768, 8192, "Q4_0", "Q8_0"),
    (4, 1536, 4096, "Q4_0", "Q8_0"),
    (4, 1536, 8192, "Q8_0", "Q8_0"),
    (4, 1536, 8192, "Q4_0", "Q4_0"),
    (4, 1536, 12288, "Q4_0", "Q4_0"),
    (4, 1536, 12288, "Q4_0", "Q5_0"),
    (4, 1536, 16384, "Q4_0", "Q4_0"),
]
"""layers, feed-forward units, tokens, quantization of the layers and of the embedding"""

PROMPT_TOKENS = 200


def main() -> None:
    parser = argument_parser(__doc__, threads=2, rounds=60)
    arguments = parser.parse_args()
    path = embedded_default()
    options = LoadOptions(threads=arguments.threads)
    resume(arguments.out, describe(path) | {"threads": arguments.threads}, ("threads", "cpu"))
    checkpoint, weights = read_gguf(path), Weights(path, options)
    target = weights.open(1024)
    with tempfile.TemporaryDirectory() as folder:
        for shape in SHAPES:
            file = Path(folder) / "draft.gguf"
            write_draft(checkpoint, weights, file, *shape)
            append(arguments.out, row_of(shape, file, target, options, arguments.rounds))
            file.unlink()


def write_draft(
    like: Checkpoint, target: Weights, file: Path, layers: int, wide: int, tokens: int, kind: str, rows: str
) -> None:
    """A file of this shape with random weights."""
    vocabulary = target.vocabulary
    subset: Subset = choose_subset(vocabulary, np.zeros(vocabulary.size, dtype=np.int64), tokens)
    shape = replace(like.shape, layers=layers, feed_forward=wide, vocabulary=subset.size)
    write_gguf(
        random_weights(like, shape, 0), file, subset=subset, target=vocabulary,
        provenance=Provenance("random", "", "none", tokens=0, steps=0, seed=0, version=""),
        quantization=kind, embedding_quantization=rows,
    )  # fmt: skip


def row_of(
    shape: tuple[int, int, int, str, str],
    file: Path,
    target: GgufModel,
    options: LoadOptions,
    rounds: int,
) -> Row:
    """Medians in ms; the target's own calls were made in the same rounds."""
    weights = Weights(file, options)
    draft = weights.open(1024)
    try:
        for model in (target, draft):
            model.truncate(0, 0)
            decode(model, PROMPT_TOKENS, 1)
        alone = [step(draft) for _ in range(rounds)]
        plain, check, first, fourth = [], [], [], []
        for _ in range(rounds):
            plain.append(step(target))
            check.append(decode(target, 4, 4))
            steps = [step(draft) for _ in range(4)]
            first.append(steps[0])
            fourth.append(steps[3])
            for model in (target, draft):
                model.truncate(0, PROMPT_TOKENS)
    finally:
        weights.close()
    layers, wide, tokens, kind, rows = shape
    return {
        "kind": "shape", "layers": layers, "feed_forward": wide, "tokens": tokens, "quantization": kind,
        "embedding": rows, "file_bytes": file.stat().st_size, "rounds": rounds,
        "alone_ms": median(alone), "first_ms": median(first), "fourth_ms": median(fourth),
        "target_ms": median(plain), "target_four_ms": median(check),
    }  # fmt: skip


def step(model: GgufModel) -> float:
    """Milliseconds of a call over one token."""
    return decode(model, 1, 1)


def decode(model: GgufModel, num_tokens: int, rows: int) -> float:
    """Milliseconds of a call after what the model holds."""
    start = model.length(0)
    tokens = tuple(1000 + (start + i) % 3000 for i in range(num_tokens))
    before = perf_counter()
    model.decode([Span(0, tokens, start, rows)])
    return (perf_counter() - before) * 1e3


if __name__ == "__main__":
    run_program(main)
