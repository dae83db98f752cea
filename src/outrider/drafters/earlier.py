"""Looking up in earlier prompts and answers, other than the running one."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from outrider.core.data import Request
from outrider.drafters.lookup import DEPTH, ContextIndex, LookupDrafter, RunningText

_MAX_SCOPES = 64
BLOCK_TOKENS = 64  # in steps of which a text is compared with the beginnings of those that are remembered

_Texts = list[tuple[Sequence[int], list[int]]]
"""What of each text was not known before, and the keys of its blocks; the oldest first"""


class Memory:
    """The latest texts of one scope, `max_tokens` at most. A beginning that a text shares with one that is
    remembered, such as the turns so far or a system prompt, is not stored twice.

    Sorting takes long, so the newest texts have a small index of their own, which is merged into the large
    one when it has grown to an eighth of it.
    """

    def __init__(self, max_tokens: int = 200_000) -> None:
        self._max_recent = max_tokens // 8
        self._max_old = max_tokens - self._max_recent
        self._recent_texts: _Texts = []
        self._old_texts: _Texts = []
        self._keys: set[int] = set()
        self._recent: ContextIndex | None = None
        self._old: ContextIndex | None = None

    @property
    def num_tokens(self) -> int:
        return _num_tokens(self._old_texts) + _num_tokens(self._recent_texts)

    def add(self, text: Sequence[int]) -> None:
        keys = _block_keys(text)
        new = [key for key in keys if key not in self._keys]
        known = BLOCK_TOKENS * (len(keys) - len(new))
        if known == len(text):
            return
        # Something of what is known stays in front, for matches that reach across.
        text = text[max(known - DEPTH, 0) :][-self._max_old :]
        # As numbers in a row: objects, which other work left, would keep the memory around them in use.
        self._recent_texts.append((array("i", text), new))
        self._keys.update(new)
        self._recent = None
        if _num_tokens(self._recent_texts) > self._max_recent:
            self._old_texts += self._recent_texts
            self._recent_texts, self._old = [], None
            excess = self.num_tokens - self._max_old
            while excess > 0:
                oldest, keys = self._old_texts.pop(0)
                self._keys.difference_update(keys)
                excess -= len(oldest)

    def indexes(self) -> list[ContextIndex]:
        """That of the newest texts first."""
        self._recent = self._recent or ContextIndex.build([text for text, _ in self._recent_texts])
        self._old = self._old or ContextIndex.build([text for text, _ in self._old_texts])
        return [self._recent, self._old]


def _num_tokens(texts: _Texts) -> int:
    return sum(len(text) for text, _ in texts)


def _block_keys(text: Sequence[int]) -> list[int]:
    """For each whole block of a text a hash of everything up to its end."""
    keys, key = [], 0
    for end in range(BLOCK_TOKENS, len(text) + 1, BLOCK_TOKENS):
        key = hash((key, *text[end - BLOCK_TOKENS : end]))
        keys.append(key)
    return keys


class EarlierDrafter(LookupDrafter[RunningText]):
    """Drafts from the texts of earlier requests of the same scope: each scope has a `Memory`, to which every
    request that ends adds its text. Of many scopes the one used longest ago is forgotten. `memory` is that of
    requests without a scope. `recall` gives the texts of a new one, the oldest first.
    """

    name = "earlier"

    def __init__(
        self,
        memory: Memory | None = None,
        *,
        recall: Callable[[str], Iterable[Sequence[int]]] = lambda _scope: (),
    ) -> None:
        super().__init__()
        self._memories = OrderedDict({} if memory is None else {"": memory})
        self._recall = recall
        self._running: dict[int, Memory] = {}  # the memory of each sequence's scope

    def begin(self, sequence: int, request: Request) -> None:
        if request.scope not in self._memories:
            self._memories[request.scope] = Memory()
            for text in self._recall(request.scope):
                self._memories[request.scope].add(text)
        memory = self._running[sequence] = self._memories[request.scope]
        self._memories.move_to_end(request.scope)
        if len(self._memories) > _MAX_SCOPES:
            self._memories.popitem(last=False)
        memory.indexes()  # now rather than in a step
        self._texts[sequence] = RunningText(request.prompt, memory.indexes)

    def end(self, sequence: int) -> None:
        """Its text is remembered."""
        self._running.pop(sequence).add(self._texts.pop(sequence).tokens)

    def reset(self) -> None:
        """Forget every sequence, and every text for good."""
        super().reset()
        self._running.clear()
        self._memories.clear()
