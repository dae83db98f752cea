"""Tiny models whose distributions are known exactly, for tests, examples and the documentation. A `FakeModel`
computes its logits from the tokens it has stored, so a span at the wrong place, a missed rewind or a mixed-up
sequence changes what it says. It holds its caller to the contract: a broken promise raises ContractBroken,
and rows of an earlier call turn into NaN."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from outrider.backends.rewinding import REWINDINGS, Rewinder
from outrider.core.contracts import PartOf, RewindKind, SavedState, check_spans
from outrider.core.data import Logits, Span
from outrider.core.errors import BackendError, RewindUnsupported

_Row = npt.NDArray[np.float32]

NextLogits = Callable[[Sequence[int]], _Row]
"""The logits of the next token, given all tokens so far."""

_NUM_REMEMBERED = 4096
"""contexts of a random language"""


class ContractBroken(AssertionError):
    """The caller broke a promise of the model contract. A bug, never a user's error."""


class FakeVocabulary:
    """One token per character, and an end token with the highest id. Text is read without the
    characters that the vocabulary lacks.

    >>> vocabulary = FakeVocabulary("ab ")
    >>> vocabulary.tokenize("a b")
    [0, 2, 1]
    >>> vocabulary.piece(1), vocabulary.piece(3), vocabulary.ends_generation(3)
    (b'b', b'', True)
    """

    kind = "characters"
    part_of: PartOf | None = None

    def __init__(self, characters: str) -> None:
        self._characters = characters
        self.size = len(characters) + 1

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        del add_special, parse_special
        return [self._characters.index(character) for character in text if character in self._characters]

    def piece(self, token: int) -> bytes:
        return b"" if token == self.size - 1 else self._characters[token].encode()

    def spelling(self, token: int) -> bytes:
        return self.piece(token) or b"<end>"

    def is_control(self, token: int) -> bool:
        return token == self.size - 1

    def ends_generation(self, token: int) -> bool:
        return token == self.size - 1


def random_logits(size: int, *, seed: int = 0, order: int = 2, scale: float = 2.0) -> NextLogits:
    """A fixed random language: normal logits that depend on the last `order` tokens alone."""

    @lru_cache(_NUM_REMEMBERED)
    def logits_after(tokens: tuple[int, ...]) -> _Row:
        return (_generator((seed, tokens)).standard_normal(size) * scale).astype(np.float32)

    return lambda tokens: logits_after(tuple(map(int, tokens[-order:]))).copy()


def _generator(key: object) -> np.random.Generator:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest))


def scripted_logits(vocabulary: FakeVocabulary, text: str) -> NextLogits:
    """A language that says `text` over and over, whatever precedes it."""
    script = vocabulary.tokenize(text)

    def next_logits(tokens: Sequence[int]) -> _Row:
        row = np.zeros(vocabulary.size, dtype=np.float32)
        row[script[len(tokens) % len(script)]] = 10.0
        return row

    return next_logits


