"""How often is the target called, is the text the same, and what does the engine itself cost?

    python benchmarks/engine/calls.py TARGET.gguf DRAFT.gguf PROMPTS.jsonl... --out results.jsonl

Every prompt is decoded greedily with and without speculation, in turn, each from a cold KV cache.
The counts do not depend on the machine. Prompts are JSON lines with `id`, `category` and `turns`, of
which the first is used; PROMPTS.jsonl:2 takes the first two of each category.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import argument_parser, describe, run_program
from outrider import FixedPolicy, Pair, Request, SamplingParams, compare


def read_prompts(files: Iterable[str]) -> list[dict[str, Any]]:
    prompts = []
    for file in files:
        path, _, per_category = file.partition(":")
        taken: dict[str, int] = defaultdict(int)
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            prompt = json.loads(line)
            taken[prompt["category"]] += 1
            if not per_category or taken[prompt["category"]] <= int(per_category):
                prompts.append(prompt)
    return prompts


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    policy = FixedPolicy(arguments.draft_max, 0, arguments.p_min, arguments.hand_over)
    pair = Pair.load(arguments.target, arguments.draft)
    rows = []
    with pair.open(4096, policy=policy) as session, arguments.out.open("w", encoding="utf-8") as file:
        head = describe(arguments.target, arguments.draft)
        head |= {"policy": asdict(policy), "tokens": arguments.tokens, "temperature": 0}
        file.write(json.dumps(head) + "\n")
        for prompt in read_prompts(arguments.prompts):
            tokens = session.encode([{"role": "user", "content": prompt["turns"][0]}])
            request = Request(tokens, SamplingParams(temperature=0), max_tokens=arguments.tokens)
            found = compare(session.engine, request, repetitions=1)
            row = {
                "kind": "prompt",
                "id": prompt["id"],
                "category": prompt["category"],
                "equal": found.equal,
                "divergence": asdict(found.divergence) if found.divergence else None,
                "speculative": found.speculative.as_json(),
                "plain": found.plain.as_json(),
            }
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(_line(row), flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    speculative = row["speculative"]
    equal = "equal" if row["equal"] else f"differs: {row['divergence']}"
    return (
        f"{row['id']:>6} {row['category']:<16} {speculative['tokens_per_target_call']:5.2f} tokens a call, "
        f"{own_ms_per_step(speculative):.2f} ms own time a step ({speculative['overhead']:.2%}), {equal}"
    )


def own_ms_per_step(readout: dict[str, Any]) -> float:
    """Milliseconds of a decoding step that are spent outside model calls."""
    return float(1000 * readout["overhead"] * readout["decode_s"] / readout["target_calls"])


def summarise(rows: list[dict[str, Any]]) -> None:
    """Pooled counts (all tokens / all calls) per category, and the engine's own time."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["category"]].append(row)
    groups["all"] = rows
    header = ("category", "prompts", "tokens/call", "draft/token", "own share", "equal")
    print("\n{:<18}{:>8}{:>12}{:>12}{:>10}{:>7}".format(*header))
    for category, group in sorted(groups.items(), key=lambda item: item[0] == "all"):
        runs = [row["speculative"] for row in group]
        generated = sum(run["generated_tokens"] for run in runs)
        print(
            f"{category:<18}{len(group):>8}{generated / sum(run['target_calls'] for run in runs):>12.2f}"
            f"{sum(run['draft_calls'] for run in runs) / generated:>12.2f}"
            f"{median(run['overhead'] for run in runs):>10.2%}{sum(row['equal'] for row in group):>7}"
        )
    own = [own_ms_per_step(row["speculative"]) for row in rows]
    plain = [own_ms_per_step(row["plain"]) for row in rows]
    print(
        f"own time a step: median {median(own):.2f} ms, max {max(own):.2f} ms; plain {median(plain):.2f} ms"
    )


def main() -> None:
    parser = argument_parser(__doc__, prompts=True, tokens=120)
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--draft-max", type=int, default=8)
    parser.add_argument("--p-min", type=float, default=0.0)
    parser.add_argument("--hand-over", type=float, default=FixedPolicy().hand_over)
    summarise(measure(parser.parse_args()))


if __name__ == "__main__":
    run_program(main)
