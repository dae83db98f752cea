"""The engine's own time per step, everything but the model calls, at a real vocabulary's size.

    python benchmarks/engine/own_time.py --out own_time.jsonl --label after

Target and draft stand in for models: their logits are rows of a fixed random table of 151,936 columns
(as Qwen2.5 has), chosen by position, so that every draft of 8 tokens is accepted when greedy. Each has a
table of its own, and both are larger than the caches, so that rows are as cold as those that come from a GPU.
What a step record counts outside of model calls is then the engine: proposing, sampling, verifying, text,
records. With `--model` and `--draft` the same of a real pair; on a processor its weights push everything else
out of the caches. `--profile` prints where the time goes instead.
"""

from __future__ import annotations

import cProfile
import json
import pstats
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import argument_parser, describe, run_program
from outrider import Engine, FixedPolicy, Request, SamplingParams, Span
from outrider.backends.gguf.model import Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.core.contracts import FREE
from outrider.core.data import Logits, TopLogits
from outrider.drafters.model import ModelDrafter
from outrider.models.vocab import Alignment, AlignmentReport, align
from outrider.sampling.chain import ranked

VOCABULARY_SIZE = 151_936
TABLE_ROWS = 64
PROMPT = "// A queue of jobs with priorities, in C++.\n#include <vector>\n"
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

    def __init__(self, table: Logits, picks: bool) -> None:
        self.vocabulary = InstantVocabulary()
        self._table = table.copy()
        self._tops = [TopLogits(tokens, row[tokens]) for row in table for tokens in [ranked(row, 64)]]
        self._picks = picks
        self._length = 0

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        (span,) = spans
        self._length = span.start + len(span.tokens)
        first = (self._length - span.rows) % TABLE_ROWS
        if self._picks and span.top:
            return cast(list[Logits], [self._tops[first : first + span.rows]])
        return [self._table[first : first + span.rows]]

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
    counts = (VOCABULARY_SIZE,) * 4
    return Alignment(ids, ids, True, AlignmentReport("instant", "instant", *counts))


def stand_ins(picks: bool) -> tuple[Engine, tuple[int, ...]]:
    """An engine on stand-ins, and a prompt."""
    table = logits_table()
    drafter = ModelDrafter(InstantModel(table, picks), identity())
    return Engine(InstantModel(table, picks), [drafter], FixedPolicy(8, 0.0)), (1, 2, 3)


def real(model: Path, draft: Path, options: LoadOptions) -> tuple[Engine, tuple[int, ...]]:
    """The same of a real pair of one tokenizer."""
    target, drafter = (Weights(path, options) for path in (model, draft))
    alignment = align(target.vocabulary, drafter.vocabulary)
    engine = Engine(target.open(4096), [ModelDrafter(drafter.open(4096), alignment)], FixedPolicy(8, 0.0))
    return engine, tuple(target.vocabulary.tokenize(PROMPT))


def run(
    engine: Engine, prompt: tuple[int, ...], sampling: SamplingParams, length: int, steps: int
) -> list[float]:
    """Own milliseconds of each decoding step with drafts of so many tokens."""
    request = Request(
        prompt,
        sampling,
        max_tokens=steps * (length + 1),
        ignore_end=True,
        speculate=length > 0,
    )
    own: list[float] = []
    for update in engine.stream(request):
        r = update.record
        if len(r.draft) == length and not r.read_tokens:
            own.append(1000 * (r.total_s - r.verify_s - r.work.model_s - r.work.prefill_s))
        if len(own) == steps:
            break
    return own


def main() -> None:
    parser = argument_parser(__doc__, pair=True, out=False, steps=100, settings=len(SETTINGS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--label", default="now")
    parser.add_argument("--backend", default="auto", help="the real pair's library")
    parser.add_argument("--picks", action="store_true", help="stand-ins that hand out TopLogits, as on a GPU")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    pair, steps = [path for path in (arguments.model, arguments.draft) if path], arguments.steps
    if arguments.model and arguments.draft:
        options = LoadOptions(backend=arguments.backend)
        engine, prompt = real(arguments.model, arguments.draft, options)
    else:
        engine, prompt = stand_ins(arguments.picks)
    if arguments.profile:
        profile = cProfile.Profile()
        profile.runcall(run, engine, prompt, SETTINGS["greedy"], 8, steps)
        pstats.Stats(profile).sort_stats("tottime").print_stats(15)
        return
    rows: list[dict[str, Any]] = [describe(*pair)]
    rows[0] |= {
        "label": arguments.label,
        "backend": arguments.backend if pair else "",
        "picks": arguments.picks,
    }
    for (name, sampling), length in product([*SETTINGS.items()][: arguments.settings], (0, 8)):
        run(engine, prompt, sampling, length, 3)  # warm
        own = run(engine, prompt, sampling, length, steps)
        low, p95 = min(own), float(np.quantile(own, 0.95))
        row = {"kind": "own time", "label": arguments.label, "settings": name, "drafted": length}
        row |= {"sampling": asdict(sampling), "steps": len(own)}
        rows.append(row | {"median_ms": median(own), "least_ms": low, "p95_ms": p95})
        print(
            f"{arguments.label:<8} {name:<52} {length} drafted: median {median(own):6.3f} ms a step, "
            f"least {low:6.3f}, p95 {p95:6.3f}"
        )
    if arguments.out:
        with arguments.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    run_program(main)
