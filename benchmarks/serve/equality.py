"""Are the tokens of many clients at once those of one at a time? Greedy, through the server's own worker.

    python benchmarks/serve/equality.py MODEL.gguf --out equality.jsonl [--draft DRAFT.gguf] [--clients 8]

Every question is asked alone (cold, nobody else), then all of a batch at the same moment. Where two answers
part, the target's plain logits say by how much the one token leads the other: rounding differs with a call's
shape, so that a near-tie may go either way. To tell that from an error of speculation, the same is done with
drafting switched off: what parts there parts by the company alone.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import append, describe
from outrider import Session
from outrider.core.data import Completion, Request, Update
from outrider.core.errors import OutriderError
from outrider.core.params import SamplingParams
from outrider.lab.comparison import find_divergence
from outrider.server.worker import Outcome, Worker
from outrider.session import Pair
from serve.questions import load_questions


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def requests_of(session: Session, arguments: argparse.Namespace) -> list[Request]:
    """Questions without a schema, of every group in turn."""
    questions = [question for question in load_questions() if question.schema is None]
    random.Random(arguments.seed).shuffle(questions)
    return [
        Request(
            session.encode(question.messages),
            SamplingParams(temperature=0),
            max_tokens=arguments.tokens,
        )
        for question in questions[: arguments.clients * arguments.batches]
    ]


async def _complete(worker: Worker, request: Request) -> Completion:
    outcomes: asyncio.Queue[Outcome] = asyncio.Queue()
    await worker.submit(request, lambda _, outcome: outcomes.put_nowait(outcome))
    while isinstance(outcome := await outcomes.get(), Update):
        pass
    if isinstance(outcome, OutriderError):
        raise outcome
    return outcome


async def together(worker: Worker, requests: Sequence[Request]) -> list[Completion]:
    """All at the same moment."""
    return await asyncio.gather(*(_complete(worker, request) for request in requests))


def compare(session: Session, batch: Sequence[Request], *, drafted: bool) -> list[dict[str, Any]]:
    """One row for each request: whether its answer in company is the one that it gets alone, and where not,
    by how much the token that it got alone led the other."""
    batch = [replace(request, speculate=drafted) for request in batch]
    alone = []
    for request in batch:
        session.engine.reset()
        alone.append(session.engine.generate(request))
    session.engine.reset()
    worker = Worker(session)
    worker.start()
    shared = asyncio.run(together(worker, batch))
    worker.stop()
    rows = []
    for request, mine, ours in zip(batch, alone, shared, strict=True):
        session.engine.reset()
        found = find_divergence(session.target, request, mine, ours)
        rows.append(
            {
                "drafted": drafted,
                "prompt_tokens": len(request.prompt),
                "tokens": len(mine.tokens),
                "most_sequences": max(record.num_sequences for record in ours.records),
                "accepted": sum(record.num_accepted for record in ours.records),
                "equal": found is None and len(mine.tokens) == len(ours.tokens),
                "position": found.position if found else None,
                "margin_logits": found.margin if found else None,
            }
        )
    return rows


def main() -> None:
    arguments = parse()
    pair = Pair.load(arguments.model, arguments.draft)
    with pair.open(2048, max_running=arguments.clients) as session:
        head = {name: value for name, value in vars(arguments).items() if isinstance(value, int)}
        models = [path for path in (arguments.model, arguments.draft) if path]
        append(arguments.out, describe(*models) | head)
        requests = requests_of(session, arguments)
        rows = []
        for start in range(0, len(requests), arguments.clients):
            batch = requests[start : start + arguments.clients]
            for drafted in (False, True):
                for row in compare(session, batch, drafted=drafted):
                    append(arguments.out, row)
                    rows.append(row)
    for drafted in (False, True):
        some = [row for row in rows if row["drafted"] is drafted]
        parted = sorted(abs(row["margin_logits"] or 0.0) for row in some if not row["equal"])
        name = "with drafts" if drafted else "plain"
        print(f"{name}: {len(some) - len(parted)} of {len(some)} equal; margins {parted}")


if __name__ == "__main__":
    main()
