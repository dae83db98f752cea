"""Does memory grow while generating, and what does a draft add?

    python benchmarks/engine/memory.py TARGET.gguf DRAFT.gguf --out memory.jsonl

Resident memory (weights are mapped, so pages of the files count once touched) after loading and
every so many tokens. The KV cache is allocated when the context is opened and touched as it fills,
so its size is printed beside the growth.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import argument_parser, describe, run_program
from outrider import Engine, FixedPolicy, Pair, Request, SamplingParams

PROMPT = "List the numbers from one to one thousand in words, one on each line, and comment on every tenth."


def resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def run(pair: Pair, num_tokens: int, every: int, *, draft: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def note(event: str, tokens: int) -> None:
        rows.append(
            {
                "kind": "memory",
                "draft": draft,
                "event": event,
                "tokens": tokens,
                "resident_mib": resident_mib(),
            }
        )
        print(rows[-1], flush=True)

    with pair.open(num_tokens + 256, policy=FixedPolicy(8, 0, 0.3)) as session:
        engine: Engine = session.engine
        note("opened", 0)
        prompt = session.encode([{"role": "user", "content": PROMPT}])
        request = Request(
            prompt, SamplingParams(temperature=0.8, seed=1), max_tokens=num_tokens, ignore_end=True
        )
        generated, next_note = 0, every
        for update in engine.stream(request):
            generated += len(update.record.tokens)
            if generated >= next_note:
                note("generating", generated)
                next_note += every
        note("ended", generated)
    return rows


def main() -> None:
    parser = argument_parser(__doc__, tokens=2000, every=200)
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    arguments = parser.parse_args()
    rows = [describe(arguments.target, arguments.draft)]
    rows += run(Pair.load(arguments.target), arguments.tokens, arguments.every, draft=False)
    rows += run(Pair.load(arguments.target, arguments.draft), arguments.tokens, arguments.every, draft=True)
    with arguments.out.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    run_program(main)
