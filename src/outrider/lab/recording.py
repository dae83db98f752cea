"""An answer of the target's, and what each draft model offers at every position of it.

As long as a draft is accepted, what a draft model offers next depends on the target's text alone, so its
most likely token after every prefix of the answer says how far any draft would have been accepted. After a
wrong token the draft goes on by itself: `departures` keep those tokens, for their confidence decides
when a policy gives up. What lookups offer needs no recording: they are run again.

A head reads with the target's hidden states only what the target has evaluated, and goes on from each token
of its own by a state of its own. What it offers depends on where it began, so it departs everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.backends.gguf.heads import HiddenStates
from outrider.core.contracts import Constraint, Model
from outrider.core.data import Block, FinishReason, Row, Span
from outrider.core.errors import BackendError, ConstraintError
from outrider.lab.comparison import teacher_forced
from outrider.models.vocab import Alignment
from outrider.sampling import most_likely


@dataclass(frozen=True, slots=True)
class Offers:
    """A draft model's most likely token at each position of an answer, and its confidence in it.
    `departures[i]` are the tokens and confidences that it would go on with after its token at position i,
    where that is not the target's; of a head, everywhere. `block`: tokens of a call."""

    tokens: tuple[int, ...]
    confidence: tuple[float, ...]
    departures: Mapping[int, tuple[tuple[int, float], ...]]
    block: int = 1

    def rereads(self, answer: Sequence[int]) -> bool:
        """Whether they are a head's, which departs from right tokens too: it reads these again, with the
        target's states, once they are accepted."""
        return self.block > 1 or any(self.tokens[i] == answer[i] for i in self.departures)


@dataclass(frozen=True, slots=True)
class Recording:
    """A prompt, the target's answer to it (token ids both), and the offers by drafter's name. `constrain`
    makes the request's constraint afresh, where it has one. `whole_ratio` is its part of the answer that it
    would have become: what is read once for all of it counts in this part."""

    id: str
    category: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    offers: Mapping[str, Offers]
    constrain: Callable[[], Constraint] | None = None
    whole_ratio: float = 1.0


_Offer = tuple[int, float]
"""A token and the confidence in it."""

LONGEST_DEPARTURE = 12
_MAX_CONFIDENCE = 0.99999
"""a model is never certain"""
MIN_PREFIX_PROB = 0.04
"""A draft that has departed from the answer is followed until its prefix acceptance probability is this
small."""


def record_offers(
    model: Model,
    alignment: Alignment,
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    constrain: Callable[[], Constraint] | None = None,
    states: HiddenStates | None = None,
) -> Offers:
    """What the draft `model` would offer after every prefix of `answer`, all ids the target's.

    `constrain` makes the request's constraint again, where it has one: offers are made under its masks.
    `states` are those that a head reads with, of prompt and answer in sequence 0; few are left afterwards.
    Sequence 0 of the model is used and left empty. Raises BackendError when a call fails or the texts
    do not fit its context.
    """
    mine = alignment.read(prompt)
    starts: list[int] = []
    for token in answer:
        starts.append(len(mine))
        mine += alignment.read((token,))
    if len(mine) + LONGEST_DEPARTURE > model.context_length or not mine[: starts[0] if starts else 0]:
        raise BackendError(model.name, "the text does not fit its context", "Give a larger one (-c).")
    try:
        model.truncate(0, 0)
        constraint = None if constrain is None else constrain()
        recorder = _Recorder(model, alignment, mine, starts, answer, constraint)
        if states is None:
            greedy, departures = recorder.follow_answer()
        else:
            greedy, departures = recorder.depart_everywhere(states, len(prompt))
    finally:
        model.truncate(0, 0)
    tokens, confidences = zip(*greedy, strict=True) if greedy else ((), ())
    block = getattr(model, "block", 1)
    return Offers(tuple(tokens), tuple(confidences), dict(sorted(departures.items())), block)


