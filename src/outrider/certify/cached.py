"""Models that are asked once for each prefix: thousands of engine runs at the cost of a few calls.

A `CachedModel` keeps the contract of a Model, down to rewinding and overwritten rows, so the whole engine
runs on it. Its logits are the real model's, each as its first call gave it; what a batch shape may change
in them is therefore fixed, and the distribution of a text is known exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from outrider.core.contracts import Model, RewindKind, Vocabulary
from outrider.core.data import Logits, Row, Span
from outrider.core.errors import BackendError, RewindUnsupported
from outrider.lab.teacher_forced import teacher_forced

_CHUNK_TOKENS = 256


class RowSource(Protocol):
    """A source of logits by prefix."""

    def after(self, tokens: Sequence[int], count: int) -> list[Row]:
        """The rows after the last `count` prefixes of `tokens`, the whole of it included."""
        ...

    def forget(self) -> None:
        """Free the rows."""
        ...


class LogitsCache:
    """The rows of a real model, by prefix; it uses the model's sequence 0. `calls` counts the
    model calls that it took."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.calls = 0
        self._rows: dict[tuple[int, ...], Row] = {}
        self._stored: list[int] = []

    def after(self, tokens: Sequence[int], count: int) -> list[Row]:
        prefixes = [tuple(tokens[: len(tokens) - count + i + 1]) for i in range(count)]
        missing = next((i for i, prefix in enumerate(prefixes) if prefix not in self._rows), count)
        if missing < count:
            self._evaluate(tokens, count - missing)
        return [self._rows[prefix] for prefix in prefixes]

    def _evaluate(self, tokens: Sequence[int], count: int) -> None:
        """Ask the model for the last `count` rows, in one call where the tokens before are stored."""
        start = len(tokens) - count
        self._rewind(tokens, start)
        end = start
        for rows in teacher_forced(self.model, tokens, start, chunk=_CHUNK_TOKENS):
            self.calls += 1
            self._stored = list(tokens[: self.model.length(0)])
            for row in rows:
                end += 1
                kept = self._rows.setdefault(tuple(tokens[:end]), row.copy())
                kept.setflags(write=False)

    def _rewind(self, tokens: Sequence[int], limit: int) -> None:
        """Keep what is stored of the first `limit` tokens."""
        keep = 0
        while keep < min(limit, len(self._stored)) and self._stored[keep] == tokens[keep]:
            keep += 1
        if keep < self.model.length(0):
            try:
                self.model.truncate(0, keep)
            except RewindUnsupported:
                keep = 0
                self.model.truncate(0, 0)
        self._stored = list(tokens[:keep])

    def forget(self) -> None:
        """Free the rows and the model's sequence."""
        self._rows.clear()
        self._stored.clear()
        self.model.truncate(0, 0)


class DisturbedLogits:
    """Another source's rows, flattened and with normal noise of its own on every logit: a draft model
    that is right often enough to be accepted, and wrong often enough to be rejected."""

    SCALE = 0.8
    NOISE = 1.0

    def __init__(self, source: RowSource, seed: int) -> None:
        self._source = source
        self._seed = seed
        self._rows: dict[tuple[int, ...], Row] = {}

    def after(self, tokens: Sequence[int], count: int) -> list[Row]:
        return [self._row(tuple(tokens[: len(tokens) - count + i + 1])) for i in range(count)]

    def _row(self, prefix: tuple[int, ...]) -> Row:
        if prefix not in self._rows:
            [row] = self._source.after(prefix, 1)
            rng = np.random.default_rng((self._seed, *prefix))
            noise = rng.standard_normal(len(row), dtype=np.float32) * np.float32(self.NOISE)
            self._rows[prefix] = row * np.float32(self.SCALE) + noise
        return self._rows[prefix]

    def forget(self) -> None:
        self._rows.clear()


class CachedModel:
    """A Model with one sequence whose rows come from `rows`; limits and vocabulary are those of
    `model`. It can always rewind: nothing is computed."""

    max_sequences = 1
    rewind: RewindKind = "free"

    def __init__(self, model: Model, rows: RowSource) -> None:
        self.name = model.name
        self.vocabulary: Vocabulary = model.vocabulary
        self.context_length = self.capacity_tokens = model.context_length
        self.max_batch_tokens = model.max_batch_tokens
        self.max_rows = model.max_rows
        self._rows = rows
        self._stored: list[int] = []

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        [span] = spans
        if span.sequence != 0 or span.start != len(self._stored):
            raise BackendError(self.name, f"{span} does not follow what is stored")
        tokens = [*self._stored, *span.tokens]
        rows = self._rows.after(tokens, span.rows) if span.rows else []
        self._stored = tokens
        return [np.array(rows) if rows else np.empty((0, self.vocabulary.size), dtype=np.float32)]

    def length(self, sequence: int) -> int:
        return len(self._stored) if sequence == 0 else 0

    def truncate(self, sequence: int, length: int) -> None:
        if sequence != 0 or not 0 <= length <= len(self._stored):
            raise BackendError("truncate", f"{len(self._stored)} tokens are stored, {length} cannot be kept")
        del self._stored[length:]

    def copy(self, source: int, sequence: int, length: int) -> None:
        raise RewindUnsupported(self.name, f"{sequence} cannot take {length} tokens from {source}: it is one")

    def close(self) -> None:
        self._stored.clear()
