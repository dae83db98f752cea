"""The target answers many prompts at once, and what it would have said at each place is counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import numpy.typing as npt

from outrider.core.contracts import Model
from outrider.core.data import Row, Span

_MAX_TOKENS = 96
"""of an answer: many short ones tell more about others than few long ones"""

Mass = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer's tokens, and the target's probability of each token of its vocabulary, added up over
    the places of the answer; None where it is not known."""

    tokens: tuple[int, ...]
    mass: Mass | None


@dataclass(slots=True)
class _Running:
    prompt: Sequence[int]
    mass: Mass
    tokens: list[int] = field(default_factory=list)


def answer_prompts(
    model: Model,
    prompts: Sequence[Sequence[int]],
    seconds: float,
    progress: Callable[[float], None] = lambda _part: None,
    clock: Callable[[], float] = perf_counter,
) -> list[Answered]:
    """The target's most likely answers to as many prompts as the time allows, as many at once as it has
    sequences. Its sequences are empty before and after. Raises BackendError when a call fails."""
    started, waiting = clock(), list(reversed(prompts))
    running: dict[int, _Running] = {}
    found: list[Answered] = []
    room = model.capacity_tokens // model.max_sequences - _MAX_TOKENS
    try:
        while (spent := clock() - started) < seconds and (waiting or running):
            progress(spent / seconds)
            for sequence in range(model.max_sequences):
                if sequence not in running and waiting:
                    prompt = waiting.pop()
                    if 0 < len(prompt) <= min(room, model.max_batch_tokens):
                        mass = np.zeros(model.vocabulary.size, dtype=np.float32)
                        running[sequence] = _Running(prompt, mass)
                        [rows] = model.decode([Span(sequence, tuple(prompt), 0, 1)])
                        _go_on(running[sequence], rows[-1])
            for sequence, rows in _step(model, running):
                _go_on(running[sequence], rows[-1])
            for sequence in [s for s, answer in running.items() if _is_done(model, answer)]:
                found.append(_answered(running.pop(sequence)))
                model.truncate(sequence, 0)
    finally:
        for sequence in range(model.max_sequences):
            model.truncate(sequence, 0)
    return [*found, *map(_answered, running.values())]


def _step(model: Model, running: dict[int, _Running]) -> list[tuple[int, npt.NDArray[np.float32]]]:
    """One call over the last token of every answer that goes on."""
    active = [s for s, answer in running.items() if not _is_done(model, answer)]
    if not active:
        return []
    spans = [
        Span(s, (running[s].tokens[-1],), len(running[s].prompt) + len(running[s].tokens) - 1, 1)
        for s in active
    ]
    return list(zip(active, model.decode(spans), strict=True))


def _go_on(answer: _Running, row: Row) -> None:
    best = int(np.argmax(row))
    probs = np.exp(row - row[best])
    answer.mass += probs / probs.sum()
    answer.tokens.append(best)


def _is_done(model: Model, answer: _Running) -> bool:
    last = answer.tokens[-1]
    return len(answer.tokens) >= _MAX_TOKENS or model.vocabulary.ends_generation(last)


def _answered(answer: _Running) -> Answered:
    return Answered(tuple(answer.tokens), answer.mass)
