"""How much does the batch shape alone change what a model says? No drafter takes part.

    python benchmarks/engine/rounding.py MODEL.gguf PROMPTS.jsonl --out rounding.jsonl

The greedy answer to each prompt is evaluated token by token, as plain decoding does, and again in calls
of 2, 4 and 9 tokens. For every position: by how much does the gap between the two most likely tokens
change, and does another one come out on top?
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import argument_parser, describe, run_program
from outrider import Model, Pair, Request, SamplingParams, Span
from outrider.core.data import Logits

SIZES = (2, 4, 9)


def evaluate(model: Model, prompt: tuple[int, ...], answer: tuple[int, ...], size: int) -> Logits:
    """The logits after the prompt and after each token of the answer, `size` tokens a call."""
    model.truncate(0, 0)
    model.decode([Span(0, prompt[:-1], 0, 0)])
    tokens = (prompt[-1], *answer)
    parts = [tokens[i : i + size] for i in range(0, len(tokens), size)]
    return np.concatenate([model.decode([Span(0, p, model.length(0), len(p))])[0].copy() for p in parts])


def compare_sizes(model: Model, prompt: tuple[int, ...], answer: tuple[int, ...]) -> list[dict[str, Any]]:
    alone = evaluate(model, prompt, answer, 1)
    positions = np.arange(len(alone))
    second, best = np.argpartition(alone, -2, axis=1)[:, -2:].T
    gap = alone[positions, best] - alone[positions, second]
    rows = []
    for size in SIZES:
        batched = evaluate(model, prompt, answer, size)
        changes = np.abs(batched[positions, best] - batched[positions, second] - gap)
        flipped = batched.argmax(axis=1) != best
        rows.append(
            {
                "kind": "rounding",
                "size": size,
                "flips": int(flipped.sum()),
                "flip_margins": gap[flipped].round(4).tolist(),
                "margins": gap.round(4).tolist(),
                "gap_changes": changes.round(4).tolist(),
            }
        )
    return rows


def main() -> None:
    parser = argument_parser(__doc__, tokens=71, every=3)
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = [describe(arguments.model)]
    lines = arguments.prompts.read_text(encoding="utf-8").splitlines()[:: arguments.every]
    with Pair.load(arguments.model).open(2048) as session:
        for line in lines:
            prompt = session.encode([{"role": "user", "content": json.loads(line)["turns"][0]}])
            request = Request(
                prompt, SamplingParams(temperature=0), max_tokens=arguments.tokens, speculate=False
            )
            answer = session.engine.generate(request).tokens
            session.engine.reset()
            rows += compare_sizes(session.target, prompt, answer)
            session.target.truncate(0, 0)
    for size in SIZES:
        found = [row for row in rows if row.get("size") == size]
        changes = np.concatenate([row["gap_changes"] for row in found])
        print(
            f"{size} tokens a call: the top-2 gap changes by {np.median(changes):.3f} in the median, "
            f"{np.quantile(changes, 0.95):.3f} at p95, {changes.max():.3f} at most; "
            f"{sum(row['flips'] for row in found)} of {len(changes)} argmaxes flip"
        )
    with arguments.out.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    run_program(main)
