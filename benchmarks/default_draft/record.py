"""What the draft would offer along the default's own answers, for replays at any costs.

    python benchmarks/default_draft/record.py --prompts heldout.jsonl --out recordings.jsonl
    outrider costs --costs costs.json
    python benchmarks/policy/replay.py recordings.jsonl --costs costs.json

Greedy answers, decoded plainly; `--prompts` as heldout.py writes them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from outrider.backends.gguf import LoadOptions
from outrider.core.params import SamplingParams
from outrider.drafters.model import ModelDrafter
from outrider.models import DEFAULT_DRAFT, embedded_default
from outrider.replay import Recording, record_offers, write_recordings
from outrider.session import Pair, Session


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--draft", default=DEFAULT_DRAFT)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    prompts = [json.loads(line) for line in arguments.prompts.read_text(encoding="utf-8").splitlines()]
    pair = Pair.load(embedded_default(), arguments.draft, options=LoadOptions(threads=arguments.threads))
    with pair.open(2048) as session:
        [drafter] = [d for d in session.engine.drafters if isinstance(d, ModelDrafter)]
        recordings = [
            record(session, drafter, prompt["id"], prompt["category"], prompt["messages"], arguments.tokens)
            for prompt in prompts
        ]
    write_recordings(arguments.out, recordings)
    print(f"{len(recordings)} recordings of {sum(len(r.tokens) for r in recordings)} tokens")


def record(
    session: Session,
    drafter: ModelDrafter,
    name: str,
    category: str,
    messages: list[dict[str, str]],
    num_tokens: int,
) -> Recording:
    """One answer, and what the draft offers behind each of its prefixes."""
    session.engine.reset()
    prompt = session.encode(messages)
    greedy = SamplingParams(temperature=0)
    answer = session.generate(prompt, max_tokens=num_tokens, sampling=greedy, speculate=False)
    offers = record_offers(drafter.model, drafter.alignment, prompt, answer.tokens)
    return Recording(
        name, category, tuple(prompt), answer.tokens, answer.finish_reason, {drafter.name: offers}
    )


if __name__ == "__main__":
    main()
