"""What a block costs on files of a real width: the block's call, reading a token of the target's states, and
the target's call over 1 to 32 tokens. Random weights, Q4_0: no real file was at hand.

    python benchmarks/block/costs.py --out benchmarks/block/costs.jsonl [--width 1024 --layers 8]

The target is of Llama's kind with 32,000 tokens, the drafter a DFlash one of two layers on its embeddings and
output, with blocks of 8. The calls of both, and those of the target while its states are kept, are timed in
turn, round after round in shuffled order: where other programs run, the ratios of their medians tell more
than times. The curves are in the rows (as `outrider costs` writes them).
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from gguf import GGMLQuantizationType

from harness import append, argument_parser, describe, run_program, table
from outrider.backends.gguf.head_model import HeadWeights
from outrider.backends.gguf.model import Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.tuning import measure_side_by_side
from outrider.costs import CallCosts
from outrider.models.gguf import read_card
from outrider.models.heads import read_head
from tiny import Sizes
from tiny_gguf import MERGES, vocabulary, write_tiny

TOKENS = 32_000
BLOCK = 8
SIZES = (1, 1, 1, 2, 4, 8, 12, 16, 32)
CONTEXT = 512


def write(folder: Path, width: int, layers: int) -> tuple[Path, Path]:
    """The target and its drafter."""
    made: dict[str, Any] = {
        "sizes": Sizes.wide(width),
        "padding": TOKENS - len(vocabulary(MERGES)),
        "context_length": 4096,
        "quantized": GGMLQuantizationType.Q4_0,
    }
    target = write_tiny(folder / "target.gguf", layers=layers, **made)
    draft = write_tiny(
        folder / "dflash.gguf",
        arch="dflash",
        left_out=("token_embd.weight", "output.weight"),
        metadata={"target_layers": [1, layers // 2, layers - 1], "block_size": BLOCK},
        **made,
    )
    return target, draft


def curves(target: Path, draft: Path, seconds: float) -> dict[str, CallCosts]:
    options = LoadOptions(backend="llama.cpp")
    with ExitStack() as stack:
        weights = stack.enter_context(closing(Weights(target, options)))
        head = stack.enter_context(
            closing(HeadWeights(read_head(read_card(draft), read_card(target)), options))
        )
        plain, keeping, beside = (stack.enter_context(closing(weights.open(CONTEXT))) for _ in range(3))
        block = stack.enter_context(closing(head.open_beside(beside, CONTEXT + BLOCK)))
        keeping.keep_hidden_states(head.head.target_layers)
        found = measure_side_by_side((plain, keeping, block), seconds=seconds, sizes=SIZES)
    return dict(zip(("target", "target, states kept", "block"), found, strict=True))


def main() -> None:
    parser = argument_parser(__doc__, width=1024, layers=8, seconds=60)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        target, draft = write(Path(folder), given.width, given.layers)
        append(given.out, describe(target, draft) | {"width": given.width, "layers": given.layers})
        found = curves(target, draft, given.seconds)
    for of, costs in found.items():
        append(given.out, {"kind": "curve", "of": of, "width": given.width, **costs.as_json()})
    plain_s = found["target"].call_s(1, context=0)
    sizes = sorted({*SIZES})
    rows = [
        [
            of,
            f"{1000 * costs.call_s(1, context=0):.2f}",
            *(f"{costs.call_s(n, context=0) / plain_s:.2f}" for n in sizes),
        ]
        for of, costs in found.items()
    ]
    print(*table(["call", "ms of one token", *map(str, sizes)], rows), sep="\n")


if __name__ == "__main__":
    run_program(main)