@dataclass(slots=True)
class _Recorder:
    """One answer in the draft model's own ids; `starts[i]` is how many precede token i of the answer."""

    model: Model
    alignment: Alignment
    tokens: list[int]
    starts: list[int]
    answer: Sequence[int]
    constraint: Constraint | None

    def follow_answer(self) -> tuple[list[_Offer], dict[int, tuple[_Offer, ...]]]:
        found = self._along_answer()
        positions = [i for i in range(len(self.answer)) if found[i][0] != self.answer[i]]
        if not self.model.rewinding.recomputes:  # there one goes on from the one before
            positions.reverse()
        departures = {}
        for i in positions:
            start = self.starts[i]
            self.model.truncate(0, self.model.reach(0, min(start, self.model.length(0))))
            self._read(start)
            departures[i] = self._go_on(i, *found[i])
        return found, departures

    def depart_everywhere(
        self, states: HiddenStates, num_prompt: int
    ) -> tuple[list[_Offer], dict[int, tuple[_Offer, ...]]]:
        """The same of a head, which knows the target's states of all but the last token before its draft: one
        state less at each step from the answer's end to its start."""
        found: dict[int, _Offer] = {}
        departures = {}
        for i in range(len(self.answer) - 1, -1, -1):
            last = self.starts[i] - 1
            states.truncate(0, num_prompt + i - 1)
            self.model.truncate(0, min(last, self.model.length(0)))
            self._read(last)
            rows: object = self.model.decode([Span(0, (self.tokens[last],), last, 1)])[0]
            if isinstance(rows, Block):
                found[i], *path = self._places(rows, i)
                departures[i] = tuple(path)
                continue
            assert isinstance(rows, np.ndarray), "a model gives rows"
            found[i] = self._most_likely(rows[-1], self.answer[:i])
            departures[i] = self._go_on(i, *found[i])
        return [found[i] for i in range(len(self.answer))], departures

    def _places(self, block: Block, position: int) -> Iterator[_Offer]:
        text, before = list(self.answer[:position]), self.tokens[self.starts[position] - 1]
        for place in range(len(block)):
            offer = self._most_likely(block.row(place, before, self.model.vocabulary.size), text)
            own = None if block.confidence is None else float(block.confidence[place])
            yield offer if own is None else (offer[0], min(max(round(own, 5), 1e-5), _MAX_CONFIDENCE))
            before = offer[0]
            text.append(before)

    def _read(self, length: int) -> None:
        for _ in teacher_forced(self.model, self.tokens[:length], length):
            pass

    def _along_answer(self) -> list[_Offer]:
        found: list[_Offer] = []
        if not self.starts:
            return found
        read = self.starts[0] - 1
        tokens = self.tokens[: self.starts[-1]]
        for rows in teacher_forced(self.model, tokens, read):
            for row in rows:
                read += 1
                while len(found) < len(self.starts) and self.starts[len(found)] == read:
                    found.append(self._most_likely(row, self.answer[: len(found)]))
        return found

    def _go_on(self, position: int, token: int, confidence: float) -> tuple[_Offer, ...]:
        """How the draft goes on after a token of its own at this position of the answer, up to which the
        model has read, and after what the constraint forces there: as far as it is right or likely to be."""
        start = self.starts[position]
        path: list[_Offer] = []
        text = list(self.answer[:position])
        prefix_prob = confidence
        while len(path) < LONGEST_DEPARTURE:
            mine = self.alignment.read((token,))
            if token < 0 or not mine or self.model.vocabulary.ends_generation(mine[0]):
                break
            text.append(token)
            if prefix_prob < MIN_PREFIX_PROB and text != list(self.answer[: len(text)]):
                break
            if self.constraint is not None:
                forced = self.constraint.forced(text)
                text += forced
                mine += self.alignment.read(forced)
            stored = self.model.length(0)
            if stored + len(mine) > self.model.context_length or len(mine) > self.model.max_batch_tokens:
                break
            checkpoint = stored == start
            row = self.model.decode([Span(0, tuple(mine), stored, 1, checkpoint)])[0][-1]
            token, confidence = self._most_likely(row, text)
            path.append((token, confidence))
            prefix_prob *= confidence
        return tuple(path)

    def _most_likely(self, row: Row, text: Sequence[int]) -> _Offer:
        """The most likely token after this beginning of the answer or of a draft, in the target's ids; -1 for
        one that the target lacks, or where the constraint leaves none."""
        if self.constraint is None:
            best, confidence = most_likely(row)
            mapped = best if self.alignment.identical else int(self.alignment.to_target[best])
            return mapped, min(round(confidence, 5), _MAX_CONFIDENCE)
        row = self.alignment.in_target(row)
        try:
            mask = self.constraint.allowed(text)
        except ConstraintError:
            return -1, 1 - _MAX_CONFIDENCE
        if mask is not None:
            row = np.where(mask, row, np.float32(-np.inf))
        if not np.isfinite(row.max()):
            return -1, 1 - _MAX_CONFIDENCE
        best, confidence = most_likely(row)
        return best, min(round(confidence, 5), _MAX_CONFIDENCE)
