"""What an informed decoder knows ahead of a recorded answer: offers, their chances, and what comes true."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from outrider.core.data import DraftToken, Request
from outrider.drafters.lookup import SuffixDrafter
from outrider.lab.recording import Recording
from outrider.policy.state import PolicyState, RequestBias

MAX_FREE, MAX_TAIL, MAX_MODEL, MAX_LEAD = 64, 32, 16, 8
"""tokens: looked up in front, after a draft model's; drafted by it, and by others in front of it"""
MIN_SURVIVAL = 0.03
"""Behind drafts that stand more rarely nothing is looked up."""


@dataclass(frozen=True, slots=True)
class Found:
    """The chances of the tokens that the lookup offers somewhere, and how many of them are right."""

    chances: list[float]
    right: int


@dataclass(frozen=True, slots=True)
class Offers:
    """What is known ahead at each position of an answer, and what comes true."""

    free: list[dict[int, Found]]
    """what the lookup offers after so many right tokens that were drafted before"""
    model: list[float]
    """the chance of the draft model's token there"""
    model_right: list[int]
    """how many of its tokens stand from there on"""


def offers_of(
    recording: Recording, knowledge: PolicyState, model: str | None, *, least: float = MIN_SURVIVAL
) -> Offers:
    """The recording's offers, with chances by what a policy has learned of all texts before and, as it
    would, of this one up to the position."""
    answer, lookup, state = recording.tokens, SuffixDrafter(), RequestBias()
    lookup.begin(0, Request(tuple(recording.prompt)))
    estimator = copy.deepcopy(knowledge.estimator(lookup.name))
    chances, model_right = _model_offers(recording, knowledge, model)

    def look_up(position: int, drafted: int) -> tuple[Found, list[DraftToken]]:
        most = MAX_TAIL if drafted else MAX_FREE
        offer = list(islice(lookup.propose(0, answer[position : position + drafted]), most))
        found = [estimator.probability(token.evidence, state) for token in offer]
        return Found(found, _agreement([t.token for t in offer], answer[position + drafted :])), offer

    free = []
    for position in range(len(answer)):
        first, offer = look_up(position, 0)
        reached = _reached(first.chances, chances[position:], least) if model else ()
        free.append({0: first} | {drafted: look_up(position, drafted)[0] for drafted in reached})
        for i, token in enumerate(offer[: min(first.right + 1, len(answer) - position)]):
            estimator.learn(token.evidence, state, i < first.right)
        if offer:
            state.note_first(first.right > 0)
        lookup.observe(0, answer[position : position + 1])
    return Offers(free, chances, model_right)


def _reached(lead: Sequence[float], model: Sequence[float], least: float) -> list[int]:
    """The lengths of drafts that end with the model's tokens and stand often enough."""
    best: dict[int, float] = {}
    for num_lead, survival in enumerate(np.cumprod([1.0, *lead[:MAX_LEAD]])):
        for drafted, chance in enumerate(model[num_lead:][:MAX_MODEL], num_lead + 1):
            survival *= chance
            best[drafted] = max(best.get(drafted, 0.0), survival)
    return [drafted for drafted, survival in best.items() if survival >= least and drafted < len(model)]


def _model_offers(
    recording: Recording, knowledge: PolicyState, model: str | None
) -> tuple[list[float], list[int]]:
    """The chance of the draft model's token at each position, and how many of them stand from there on."""
    answer, chances = recording.tokens, []
    if model is None:
        return [0.0] * len(answer), [0] * len(answer)
    offered, state = recording.offers[model], RequestBias()
    estimator = copy.deepcopy(knowledge.estimator(model))
    right = [int(a == b) for a, b in zip(offered.tokens, answer, strict=True)]
    for confidence, is_right in zip(offered.confidence, right, strict=True):
        chances.append(estimator.probability((confidence,), state))
        estimator.learn((confidence,), state, bool(is_right))
    for i in range(len(answer) - 2, -1, -1):
        right[i] *= 1 + right[i + 1]
    return chances, right


def _agreement(drafted: Sequence[int], answer: Sequence[int]) -> int:
    pairs = enumerate(zip(drafted, answer, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(drafted), len(answer)))