class FakeModel:
    """A model over `next_logits`, with the KV bookkeeping of a real one. `rewind` is how it goes back, and
    `calls` are the spans of every call."""

    def __init__(
        self,
        vocabulary: FakeVocabulary,
        next_logits: NextLogits,
        *,
        name: str = "fake",
        context_length: int = 256,
        max_sequences: int = 4,
        capacity_tokens: int | None = None,
        max_batch_tokens: int = 64,
        max_rows: int = 64,
        rewind: RewindKind = "free",
    ) -> None:
        self.name = name
        self.vocabulary = vocabulary
        self.context_length = context_length
        self.max_sequences = max_sequences
        self.capacity_tokens = capacity_tokens or context_length * max_sequences
        self.max_batch_tokens = max_batch_tokens
        self.max_rows = max_rows
        self.attends_to_all = False
        # The tokens are all of its state.
        states = (lambda _sequence, _older: np.empty(0, np.uint8)), (lambda _sequence, _state: True)
        self._rewinder = Rewinder(REWINDINGS[rewind], states if rewind == "checkpoints" else None)
        self.rewinding = self._rewinder.rewinding
        self.calls: list[tuple[Span, ...]] = []
        self.fail_at_call: int | None = None
        self._next_logits = next_logits
        self._stored: dict[int, list[int]] = {}
        self._handed_out: list[Logits] = []

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        try:
            check_spans(self, spans)
        except BackendError as error:
            raise ContractBroken(str(error)) from error
        used = sum(map(len, self._stored.values())) + sum(len(span.tokens) for span in spans)
        _insist(used <= self.capacity_tokens, f"{used} tokens in a cache for {self.capacity_tokens}")
        for rows in self._handed_out:
            rows.fill(np.nan)
        self.calls.append(tuple(spans))
        if self.fail_at_call == len(self.calls):
            raise BackendError("fake model", "a failure was planned for this call")
        self._rewinder.before_call(spans)
        try:
            self._handed_out = [self._evaluate(span) for span in spans]
        except BaseException:  # what a test's `next_logits` raises
            for span in spans:
                del self._stored.get(span.sequence, [])[span.start :]
            raise
        return self._handed_out

    def _evaluate(self, span: Span) -> Logits:
        stored = self._stored.setdefault(span.sequence, [])
        rows = np.empty((span.rows, self.vocabulary.size), dtype=np.float32)
        for i, token in enumerate(span.tokens):
            stored.append(token)
            if (row := i - len(span.tokens) + span.rows) >= 0:
                rows[row] = self._next_logits(stored)
        return rows

    def length(self, sequence: int) -> int:
        _insist(0 <= sequence < self.max_sequences, f"no sequence {sequence}")
        return len(self._stored.get(sequence, ()))

    def stored(self, sequence: int) -> tuple[int, ...]:
        return tuple(self._stored.get(sequence, ()))

    def reach(self, sequence: int, length: int) -> int:
        stored = self.length(sequence)
        return length if length in (0, stored) else self._rewinder.reach(sequence, length)

    def truncate(self, sequence: int, length: int) -> None:
        _insist(0 <= length <= self.length(sequence), f"cannot truncate to {length} tokens")
        if self.reach(sequence, length) != length:
            raise RewindUnsupported(self.name, f"it has no state of after {length} tokens")
        if length < self.length(sequence):
            self._rewinder.truncated(sequence, length)
        self._stored[sequence] = self._stored.get(sequence, [])[:length]

    def copy(self, source: int, sequence: int, length: int) -> None:
        _insist(0 < length <= self.length(source), f"sequence {source} does not hold {length} tokens")
        _insist(0 <= sequence < self.max_sequences and not self.length(sequence), f"{sequence} is not empty")
        if not self._rewinder.can_copy(source, self.length(source), length):
            raise RewindUnsupported(self.name, "the state of a part of the text is not kept")
        self._rewinder.copied(source, sequence, length)
        self._stored[sequence] = self._stored[source][:length]

    def save(self, sequence: int) -> SavedState:
        length = self.length(sequence)
        _insist(length > 0, f"sequence {sequence} is empty")
        extent, states = self._rewinder.save(sequence, length)
        stored = np.array(self._stored[sequence], dtype=np.int64)
        return SavedState(extent, (stored.view(np.uint8), *states))

    def restore(self, sequence: int, state: SavedState) -> None:
        _insist(not self.length(sequence), f"sequence {sequence} is not empty")
        tokens = state.parts[0].view(np.int64).tolist()
        _insist(len(tokens) == state.extent.length <= self.context_length, "there is no room for it")
        used = sum(map(len, self._stored.values())) + len(tokens)
        _insist(used <= self.capacity_tokens, f"{used} tokens in a cache for {self.capacity_tokens}")
        self._stored[sequence] = tokens
        self._rewinder.restored(sequence, state)

    def close(self) -> None:
        self._stored.clear()


def _insist(holds: bool, message: str) -> None:
    if not holds:
        raise ContractBroken(message)
