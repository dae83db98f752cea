"""Requests run to their end on a real model, with the bits of its logits where texts must be bit-equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from outrider.core.contracts import Model
from outrider.core.data import Logits, Request, Span, StepRecord
from outrider.core.errors import ConstraintError
from outrider.engine import Engine

_STEPS_AHEAD = 3
"""made by a request that runs beside another one before that begins"""

RowDigests = Mapping[tuple[int, ...], bytes]
"""A digest of the logits' bits after each prefix of a text, prompt included."""


class Wrapped:
    """A Model or Constraint that does what `inner` does, but for what a subclass defines."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Followed(Wrapped):
    """A Model that gives what `inner` gives; `stored` are the tokens that its sequences hold."""

    def __init__(self, inner: Model) -> None:
        super().__init__(inner)
        self.stored: dict[int, list[int]] = {}

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        try:
            found: list[Logits] = self.inner.decode(spans)
        except BaseException:  # a failing call may have forgotten some of what was stored
            for span in spans:
                self._forget(span.sequence, self.inner.length(span.sequence))
            raise
        for span in spans:
            self.stored.setdefault(span.sequence, []).extend(span.tokens)
        return found

    def _forget(self, sequence: int, length: int) -> list[int]:
        stored = self.stored.setdefault(sequence, [])
        self.stored[sequence] = stored[:length]
        return stored[length:]

    def truncate(self, sequence: int, length: int) -> None:
        self.inner.truncate(sequence, length)
        self._forget(sequence, length)

    def copy(self, source: int, sequence: int, length: int) -> None:
        self.inner.copy(source, sequence, length)
        self.stored[sequence] = self.stored.get(source, [])[:length]


class RowRecorder(Followed):
    """A Model that gives what `inner` gives, and records a digest of every row's bits in `rows`."""

    def __init__(self, inner: Model) -> None:
        super().__init__(inner)
        self.rows: dict[tuple[int, ...], bytes] = {}

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        found = super().decode([replace(span, top=0) for span in spans])
        for span, logits in zip(spans, found, strict=True):
            stored = self.stored[span.sequence]
            for i, row in enumerate(logits, len(stored) - len(logits) + 1):
                self.rows[tuple(stored[:i])] = blake2b(row.tobytes(), digest_size=16).digest()
        return found


@dataclass(frozen=True, slots=True)
class Run:
    """A generation from `prompt`, which may hold generated tokens of an earlier run. `rows` are digests of
    its logits, where they were recorded."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    records: tuple[StepRecord, ...]
    rows: RowDigests | None = None

    @property
    def text(self) -> tuple[int, ...]:
        """All tokens, the prompt's included."""
        return self.prompt + self.tokens


def run(engine: Engine, request: Request, beside: Request | None = None) -> Run:
    """Run a request on an empty KV cache; `beside` is in the middle of its own generation all the while."""
    engine.reset()
    target: object = engine.target
    recorder = target if isinstance(target, RowRecorder) else None
    if recorder is not None:
        recorder.rows.clear()
    if beside is None:
        found = generate(engine, request)
    else:
        with closing(engine.stream(beside)) as other:
            for _ in range(_STEPS_AHEAD):
                next(other, None)
            found = generate(engine, request)
    return found if recorder is None else replace(found, rows=dict(recorder.rows))


def generate(engine: Engine, request: Request) -> Run:
    """Run one request to its end. A constrained output that cannot go on has ended there, which is to
    be compared like any other end."""
    records: list[StepRecord] = []
    stream = engine.stream(request)
    try:
        while True:
            records.append(next(stream).record)
    except StopIteration as end:
        return Run(request.prompt, end.value.tokens, end.value.records)
    except ConstraintError as error:
        return Run(request.prompt, error.tokens, tuple(records))


@dataclass(frozen=True, slots=True)
class ComparedRows:
    """At how many positions two runs' logits were compared, at how many their bits differ, and the first
    of these, in generated tokens (None where none does)."""

    positions: int
    differing: int
    first: int | None

    @property
    def holds(self) -> bool:
        return self.differing == 0


def compare_rows(ours: RowDigests, theirs: RowDigests, num_prompt: int) -> ComparedRows:
    """Compare the rows after every prefix that both runs evaluated, from the end of the prompt on."""
    shared = [prefix for prefix in theirs if prefix in ours and len(prefix) >= num_prompt]
    differing = sorted(len(prefix) - num_prompt for prefix in shared if ours[prefix] != theirs[prefix])
    return ComparedRows(len(shared), len(differing), differing[0] if differing else None)
