"""What a constraint itself takes: compiling, and each question at each position of an answer.

    python benchmarks/structured/masks.py [MODEL.gguf]

No token is generated: the answer is fixed, so that only the model's vocabulary matters. Without a model it
is the embedded default's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean
from time import perf_counter

from outrider import FixedPolicy, Grammar, Session
from outrider.core.params import FastForward

SCHEMA = (Path(__file__).parent / "person.json").read_text(encoding="utf-8")
ANSWER = (
    '{"name": "Maria Keller", "age": 34, "city": "Porto", '
    '"email": "m@k.pt", "newsletter": true, "plan": "free"}'
)
ROUNDS = 5


def tools(number: int) -> str:
    """A call of one of so many tools."""
    arguments = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": f"tool_{i}"}, "arguments": arguments},
            "required": ["name", "arguments"],
        }
        for i in range(number)
    ]
    return json.dumps({"anyOf": calls})


def timed(question: Callable[[], object]) -> float:
    before = perf_counter()
    question()
    return perf_counter() - before


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else None
    with Session.load(path, policy=FixedPolicy()) as session:
        vocabulary = session.target.vocabulary
        tokens = vocabulary.tokenize(ANSWER, add_special=False)
        first_s = timed(lambda: session.compile(Grammar("json_schema", SCHEMA)))
        tools_s = timed(lambda: session.compile(Grammar("json_schema", tools(128))))
        print(f"{vocabulary.size} tokens; first grammar {first_s:.2f} s, 128 tools {1000 * tools_s:.0f} ms")
        modes: tuple[FastForward, ...] = ("off", "exact")
        for mode in modes:
            compiled = session.compile(Grammar("json_schema", SCHEMA, fast_forward=mode))
            spent: dict[str, list[float]] = {name: [] for name in ("allowed", "forced", "accept", "complete")}
            for _ in range(ROUNDS):
                constraint = compiled.start()
                for token in tokens:
                    spent["allowed"].append(timed(partial(constraint.allowed, ())))
                    spent["forced"].append(timed(partial(constraint.forced, ())))
                    spent["accept"].append(timed(partial(constraint.accept, (token,))))
                    spent["complete"].append(timed(partial(getattr, constraint, "is_complete")))
            parts = ", ".join(f"{name} {1e6 * mean(times):.0f}" for name, times in spent.items())
            total = sum(map(mean, spent.values()))
            print(f"{mode}: {1e6 * total:.0f} us a position ({parts})")


if __name__ == "__main__":
    main()
