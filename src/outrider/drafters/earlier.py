"""Looking up in earlier prompts and answers, other than the running one."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Protocol

from outrider.core.data import Request
from outrider.drafters.lookup import IndexReader, LookupDrafter, Match
from outrider.drafters.suffix_array import DEPTH, ContextIndex

MAX_TOKENS = 200_000
"""what a memory holds"""
RECENT_RATIO = 1 / 8
"""of a memory, what is indexed again with every text that is added"""
MAX_SCOPES = 64
BLOCK_TOKENS = 64
"""in steps of which a text is compared with the beginnings of those that are remembered"""

Part = tuple[Sequence[int], Sequence[int]]
"""A text, or what of it was not known before, and the keys of its blocks."""


class KeptTexts(Protocol):
    """Where memories outlive a process, by scope."""

    def recall(self, scope: str) -> Sequence[Part]:
        """The texts of a scope, the oldest first; none where there are none."""

    def keep(self, scope: str, texts: Sequence[Part]) -> None:
        """Keep these texts of a scope, and no others."""

    def forget(self) -> None:
        """Forget the texts of all scopes."""


class Memory:
    """The latest texts of one scope, `max_tokens` at most. A beginning that a text shares with one that is
    remembered, such as the turns so far or a system prompt, is not stored twice.

    Sorting takes long, so the newest texts have a small index of their own, which is merged into the large
    one when it has grown to `RECENT_RATIO` of it.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_recent = int(max_tokens * RECENT_RATIO)
        self._max_old = max_tokens - self._max_recent
        self._old, self._recent = _Shelf(), _Shelf()

    @property
    def num_tokens(self) -> int:
        return self._old.num_tokens + self._recent.num_tokens

    def add(self, text: Sequence[int]) -> None:
        """Remember a text."""
        known, keys = 0, []
        for key in _block_keys(text):
            if key in self._old.keys or key in self._recent.keys:
                known += BLOCK_TOKENS
            else:
                keys.append(key)
        if known == len(text):
            return
        # Something of what is known stays in front, for matches that reach across.
        part = text[max(known - DEPTH, 0) :][-self._max_old :]
        self._recent.append(part, keys)
        if self._recent.num_tokens > self._max_recent:
            for item in self._recent.texts:
                self._old.append(*item)
            self._old.shrink(self._max_old)
            self._recent = _Shelf()

    @property
    def parts(self) -> list[Part]:
        """All texts, as `recall` takes them."""
        return [(list(text), keys) for text, keys in (*self._old.texts, *self._recent.texts)]

    def recall(self, parts: Sequence[Part]) -> None:
        """Remember what another memory did, in place of what this one does."""
        self._old, self._recent = _Shelf(), _Shelf()
        for text, keys in parts:
            self._old.append(text, keys)
        self._old.shrink(self._max_old)

    def indexes(self) -> list[ContextIndex]:
        """Every index, the newest first."""
        return [shelf.index() for shelf in (self._recent, self._old) if shelf.num_tokens]


class _Shelf:
    """Some texts in their order, and their index."""

    def __init__(self) -> None:
        self.texts: deque[Part] = deque()
        """each with the keys of its blocks, the oldest first"""
        self.keys: set[int] = set()
        self._index: ContextIndex | None = None
        self.num_tokens = 0

    def append(self, text: Sequence[int], keys: Sequence[int]) -> None:
        # As numbers in a row: objects, which other work left, would keep the memory around them in use.
        self.texts.append((array("i", text), keys))
        self.keys.update(keys)
        self.num_tokens += len(text)
        self._index = None

    def shrink(self, max_tokens: int) -> None:
        """Drop the oldest texts."""
        while self.num_tokens > max_tokens:
            text, keys = self.texts.popleft()
            self.keys.difference_update(keys)
            self.num_tokens -= len(text)
            self._index = None

    def index(self) -> ContextIndex:
        if self._index is None:
            self._index = ContextIndex.build([text for text, _ in self.texts])
        return self._index


def _block_keys(text: Sequence[int]) -> list[int]:
    """For each whole block of a text a hash of everything up to its end."""
    keys, key = [], 0
    for end in range(BLOCK_TOKENS, len(text) + 1, BLOCK_TOKENS):
        key = hash((key, *text[end - BLOCK_TOKENS : end]))
        keys.append(key)
    return keys


class EarlierDrafter(LookupDrafter):
    """Drafts from the texts of earlier requests of the same scope: each scope has a `Memory`, to which every
    request that ends adds its text. Of more than `max_scopes` the one used longest ago is forgotten. `memory`
    is that of requests without a scope. `kept` has the memories of earlier drafters, and gets these when they
    are forgotten and at the end (`keep`).
    """

    name = "earlier"

    def __init__(
        self,
        memory: Memory | None = None,
        *,
        min_match: int = 2,
        max_scopes: int = MAX_SCOPES,
        kept: KeptTexts | None = None,
    ) -> None:
        super().__init__()
        self._memories = OrderedDict({} if memory is None else {"": memory})
        self._kept = kept
        self._max_scopes = max_scopes
        self._min_match = min_match
        self._running: dict[int, Memory] = {}
        """the memory of each sequence's scope"""

    def begin(self, sequence: int, request: Request) -> None:
        super().begin(sequence, request)
        if request.scope not in self._memories:
            self._memories[request.scope] = Memory()
            if self._kept is not None:
                self._memories[request.scope].recall(self._kept.recall(request.scope))
        memory = self._memories[request.scope]
        self._memories.move_to_end(request.scope)
        if len(self._memories) > self._max_scopes:
            self._keep(*self._memories.popitem(last=False))
        memory.indexes()  # now rather than in a step
        self._running[sequence] = memory

    def _reader(self, sequence: int) -> _Longest:
        text, indexes = self._texts[sequence], self._running[sequence].indexes()
        return _Longest([index.reader(text, self._min_match) for index in indexes])

    def end(self, sequence: int) -> None:
        """Its text is remembered."""
        self._running.pop(sequence).add(self._texts.pop(sequence))

    def keep(self) -> None:
        """Let the texts outlive this drafter, where it was made so."""
        for scope, memory in self._memories.items():
            self._keep(scope, memory)

    def _keep(self, scope: str, memory: Memory) -> None:
        if self._kept is not None and memory.num_tokens:
            self._kept.keep(scope, memory.parts)

    def reset(self) -> None:
        """Forget every sequence, and every text for good."""
        super().reset()
        self._running.clear()
        self._memories.clear()
        if self._kept is not None:
            self._kept.forget()


class _Longest:
    """Several readers as one: the longest match counts, the first of several."""

    def __init__(self, readers: Sequence[IndexReader]) -> None:
        self._readers = readers

    def read(self, token: int) -> None:
        for reader in self._readers:
            reader.read(token)

    def find(self) -> Match | None:
        matches = [match for reader in self._readers if (match := reader.find())]
        return max(matches, key=lambda match: match.length, default=None)
