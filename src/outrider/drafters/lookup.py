"""Looking up: what all lookups share, the indexes that they search, and the lookup in a sequence's own text.

Prompt lookup (Saxena, 2023) with the longest match, and frequency to choose among its continuations as in
SuffixDecoding (arXiv:2411.04975).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from struct import Struct
from typing import ClassVar, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from outrider.core.data import DraftToken, Request

MIN_MATCH = 2  # tokens: after a single one the guess is right about one time in five, after two one in three
ALONG = 8  # of the places that go on as a draft does, so many of the latest are looked at for its next token
# Phantom misses against a match of one token, and the power of the match length by which they fade. They
# minimise the log-loss on a replay over Python sources and English prose.
_DOUBT, _DOUBT_DECAY = 5.0, 1.5


class Match(NamedTuple):
    """The most likely token after the longest match: the last `length` tokens were found, `total` times with
    something after them, and `right` times that was `token`."""

    token: int
    length: int
    right: int
    total: int

    @property
    def acceptance(self) -> float:
        """The share, smoothed by misses that were not seen: the fewer, the longer the match."""
        return self.right / (self.total + _DOUBT / math.pow(self.length, _DOUBT_DECAY))


class Reader(Protocol):
    """A place in something that can be looked up in; reading changes nothing but the place."""

    def read(self, token: int) -> None:
        """Go on by one token, whether or not it is the one that was found."""

    def find(self) -> Match | None:
        """What is most likely to come next; None where nothing matches."""


class Text(Protocol):
    """What a lookup keeps of a running sequence."""

    def extend(self, tokens: Sequence[int], /) -> None: ...

    def reader(self) -> Reader:
        """A reader at the end of the text."""


T = TypeVar("T", bound=Text)


class LookupDrafter(Generic[T]):
    """A drafter that looks up what may come next, in the text that `begin` keeps of each sequence."""

    name: ClassVar[str]
    is_free = True

    def __init__(self) -> None:
        self._texts: dict[int, T] = {}

    def observe(self, sequence: int, tokens: Sequence[int]) -> None:
        if (text := self._texts.get(sequence)) is not None:
            text.extend(tokens)

    def end(self, sequence: int) -> None:
        self._texts.pop(sequence, None)

    def reset(self) -> None:
        self._texts.clear()

    def propose(self, sequence: int, prefix: Sequence[int]) -> Iterator[DraftToken]:
        """What follows the committed text and `prefix`; nothing where nothing matches."""
        if sequence not in self._texts:
            return
        reader = self._texts[sequence].reader()
        for token in prefix:
            reader.read(token)
        while (match := reader.find()) is not None:
            evidence = (float(match.length), float(match.right), float(match.total))
            yield DraftToken(match.token, self.name, match.acceptance, evidence)
            reader.read(match.token)


class IndexReader:
    """The end of a text and what is drafted after it, looked up where the longest match is.

    Of the places after that match the latest `ALONG` stay that go on as the draft does; when none is left, or
    nothing follows any of them, the match is searched again. Of equal matches that in the first index counts.
    Matches of fewer than `min_match` tokens are not used, those of more than `depth` not told apart.
    """

    __slots__ = ("_depth", "_found", "_index", "_indexes", "_length", "_min_match", "_recent")

    def __init__(
        self,
        indexes: Sequence[TextIndex | ContextIndex],
        text: Sequence[int],
        min_match: int,
        depth: int,
    ) -> None:
        self._indexes, self._index = indexes, indexes[0]
        self._recent = list(text[-depth:])
        self._min_match, self._depth = min_match, depth
        self._found: list[tuple[int, int]] = []  # places, and the tokens there
        self._length = 0

    def read(self, token: int) -> None:
        self._recent.append(token)
        if self._found:
            step = self._index.step
            self._go_to([place + step for place, follower in self._found if follower == token][:ALONG])
            self._length += 1

    def find(self) -> Match | None:
        if not self._found:
            recent, places, self._length = self._recent[-self._depth :], list[int](), 0
            for index in self._indexes:
                found, length = index.search(recent, self._min_match)
                if length > self._length:
                    places, self._length, self._index = found, length, index
            self._go_to(places)
        if not self._found:
            return None
        followers = [token for _, token in self._found]
        best, count, total = followers[0], followers.count(followers[0]), len(followers)
        if count < total:
            ((best, count),) = Counter(followers).most_common(1)  # of several that of the latest place
        return Match(best, self._length, count, total)

    def _go_to(self, places: list[int]) -> None:
        """Keep those of these places that something follows."""
        follower = self._index.follower
        self._found = [(place, token) for place in places if (token := follower(place)) >= 0]


# In a text itself

_RUNS = (16, 6, 3, 2, 1)  # lengths of the runs that are indexed, the longest first
_LATEST = 32  # places that are looked at of those after a run
_DEPTH = 64  # tokens of the longest match whose length is known


class TextIndex:
    """A growing text, and where runs of a few lengths ended in it. A place is a number of tokens: what
    follows it is the token of that index.

    The longest run that is found again leads to the places whose match is then measured token by token, so
    that adding a token takes a few entries in a table, and a search a look at `_LATEST` places.
    """

    __slots__ = ("_ends", "_min_match", "_runs", "tokens")
    step = 1  # from a place to the one after it

    def __init__(self, min_match: int) -> None:
        self.tokens: list[int] = []
        self._min_match = min_match
        self._runs = [run for run in _RUNS if run >= min_match] or [min_match]
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        text = self.tokens
        for token in tokens:
            text.append(token)
            for run in self._runs:
                if run <= len(text):
                    self._ends.setdefault(tuple(text[-run:]), []).append(len(text))

    def search(self, text: Sequence[int], min_length: int) -> tuple[list[int], int]:
        """Places after the longest suffix of `text` that something followed, the latest first, and its length
        in tokens; no places where it is shorter than `min_length`."""
        del min_length  # the shortest run
        for run in self._runs:
            ends = self._ends.get(tuple(text[-run:])) if run <= len(text) else None
            latest = [end for end in ends[: -_LATEST - 2 : -1] if end < len(self.tokens)] if ends else []
            if latest:
                lengths = [self._agreement(text, end, run) for end in latest]
                longest = max(lengths)
                return [end for end, n in zip(latest, lengths, strict=True) if n == longest], longest
        return [], 0

    def _agreement(self, text: Sequence[int], end: int, known: int) -> int:
        """How many of the last tokens of `text` precede a place, of which so many are known to."""
        own, most = self.tokens, min(len(text), end)
        while known < most and own[end - known - 1] == text[-known - 1]:
            known += 1
        return known

    def follower(self, place: int) -> int:
        """The token at a place; negative where a text ends."""
        return self.tokens[place] if place < len(self.tokens) else -1

    def reader(self) -> IndexReader:
        return IndexReader([self], self.tokens, self._min_match, _DEPTH)


class SuffixDrafter(LookupDrafter[TextIndex]):
    """Drafts from a sequence's own text: what followed the longest suffix of it that occurred before, of at
    least `min_match` tokens, most often."""

    name = "lookup"

    def __init__(self, min_match: int = MIN_MATCH) -> None:
        super().__init__()
        self._min_match = min_match

    def begin(self, sequence: int, request: Request) -> None:
        """Read a prompt. If it goes on from the sequence's earlier text, as the next turn of a conversation
        does, only what is new is read; any other prompt starts afresh."""
        text = self._texts.get(sequence)
        if text is None or text.tokens != list(request.prompt[: len(text.tokens)]):
            text = self._texts[sequence] = TextIndex(self._min_match)
        text.extend(request.prompt[len(text.tokens) :])

    def end(self, sequence: int) -> None:
        """Nothing is given up: the next prompt of the sequence may go on from this text."""


# In other texts, sorted by what precedes each token: the longest match is one binary search, in O(log n) and
# without any state. It is a suffix array of the reversed texts (Manber and Myers 1993).

DEPTH = 32
"""tokens of context that places are sorted by: the longest match that is distinguished from longer ones"""
SAMPLE = 32  # places that are looked at of those that match, evenly spread over them
BORDER = 0  # separates texts and surrounds them all; tokens are stored plus one
BYTES = 4  # of a stored token, the most significant first: stored contexts compare as their bytes do
_CONTEXT = Struct(f">{DEPTH}I")
_AFTER_ALL = b"\xff"

Laid = npt.NDArray[np.uint32]
Places = npt.NDArray[np.int32]
OnRound = Callable[[int, int], None]
"""Called with the rounds of sorting that are done, and how many there are."""


def _lay_out(texts: Sequence[npt.ArrayLike]) -> Laid:
    """The texts as an index stores them: the last first and each from its end, `BORDER` between."""
    parts: list[npt.NDArray[np.uint32]] = [np.array([BORDER], np.uint32)]
    for text in reversed(texts):
        parts += [np.asarray(text, np.uint32)[::-1] + np.uint32(1), parts[0]]
    laid: Laid = np.concatenate([*parts, np.full(DEPTH, BORDER, np.uint32)])
    return laid.astype(">u4")


def _sort_contexts(laid: Laid, on_round: OnRound) -> Places:
    """The places that something follows, sorted by the `DEPTH` tokens from each on (backwards): by two first,
    then by twice as many in each round, of which the ranks of the last round are halves; only those that are
    still tied are sorted again. About 40 bytes a token."""
    n, rounds = len(laid), DEPTH.bit_length() - 1
    keys = laid.astype(np.int64)
    keys[:-1] = keys[:-1] << 32 | keys[1:]
    order = np.argsort(keys).astype(np.int32)
    tied, keys = np.arange(n, dtype=np.int32), keys[order]
    ranks = np.zeros(n + DEPTH, np.int32)
    for done in range(1, rounds):
        on_round(done, rounds)
        # A place's rank is the first slot of the order with an equal key.
        new = np.ones(len(keys) + 1, np.bool_)
        new[1:-1] = keys[1:] != keys[:-1]
        ranks[order[tied]] = np.maximum.accumulate(np.where(new[:-1], tied, np.int32(0)))
        tied = tied[~(new[:-1] & new[1:])]
        places = order[tied]
        keys = ranks[places].astype(np.int64) << 32 | ranks[places + 2**done]
        by_key = np.argsort(keys).astype(np.int32)
        order[tied], keys = places[by_key], keys[by_key]
    follows = (laid[order] != BORDER) & (laid[order - 1] != BORDER)
    sorted_places: Places = order[follows]
    return sorted_places


class ContextIndex:
    """Texts, laid out, and the sorted places in them."""

    step = -1  # they are stored from their ends

    def __init__(self, stored: bytes, places: Places) -> None:
        self.stored = stored
        self.places = places.data  # single items of a memoryview cost less than those of an array

    @classmethod
    def build(cls, texts: Sequence[npt.ArrayLike], on_round: OnRound = lambda *_: None) -> ContextIndex:
        """Index texts in memory; the last is the newest."""
        laid = _lay_out(texts)
        return cls(laid.tobytes(), _sort_contexts(laid, on_round))

    def search(self, text: Sequence[int], min_length: int = 1) -> tuple[list[int], int]:
        """At most `SAMPLE` places, and a length of at most `DEPTH`."""
        recent = text[: -DEPTH - 1 : -1]
        pattern = _CONTEXT.pack(*[token + 1 for token in recent], *[BORDER] * (DEPTH - len(recent)))
        places, context = self.places, self._context
        found = bisect_left(places, pattern, key=context)
        nearest = places[max(found - 1, 0) : found + 1]  # the two that agree with it longest
        length = max((_agreement(pattern, context(place)) for place in nearest), default=0)
        length = min(length, len(recent))
        if length < min_length:
            return [], length
        pattern = pattern[: length * BYTES]
        first = bisect_left(places, pattern, 0, found, key=context)
        end = bisect_left(places, pattern + _AFTER_ALL, found, key=context)
        step = max((end - first) // SAMPLE, 1)
        return sorted(places[first:end:step].tolist()[:SAMPLE]), length

    def _context(self, place: int) -> bytes:
        return self.stored[place * BYTES : (place + DEPTH) * BYTES]

    def follower(self, place: int) -> int:
        return int.from_bytes(self.stored[(place - 1) * BYTES : place * BYTES]) - 1


def _agreement(one: bytes, other: bytes) -> int:
    """How many tokens two contexts of the same size begin with in common."""
    differing = (int.from_bytes(one) ^ int.from_bytes(other)).bit_length()
    return len(one) // BYTES - -(-differing // (8 * BYTES))


class RunningText:
    """A text that is looked up in others, whose `indexes` are asked for at every draft."""

    def __init__(self, tokens: Sequence[int], indexes: Callable[[], Sequence[ContextIndex]]) -> None:
        self.tokens = list(tokens)
        self._indexes = indexes

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(tokens)

    def reader(self) -> IndexReader:
        return IndexReader(self._indexes(), self.tokens, MIN_MATCH, DEPTH)
