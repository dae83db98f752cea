"""Target calls per token of forced tool calls, in every syntax that models write them in.

    python benchmarks/structured/native_calls.py --out benchmarks/structured/results/native_calls.jsonl

Counts alone, greedily: what the grammar forces is drafted whatever it costs, nothing else is, and every
answer has a session of its own. The model need not know a syntax: the grammar writes it.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

from outrider import FixedPolicy, Grammar, Pair, SamplingParams, read_out
from outrider.formats import ToolSpec
from outrider.formats.grammar import Rules, answer_grammar
from outrider.formats.syntaxes import SYNTAXES, CallSyntax

TOOL = ToolSpec(
    "get_weather_forecast",
    parameters={
        "type": "object",
        "properties": {
            "city": {"enum": ["Oslo", "Rome", "Lima"]},
            "unit": {"enum": ["celsius", "fahrenheit"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "note": {"type": "string", "maxLength": 12},
        },
        "required": ["city", "unit", "days"],
    },
)
QUESTIONS = (
    "How warm will it be in Oslo?",
    "Give me the forecast for Rome in fahrenheit for three days.",
    "Will it rain in Lima tomorrow?",
)
GREEDY = SamplingParams(temperature=0)


def grammar_of(syntax: CallSyntax, fast_forward: Any) -> Grammar:
    """One call of the tool, every marker spelled as text."""
    rules = Rules({})
    calls = syntax.calls(rules, [TOOL], 1, free=False)
    source = answer_grammar(rules, calls, None, reasoning=None, opened=False)
    return Grammar("lark", source, fast_forward=fast_forward)


def main() -> None:
    """Write a row for each syntax, question and way to take forced text."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--model", help="a GGUF file; the embedded default")
    options.add_argument("--out", type=Path, required=True)
    given = options.parse_args()
    policy = FixedPolicy(draft_max=16, p_min=0)
    with given.out.open("w", encoding="utf-8") as out:
        for syntax, mode, question in product(SYNTAXES, ("exact", "canonical"), QUESTIONS):
            pair = Pair.load(given.model, "none")
            with pair.open(1024, lookup=False, policy=policy, bitwise=False) as session:
                asked = [{"role": "user", "content": question}]
                limit = grammar_of(syntax, mode)
                done = session.generate(asked, grammar=limit, sampling=GREEDY, max_tokens=256)
            calls = read_out(done).target_calls
            row: dict[str, Any] = {"syntax": syntax.name, "fast_forward": mode, "question": question}
            row |= {"target_calls": calls, "tokens": len(done.tokens), "text": done.text}
            out.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
