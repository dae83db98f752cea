"""What is measured: a target, the drafts that are put beside it, and how much of it all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from outrider import Engine, FixedPolicy, LoadOptions, Pair
from outrider.core.contracts import Model
from outrider.core.params import SamplingParams
from outrider.drafters.model import ModelDrafter
from outrider.models import read_card
from outrider.models.vocab import Alignment, align
from outrider.session.loading import load_weights

Tokens = tuple[int, ...]

FILTERS = {
    "default": SamplingParams(),
    "wide": SamplingParams(temperature=1.0, top_k=200, top_p=1.0, min_p=0.0),
}
"""The filters in force unless others are asked for, at temperature 0.8; and hardly any, at 1."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured. `prompts` of the built-in ones; `tokens` of a greedy or sampled text; `seeds`:
    texts of each prompt; `samples`: short texts of each of `short_prompts`; `lengths`: drafted tokens of a
    greedy step, `length` of a sampled one; `draws`: permutations of a test."""

    prompts: int = 6
    tokens: int = 24
    seeds: int = 2
    short_prompts: int = 2
    samples: int = 400
    certificate_samples: int = 300
    lengths: tuple[int, ...] = (2, 4, 8)
    length: int = 4
    leniences: tuple[float, ...] = (0.5, 0.2, 0.05, 0.01)
    draws: int = 20_000
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A draft model that is put beside the target."""

    name: str
    model: Model
    alignment: Alignment

    def drafter(self) -> ModelDrafter:
        return ModelDrafter(self.model, self.alignment)


def engine_of(target: Model, candidate: Candidate | None, length: int) -> Engine:
    """The target with drafts of a fixed length in every step, however doubtful; without a candidate plain."""
    if candidate is None:
        return Engine(target, (), FixedPolicy(draft_max=0))
    return Engine(target, (candidate.drafter(),), FixedPolicy(length, p_min=0, hand_over=0))


@contextmanager
def opened_target(file: Path | None, context: int, threads: int) -> Iterator[tuple[Pair, Model]]:
    """A target and its contexts (None: the embedded default)."""
    pair = Pair.load(file, "none", options=LoadOptions(threads=threads))
    try:
        model = pair.target.open(context)
        yield pair, model
        model.close()
    finally:
        pair.close()


@contextmanager
def opened_draft(name: str, file: Path, pair: Pair, context: int, threads: int) -> Iterator[Candidate]:
    weights = load_weights(file, read_card(file), LoadOptions(threads=threads), [], draft=True)
    try:
        alignment = align(pair.target.vocabulary, weights.vocabulary)
        model = weights.open(min(context, weights.trained_context))
        yield Candidate(name, model, alignment)
        model.close()
    finally:
        weights.close()


def encoded(pair: Pair, texts: Sequence[str]) -> list[Tokens]:
    return [pair.encode([{"role": "user", "content": text}]) for text in texts]
