"""What a draft model would offer along a target's own answers, for replays at any costs. No clock.

    python benchmarks/policy/record.py PROMPTS.jsonl… --out recordings.jsonl [--model TARGET.gguf] \
        [--draft DRAFT.gguf]
    python benchmarks/policy/replay.py recordings.jsonl --costs costs.json

Greedy answers, decoded plainly; without `--model` those of the embedded default, with its own draft.
Prompts are rows with `turns` (the first is taken) or with `messages`. The head names library, machine
and files. Prompts that are there are not answered again.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Row, append, argument_parser, describe, read_rows, resume, run_program
from outrider import Pair, Session, SessionOptions
from outrider.backends.gguf.options import LoadOptions
from outrider.core.params import SamplingParams
from outrider.drafters.model import ModelDrafter
from outrider.lab.recording import Recording, record_offers
from outrider.models.reference import DEFAULT_DRAFT
from policy.recorded import as_json

SAME = ("models", "tokens", "context")
"""What all rows of a file share."""


def main() -> None:
    parser = argument_parser(__doc__, tokens=128, threads=2, context=4096)
    parser.add_argument("--model", type=Path)
    parser.add_argument("prompts", nargs="+", type=Path)
    parser.add_argument("--draft", default=DEFAULT_DRAFT)
    arguments = parser.parse_args()
    prompts = [row for path in arguments.prompts for row in read_rows(path)]
    options = LoadOptions(threads=arguments.threads)
    pair = Pair.load(arguments.model, arguments.draft, options=options)
    with Session.open(pair, SessionOptions(arguments.context)) as session:
        head = describe(*(weights.path for weights in pair.models))
        head |= {"tokens": arguments.tokens, "context": arguments.context, "notices": list(pair.notices)}
        done = {row["id"] for row in resume(arguments.out, head, SAME)}
        for prompt in prompts:
            if str(prompt["id"]) not in done:
                append(arguments.out, as_json(record(session, prompt, arguments.tokens)))


def record(session: Session, prompt: Row, num_tokens: int) -> Recording:
    """One answer, and what the draft offers after each of its prefixes."""
    [drafter] = [d for d in session.engine.drafters if isinstance(d, ModelDrafter)]
    messages = prompt.get("messages") or [{"role": "user", "content": prompt["turns"][0]}]
    tokens = tuple(session.encode(messages))
    session.engine.reset()
    answer = session.generate(
        tokens, max_tokens=num_tokens, sampling=SamplingParams(temperature=0), speculate=False
    )
    session.engine.reset()
    offers = record_offers(drafter.model, drafter.alignment, tokens, answer.tokens)
    return Recording(
        str(prompt["id"]),
        prompt["category"],
        tokens,
        answer.tokens,
        answer.finish_reason,
        {drafter.name: offers},
    )


if __name__ == "__main__":
    run_program(main)
