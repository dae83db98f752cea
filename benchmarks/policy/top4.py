"""The draft model's four most likely tokens at every position of recorded answers. No clock.

    python benchmarks/policy/top4.py DRAFT.gguf RECORDINGS.jsonl… --out top4.jsonl.gz

What `features.py` and `trees.py` need and recordings do not hold. One row for each recording: `tokens` and
`probabilities`, four at each position of the answer, the most likely first, and the `entropy` of all in
nats.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Row, argument_parser, describe, run_program
from outrider.backends.gguf import LoadOptions
from outrider.core.contracts import Model
from outrider.core.data import Row as Logits
from outrider.lab.recording import Recording, read_recordings
from outrider.lab.teacher_forced import teacher_forced
from outrider.session import Pair, Session, SessionOptions

STORED = Path(__file__).parent / "top4.jsonl.gz"
RECORDINGS = ("heldout_q4", "qwen_q4")
NUM_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Position:
    """What the draft model holds to come at one position of an answer."""

    tokens: tuple[int, ...]
    probabilities: tuple[float, ...]
    entropy: float


def main() -> None:
    parser = argument_parser(__doc__, out=True, threads=2, context=4096)
    parser.add_argument("draft", type=Path)
    parser.add_argument("recordings", nargs="+", type=Path)
    arguments = parser.parse_args()
    pair = Pair.load(arguments.draft, None, options=LoadOptions(threads=arguments.threads))
    options = SessionOptions(arguments.context)
    with Session.open(pair, options) as session, gzip.open(arguments.out, "wt", encoding="utf-8") as file:
        file.write(json.dumps(describe(arguments.draft)) + "\n")
        for path in arguments.recordings:
            for recording in read_recordings(path):
                row = {"recordings": path.name.partition(".")[0], "id": recording.id}
                row |= top4(session.engine.target, recording)
                file.write(json.dumps(row, separators=(",", ":")) + "\n")


def top4(model: Model, recording: Recording) -> Row:
    """One recording's row."""
    model.truncate(0, 0)
    text, first = (*recording.prompt, *recording.tokens), len(recording.prompt) - 1
    found = [position(row) for rows in teacher_forced(model, text[:-1], first) for row in rows]
    return {
        "tokens": [each.tokens for each in found],
        "probabilities": [each.probabilities for each in found],
        "entropy": [each.entropy for each in found],
    }


def position(row: Logits) -> Position:
    """The most likely tokens by a row of logits."""
    probs = np.exp(row.astype(np.float64) - float(row.max()))
    probs /= probs.sum()
    best = np.argpartition(probs, -NUM_TOKENS)[-NUM_TOKENS:]
    best = best[np.argsort(-probs[best])]
    entropy = -float((probs * np.log(probs + 1e-30)).sum())
    rounded = tuple(round(float(probs[token]), 5) for token in best)
    return Position(tuple(map(int, best)), rounded, round(entropy, 3))


def read_top4() -> Iterator[tuple[Recording, list[Position]]]:
    """The stored recordings with the draft model's most likely tokens at each position."""
    with gzip.open(STORED, "rt", encoding="utf-8") as file:
        rows = {(row["recordings"], row["id"]): row for row in map(json.loads, file) if "tokens" in row}
    for name in RECORDINGS:
        for recording in read_recordings(STORED.with_name(f"{name}.recordings.jsonl")):
            if (row := rows.get((name, recording.id))) is not None:
                columns = zip(row["tokens"], row["probabilities"], row["entropy"], strict=True)
                yield recording, [Position(tuple(t), tuple(p), entropy) for t, p, entropy in columns]


if __name__ == "__main__":
    run_program(main)
