"""How often does a greedy text part from plain decoding's, with and without --strict, and what does it cost?

    python benchmarks/exactness/strict.py TARGET PROMPTS.jsonl[:EVERY] … [--draft DRAFT] --out strict.jsonl

Each prompt is decoded plainly, then with drafts under each margin below which a token is decided by a
call of its own (0: off).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from machine import describe
from outrider import Completion, Engine, FixedPolicy, Pair, Request, SamplingParams, Verification, read_out
from workload import prompts


def measure(engine: Engine, request: Request, margins: list[float]) -> list[dict[str, Any]]:
    engine.reset()
    plain = engine.generate(replace(request, speculate=False))
    rows = [row_of(plain, plain, None)]
    for margin in margins:
        engine.reset()
        strict = replace(request, verification=Verification(strict_margin=margin))
        rows.append(row_of(engine.generate(strict), plain, margin))
    return rows


def row_of(run: Completion, plain: Completion, margin: float | None) -> dict[str, Any]:
    pairs = zip(run.tokens, plain.tokens, strict=False)
    readout = read_out(run)
    return {
        "kind": "plain" if margin is None else "strict",
        "margin": margin,
        "parts_at": next((i for i, (a, b) in enumerate(pairs) if a != b), None),
        "generated": readout.generated_tokens,
        "target_calls": readout.target_calls,
        "decode_s": round(readout.decode_s, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path)
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--margins", type=float, nargs="+", default=[0, 0.25, 1.0])
    arguments = parser.parse_args()
    models = [arguments.target, *([arguments.draft] if arguments.draft else [])]
    rows: list[dict[str, Any]] = [describe(*models)]
    policy = FixedPolicy(8, p_min=0, hand_over=0)
    with Pair.load(arguments.target, arguments.draft).open(2048, policy=policy) as session:
        for number, text in enumerate(prompts(arguments.prompts)):
            prompt = session.encode([{"role": "user", "content": text}])
            request = Request(prompt, SamplingParams(temperature=0), arguments.tokens, ignore_end=True)
            found = measure(session.engine, request, arguments.margins)
            rows += [{"prompt": number, **row} for row in found]
            print(f"prompt {number} done", file=sys.stderr)
            arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for margin in (None, *arguments.margins):
        own = [r for r in rows[1:] if r["margin"] == margin]
        print(
            f"margin {margin}: {sum(r['parts_at'] is not None for r in own)} of {len(own)} texts part; "
            f"{sum(r['generated'] for r in own) / sum(r['target_calls'] for r in own):.2f} tokens per call, "
            f"{sum(r['decode_s'] for r in own):.1f} s"
        )


if __name__ == "__main__":
    main()
