"""Are texts with drafts those without, on tiny models of every kind? Counts alone: they hold on any machine.

    python benchmarks/hybrid/equal.py --out equal.jsonl

For each kind of model of the tests, in llama-cpp-python: 100 greedy answers of 100 tokens, one at a time and
four at once, drafted by lookup and, where there is one, a head: the model's own, or one of a file (--files:
of these kinds alone). Drafts have up to 4 tokens of any confidence, so that many are rejected. A row has the
answers that differ from plain decoding of the same library, and how many of them differ first at a near-tie:
within `NEAR` of the spread of that place's logits. With --schema the answers are JSON of a schema, so that
forced text is drafted too.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from engines import run as run_together
from harness import Row, append, argument_parser, describe, read_rows, resume, run_program
from head_files import EVEN, with_good_head, write_eagle
from kinds import KINDS, Kind
from outrider.backends.gguf import LoadOptions, Weights
from outrider.core.data import Completion, Grammar, Request, Span
from outrider.core.params import SamplingParams
from outrider.policy import FixedPolicy
from outrider.policy.forced import FORCED
from outrider.session import Session
from outrider.session.pair import Pair
from tiny_gguf import write_tiny

HEAD_FILES: dict[str, tuple[Kind, Callable[[Path], Path]]] = {
    "dense, EAGLE-3": (KINDS["dense"], write_eagle),
    "dense, EAGLE-3 for half the tokens": (KINDS["dense"], partial(write_eagle, drafted=EVEN)),
    "delta net, EAGLE-3": (KINDS["delta net"], partial(write_eagle, layers=(0, 2, 4))),
    "delta net, MTP file": (KINDS["delta net"], partial(with_good_head, arch="qwen35", part="heads")),
    "balanced experts, MTP file": (
        KINDS["balanced experts"],
        partial(with_good_head, arch="glm4moe", part="heads"),
    ),
}
"""Kinds of model with heads in a file of their own, and what writes that."""
NEAR = 1e-3
CONTEXT, PROMPT_TOKENS, ANSWER_TOKENS = 160, 40, 100

SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "river": {"type": "string", "maxLength": 12, "pattern": "^[a-z ]*$"},
        "the road": {"enum": ["there and back", "there and on"]},
        "numbers": {"type": "array", "items": {"enum": [1, 12, 123]}, "minItems": 2, "maxItems": 4},
    },
    "required": ["colour", "river", "the road", "numbers"],
    "additionalProperties": False,
}


def main() -> None:
    parser = argument_parser(__doc__, answers=100, seed=1)
    parser.add_argument("--schema", action="store_true", help="answers of a schema")
    parser.add_argument("--files", action="store_true", help="heads in files of their own")
    arguments = parser.parse_args()
    resume(arguments.out, describe(), [])
    done = {
        (row["model"], row["sequences"])
        for row in read_rows(arguments.out)
        if row["kind"] == "equality" and row.get("schema", False) == arguments.schema
    }
    rng = random.Random(arguments.seed)
    grammar = Grammar("json_schema", json.dumps(SCHEMA)) if arguments.schema else None
    requests = [_request(rng, grammar) for _ in range(arguments.answers)]
    with TemporaryDirectory() as folder:
        whole = {name: (kind, None) for name, kind in KINDS.items() if kind.arch}
        kinds = HEAD_FILES if arguments.files else whole
        for (name, (kind, write_head)), sequences in product(kinds.items(), (1, 4)):
            if (name, sequences) in done:
                continue
            file = write_tiny(
                Path(folder, "it.gguf"), arch=kind.arch, mtp_layers=kind.mtp_layers, repeating=True
            )
            head = None if write_head is None else write_head(Path(folder, "head.gguf"))
            append(arguments.out, compare(file, head, name, kind, requests, sequences))


def compare(
    file: Path, head: Path | None, name: str, kind: Kind, requests: Sequence[Request], sequences: int
) -> Row:
    """The answers of one kind of model with drafts and without."""
    options = LoadOptions(
        backend="llama.cpp", threads=1, snapshots=kind.snapshots, full_window=kind.full_window
    )
    policy = FixedPolicy(draft_max=4, p_min=0.0)
    pair, found = Pair.load(file, head, options=options), list[Completion]()
    with closing(pair), pair.open(CONTEXT, policy=policy, max_running=sequences, bitwise=False) as session:
        rewind = session.target.rewind
        for start in range(0, len(requests), sequences):
            found += run_together(session.engine, *requests[start : start + sequences])
            session.engine.reset()
    weights = Weights(file, replace(options, heads=False, snapshots=0))
    plain = [Session(weights.open(CONTEXT)).engine.generate(request) for request in requests]
    differing = [
        (request, one.tokens, other.tokens)
        for request, one, other in zip(requests, found, plain, strict=True)
        if one.tokens != other.tokens
    ]
    near = sum(_is_near_tie(weights, *each) for each in differing)
    weights.close()
    drafted = [record for each in found for record in each.records if record.draft]
    return {
        "kind": "equality",
        "model": name,
        "architecture": kind.arch,
        "rewind": rewind,
        "sequences": sequences,
        "answers": len(requests),
        "differing": len(differing),
        "near_ties": near,
        "drafts": len(drafted),
        "rejected": sum(record.num_accepted < len(record.draft) for record in drafted),
        "schema": requests[0].grammar is not None,
        "forced": sum(record.draft.sources.count(FORCED) for record in drafted),
        "by_head": sum(record.draft.sources.count("draft") for record in drafted),
        "accepted": sum(record.num_accepted for record in drafted),
        "drafted": sum(len(record.draft) for record in drafted),
    }


def _request(rng: random.Random, grammar: Grammar | None) -> Request:
    prompt = tuple(rng.randrange(97, 123) for _ in range(PROMPT_TOKENS))
    greedy = SamplingParams(temperature=0)
    return Request(prompt, greedy, max_tokens=ANSWER_TOKENS, ignore_end=grammar is None, grammar=grammar)


def _is_near_tie(weights: Weights, request: Request, one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether the first two tokens that differ are as good as equally likely, in a call of its own."""
    at = next(i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    model = weights.open(CONTEXT)
    text = (*request.prompt, *one[:at])
    row = model.decode([Span(0, text, 0, 1)])[0][0]
    near = abs(row[one[at]] - row[other[at]]) < NEAR * float(np.std(row))
    model.close()
    return bool(near)


if __name__ == "__main__":
    run_program(main)
