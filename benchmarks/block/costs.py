"""What a block costs on files of a real width: the block's call, reading a token of the target's states, and
the target's call over 1 to 16 tokens. Random weights, Q4_0: no real file was at hand.

    python benchmarks/block/costs.py --out benchmarks/block/costs.jsonl [--width 1024 --layers 8]

The target is of Llama's kind with 32,000 tokens, the drafter a DFlash one of two layers on its embeddings and
output, with blocks of 16. The curves of both are in the rows (as `outrider costs` writes them), with those of
the target while its states are kept.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from gguf import GGMLQuantizationType

from harness import append, argument_parser, describe, run_program, table
from outrider.backends.gguf.head_model import HeadWeights
from outrider.backends.gguf.model import Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.costs import CallCosts
from outrider.costs.calibrate import calibrate
from outrider.models.gguf import read_card
from outrider.models.heads import read_head
from tiny.sizes import Sizes
from tiny_gguf import MERGES, vocabulary, write_tiny

TOKENS = 32_000
BLOCK = 16


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


def curves(target: Path, draft: Path, seconds: float) -> Iterator[tuple[str, CallCosts]]:
    options = LoadOptions(backend="llama.cpp")
    with closing(Weights(target, options)) as weights:
        with closing(weights.open(2048)) as model:
            yield "target", calibrate(model, seconds=seconds)
        head = HeadWeights(read_head(read_card(draft), read_card(target)), options)
        with (
            closing(head),
            closing(weights.open(2048)) as model,
            closing(head.open_beside(model, 2112)) as block,
        ):
            yield "block", calibrate(block, seconds=seconds, rows="last")
            model.keep_hidden_states(head.head.target_layers)
            yield "target, states kept", calibrate(model, seconds=seconds)


def main() -> None:
    parser = argument_parser(__doc__, width=1024, layers=8, seconds=30)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        target, draft = write(Path(folder), given.width, given.layers)
        append(given.out, describe(target, draft) | {"width": given.width, "layers": given.layers})
        found = dict(curves(target, draft, given.seconds))
    for of, costs in found.items():
        append(given.out, {"kind": "curve", "of": of, "width": given.width, **costs.as_json()})
    plain_s = found["target"].call_s(1, context=0)
    sizes = (1, 2, 4, 8, 12, 16)
    rows = [
        [
            of,
            f"{1000 * costs.call_s(1, context=0):.2f}",
            *(f"{costs.call_s(n, context=0) / plain_s:.2f}" for n in sizes),
            f"{1000 * (costs.prefill_token_s or 0):.3f}",
        ]
        for of, costs in found.items()
    ]
    header = ["call", "ms of one token", *(f"{n}" for n in sizes), "ms of a prompt's token"]
    print("\n".join(table(header, rows)))


if __name__ == "__main__":
    run_program(main)
