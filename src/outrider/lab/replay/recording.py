"""An answer of the target's, and what each draft model offers at every position of it.

As long as a draft is accepted, what a draft model offers next depends on the target's text alone, so its
most likely token after every prefix of the answer says how far any draft would have been accepted. After a
wrong token the draft goes on by itself: `departures` keep those tokens, for their confidence decides
when a policy gives up. What lookups offer needs no recording: they are run again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from outrider.core.contracts import Constraint, Model
from outrider.core.data import FinishReason, Row, Span
from outrider.core.errors import BackendError, ConstraintError, InputError
from outrider.core.files import parse_json, reason_of
from outrider.core.invalid import invalid
from outrider.lab.teacher_forced import teacher_forced
from outrider.models.vocab import Alignment
from outrider.sampling import argmax
from outrider.sampling import confidence as confidence_of

SCHEMA = "outrider.recording/1"


@dataclass(frozen=True, slots=True)
class Offers:
    """A draft model's most likely token at each position of an answer, and its confidence in it.

    `departures[i]` are the tokens and confidences that it would go on with after its token at position
    i, where that is not the target's.
    """

    tokens: tuple[int, ...]
    confidence: tuple[Annotated[float, Field(gt=0, le=1)], ...]
    departures: Mapping[int, tuple[tuple[int, float], ...]]


@dataclass(frozen=True, slots=True)
class Recording:
    """A prompt, the target's answer to it (token ids both), and the offers by drafter's name. `constrain`
    makes the request's constraint afresh, where it has one; it is not written to files."""

    id: str
    category: str
    prompt: Annotated[tuple[int, ...], Field(min_length=1)]
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    offers: Mapping[str, Offers]
    constrain: Annotated[Callable[[], Constraint] | None, Field(exclude=True)] = None


_FORMAT = TypeAdapter(Recording)


def as_json(recording: Recording) -> dict[str, Any]:
    """A recording as plain data."""
    return {"kind": "recording", "schema": SCHEMA, **_FORMAT.dump_python(recording)}


def from_json(data: Mapping[str, Any]) -> Recording:
    """The recording that `as_json` made plain data of. Raises ValueError, in one line."""
    if data.get("schema") != SCHEMA:
        raise ValueError(f"its schema is not {SCHEMA}")
    try:
        recording = _FORMAT.validate_python(data)
    except ValidationError as error:
        raise ValueError(str(invalid(error))) from None
    for offers in recording.offers.values():
        if not len(offers.tokens) == len(offers.confidence) == len(recording.tokens):
            raise ValueError("an offer for each token of the answer is needed")
    return recording


def read_recordings(path: Path) -> list[Recording]:
    """Read JSON lines; those of another kind (a machine's description) are passed over.

    Raises InputError for a file that cannot be read or holds a damaged recording.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = reason_of(error)
        raise InputError(str(path), reason, "Name a file of recordings.") from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            if "prompt" in (data := parse_json(line)):
                found.append(from_json(data))
        except (ValueError, TypeError, AttributeError) as error:
            reason = f"it is no recording ({error})"
            raise InputError(f"{path}, line {number}", reason, "Record it again.") from error
    return found


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
) -> Offers:
    """What the draft `model` would offer after every prefix of `answer`, all ids the target's.

    `constrain` makes the request's constraint again, where it has one: offers are made under its masks.
    Sequence 0 of the model is used and left empty. Raises BackendError when a call fails or the texts
    do not fit its context.
    """
    mine = alignment.read(prompt)
    starts: list[int] = []
    for token in answer:
        starts.append(len(mine))
        mine += alignment.read((token,))
    if len(mine) + LONGEST_DEPARTURE > model.context_length or not mine[: starts[0] if starts else 0]:
        raise BackendError(model.name, "the text does not fit its context", "Give a larger one (-cd).")
    try:
        model.truncate(0, 0)
        constraint = None if constrain is None else constrain()
        recorder = _Recorder(model, alignment, mine, starts, answer, constraint)
        greedy = recorder.follow_answer()
        positions = [i for i in range(len(answer)) if greedy[i][0] != answer[i]]
        if model.rewind != "checkpoints":  # there one goes on from the one before, here the end is cut off
            positions.reverse()
        departures = {i: recorder.depart(i, *greedy[i]) for i in positions}
    finally:
        model.truncate(0, 0)
    tokens, confidences = zip(*greedy, strict=True) if greedy else ((), ())
    return Offers(tuple(tokens), tuple(confidences), dict(sorted(departures.items())))


@dataclass(slots=True)
class _Recorder:
    """One answer in the draft model's own ids; `starts[i]` is how many precede token i of the answer."""

    model: Model
    alignment: Alignment
    tokens: list[int]
    starts: list[int]
    answer: Sequence[int]
    constraint: Constraint | None

    def follow_answer(self) -> list[tuple[int, float]]:
        """The most likely token and its confidence after each prefix of the answer."""
        found: list[tuple[int, float]] = []
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

    def depart(self, position: int, token: int, confidence: float) -> tuple[tuple[int, float], ...]:
        """How the draft goes on after a token of its own at this position of the answer, and after what
        the constraint forces there."""
        start = self.starts[position]
        self.model.truncate(0, self.model.reach(0, min(start, self.model.length(0))))
        for _ in teacher_forced(self.model, self.tokens[:start], start):
            pass
        path: list[tuple[int, float]] = []
        text = list(self.answer[:position])
        prefix_prob = confidence
        while prefix_prob >= MIN_PREFIX_PROB and len(path) < LONGEST_DEPARTURE:
            mine = self.alignment.read((token,))
            if token < 0 or not mine or self.model.vocabulary.ends_generation(mine[0]):
                break
            text.append(token)
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

    def _most_likely(self, row: Row, text: Sequence[int]) -> tuple[int, float]:
        """The most likely token after this beginning of the answer or of a draft, in the target's ids; -1 for
        one that the target lacks, or where the constraint leaves none."""
        if self.constraint is None:
            best = argmax(row)
            mapped = best if self.alignment.identical else int(self.alignment.to_target[best])
            return mapped, min(round(confidence_of(row, best), 5), _MAX_CONFIDENCE)
        row = self.alignment.in_target(row)
        try:
            mask = self.constraint.allowed(text)
        except ConstraintError:
            return -1, 1 - _MAX_CONFIDENCE
        if mask is not None:
            row = np.where(mask, row, np.float32(-np.inf))
        best = argmax(row)
        if not np.isfinite(row[best]):
            return -1, 1 - _MAX_CONFIDENCE
        return best, min(round(confidence_of(row, best), 5), _MAX_CONFIDENCE)
