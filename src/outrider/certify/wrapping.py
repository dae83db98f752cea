"""Models and constraints that pass every call on, for those that change one of them."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.contracts import Constraint, Model, RewindKind, Vocabulary
from outrider.core.data import Logits, Mask, Span


class WrappedModel:
    """A Model that does what `inner` does."""

    def __init__(self, inner: Model) -> None:
        self.inner = inner
        self.name = inner.name
        self.vocabulary: Vocabulary = inner.vocabulary
        self.context_length = inner.context_length
        self.max_sequences = inner.max_sequences
        self.capacity_tokens = inner.capacity_tokens
        self.max_batch_tokens = inner.max_batch_tokens
        self.max_rows = inner.max_rows
        self.rewind: RewindKind = inner.rewind

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        return self.inner.decode(spans)

    def length(self, sequence: int) -> int:
        return self.inner.length(sequence)

    def truncate(self, sequence: int, length: int) -> None:
        self.inner.truncate(sequence, length)

    def copy(self, source: int, sequence: int, length: int) -> None:
        self.inner.copy(source, sequence, length)

    def close(self) -> None:
        self.inner.close()


class WrappedConstraint:
    """A Constraint that does what `inner` does."""

    def __init__(self, inner: Constraint) -> None:
        self.inner = inner

    def allowed(self, drafted: Sequence[int]) -> Mask | None:
        return self.inner.allowed(drafted)

    def permits(self, drafted: Sequence[int], tokens: Sequence[int]) -> int:
        return self.inner.permits(drafted, tokens)

    def forced(self, drafted: Sequence[int]) -> tuple[int, ...]:
        return self.inner.forced(drafted)

    def accept(self, tokens: Sequence[int]) -> None:
        self.inner.accept(tokens)

    @property
    def is_complete(self) -> bool:
        return self.inner.is_complete

    @property
    def is_accepted(self) -> bool:
        return self.inner.is_accepted
