"""The bits of a target's logits: noted while texts are generated, and compared between two runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from outrider.core.contracts import Model, RewindKind, Vocabulary
from outrider.core.data import Logits, Span

__all__ = ["ComparedRows", "NotingModel", "compare_rows"]

Rows = Mapping[tuple[int, ...], bytes]
"""A digest of the logits' bits after each prefix of a text, prompt included."""


@dataclass(frozen=True, slots=True)
class ComparedRows:
    """At how many positions two runs' logits were compared, at how many their bits differ, and the first
    of these, in generated tokens (None where none does)."""

    positions: int
    differing: int
    first: int | None

    @property
    def holds(self) -> bool:
        """Whether all bits are equal."""
        return self.differing == 0


def compare_rows(ours: Rows, theirs: Rows, num_prompt: int) -> ComparedRows:
    """Compare the rows after every prefix that both runs evaluated, from a prompt of so many tokens on."""
    shared = [prefix for prefix in theirs if prefix in ours and len(prefix) >= num_prompt]
    differing = sorted(len(prefix) - num_prompt for prefix in shared if ours[prefix] != theirs[prefix])
    return ComparedRows(len(shared), len(differing), differing[0] if differing else None)


class NotingModel:
    """A Model that gives what `inner` gives, and notes the bits of every row in `rows`."""

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
        self.rows: dict[tuple[int, ...], bytes] = {}
        self._stored: dict[int, list[int]] = {}

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        try:
            found = self.inner.decode(spans)
        except BaseException:  # a failing call may have forgotten some of what was stored
            for span in spans:
                self._forget(span.sequence, self.inner.length(span.sequence))
            raise
        for span, logits in zip(spans, found, strict=True):
            stored = self._stored.setdefault(span.sequence, [])
            stored.extend(span.tokens)
            for i, row in enumerate(logits, len(stored) - len(logits) + 1):
                self.rows[tuple(stored[:i])] = blake2b(row.tobytes(), digest_size=16).digest()
        return found

    def _forget(self, sequence: int, length: int) -> None:
        del self._stored.get(sequence, [])[length:]

    def length(self, sequence: int) -> int:
        return self.inner.length(sequence)

    def truncate(self, sequence: int, length: int) -> None:
        self.inner.truncate(sequence, length)
        self._forget(sequence, length)

    def copy(self, source: int, sequence: int, length: int) -> None:
        self.inner.copy(source, sequence, length)
        self._stored[sequence] = self._stored.get(source, [])[:length]

    def close(self) -> None:
        self.inner.close()
