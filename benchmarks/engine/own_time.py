"""The engine's own time per step, everything but the model calls, at a real vocabulary's size.

    python benchmarks/engine/own_time.py --out own_time.jsonl --label after

Target and draft stand in for models: their logits are rows of a fixed random table of 151,936 columns
(as Qwen2.5 has), chosen by position, so that every draft of 8 tokens is accepted when greedy. A call
copies its rows into an output buffer, as a real one leaves them there. What a step record counts outside
of model calls is then the engine: proposing, sampling, verifying, text, records. `--profile` prints
where it goes instead.
"""

from __future__ import annotations

import cProfile
import json
import pstats
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import argument_parser, describe, run_program
from outrider import Engine, FixedPolicy, Request, SamplingParams, Span
from outrider.core.contracts import FREE
from outrider.core.data import Logits
from outrider.drafters.model import ModelDrafter
from outrider.models.vocab import Alignment, AlignmentReport, Cuts

VOCABULARY_SIZE = 151_936
TABLE_ROWS = 64
SETTINGS = {
    "greedy": SamplingParams(temperature=0),
    "defaults (T 0.8, top-k 40, top-p 0.95, min-p 0.05)": SamplingParams(seed=1),
    "T 1, no filter": SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0, seed=1),
    "T 1, top-p 0.95 alone": SamplingParams(temperature=1, top_k=0, top_p=0.95, min_p=0, seed=1),
}


class InstantVocabulary:
    size = VOCABULARY_SIZE
    kind = "instant"
    part_of = None

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        del text, add_special, parse_special
        return [0]

    def piece(self, token: int) -> bytes:
        return b"word " if token else b""

    spelling = piece

    def is_control(self, token: int) -> bool:
        return token < 0

    def ends_generation(self, token: int) -> bool:
        return token < 0


class InstantModel:
    """Answers from a table, and keeps count of what is stored."""

    name = "instant"
    context_length = capacity_tokens = 1 << 20
    max_sequences = 1
    max_batch_tokens = 2048
    max_rows = 128
    rewinding = FREE

    def __init__(self, table: Logits) -> None:
        self.vocabulary = InstantVocabulary()
        self._table = table
        self._output = np.empty((16, VOCABULARY_SIZE), dtype=np.float32)
        self._length = 0

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        (span,) = spans
        self._length = span.start + len(span.tokens)
        first = (self._length - span.rows) % TABLE_ROWS
        self._output[: span.rows] = self._table[first : first + span.rows]
        return [self._output[: span.rows]]

    def length(self, sequence: int) -> int:
        del sequence
        return self._length

    def reach(self, sequence: int, length: int) -> int:
        del sequence
        return length

    def truncate(self, sequence: int, length: int) -> None:
        del sequence
        self._length = min(self._length, length)

    def copy(self, source: int, sequence: int, length: int) -> None:
        raise NotImplementedError(f"one sequence: {source}, {sequence}, {length}")

    def close(self) -> None:
        pass


def logits_table() -> Logits:
    """Random rows with a peak each; the first ones stand again after the last, for spans that wrap."""
    rng = np.random.default_rng(0)
    table = rng.normal(0, 2.5, (TABLE_ROWS, VOCABULARY_SIZE)).astype(np.float32)
    for row in table:
        row[rng.integers(VOCABULARY_SIZE, size=5)] += (20, 18, 17, 16, 15)
    return np.concatenate([table, table])


def identity() -> Alignment:
    ids = np.arange(VOCABULARY_SIZE, dtype=np.int64)
    counts = (VOCABULARY_SIZE,) * 6
    return Alignment(ids, ids, True, AlignmentReport("instant", "instant", *counts, Cuts(1, 1), ()))


def run(table: Logits, sampling: SamplingParams, num_tokens: int) -> list[float]:
    """Own milliseconds of each decoding step."""
    engine = Engine(
        InstantModel(table), [ModelDrafter(InstantModel(table), identity())], FixedPolicy(8, 0, 0.0)
    )
    completion = engine.generate(Request((1, 2, 3), sampling, max_tokens=num_tokens))
    return [
        1000 * (r.total_s - r.verify_s - r.work.model_s - r.work.prefill_s) for r in completion.records[1:]
    ]


def main() -> None:
    parser = argument_parser(__doc__, out=False, tokens=1000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--label", default="now")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    table = logits_table()
    if arguments.profile:
        profile = cProfile.Profile()
        profile.runcall(run, table, SETTINGS["greedy"], arguments.tokens)
        pstats.Stats(profile).sort_stats("tottime").print_stats(15)
        return
    rows: list[dict[str, Any]] = [describe() | {"label": arguments.label}]
    for name, sampling in SETTINGS.items():
        run(table, sampling, 100)  # warm
        own = run(table, sampling, arguments.tokens)
        p95 = float(np.quantile(own, 0.95))
        rows.append(
            {
                "kind": "own time",
                "label": arguments.label,
                "settings": name,
                "sampling": asdict(sampling),
                "steps": len(own),
                "median_ms": median(own),
                "p95_ms": p95,
            }
        )
        print(f"{arguments.label:<8} {name:<52} median {median(own):6.2f} ms a step, p95 {p95:6.2f} ms")
    if arguments.out:
        with arguments.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    run_program(main)
