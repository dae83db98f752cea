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


@dataclass(slots=True)
class Answered:
    """An answer's tokens, and the target's probability of each token of its vocabulary, added up over
    the places of the answer; None where it is not known."""

    mass: Mass | None
    tokens: list[int] = field(default_factory=list)

    def go_on(self, row: Row) -> None:
        """Take the most likely token of these logits."""
        best = int(np.argmax(row))
        probs = np.exp(row - row[best])
        self.mass += probs / probs.sum()
        self.tokens.append(best)

    def is_done(self, model: Model) -> bool:
        """Whether it ends here."""
        return len(self.tokens) >= _MAX_TOKENS or model.vocabulary.ends_generation(self.tokens[-1])


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
    running: dict[int, Answered] = {}
    found: list[Answered] = []
    room = model.capacity_tokens // model.max_sequences - _MAX_TOKENS
    try:
        while (spent := clock() - started) < seconds and (waiting or running):
            progress(spent / seconds)
            for sequence in range(model.max_sequences):
                if sequence not in running and waiting:
                    prompt = waiting.pop()
                    if 0 < len(prompt) <= min(room, model.max_batch_tokens):
                        running[sequence] = Answered(np.zeros(model.vocabulary.size, dtype=np.float32))
                        [rows] = model.decode([Span(sequence, tuple(prompt), 0, 1)])
                        running[sequence].go_on(rows[-1])
            going = {s: answer for s, answer in running.items() if not answer.is_done(model)}
            spans = [Span(s, (a.tokens[-1],), model.length(s), 1) for s, a in going.items()]
            for answer, rows in zip(going.values(), model.decode(spans) if spans else (), strict=True):
                answer.go_on(rows[-1])
            for sequence in [s for s, answer in running.items() if answer.is_done(model)]:
                found.append(running.pop(sequence))
                model.truncate(sequence, 0)
    finally:
        for sequence in range(model.max_sequences):
            model.truncate(sequence, 0)
    return [*found, *running.values()]
