"""Looking up: what all lookups share, and the lookup in a sequence's own text.

Prompt lookup (Saxena, 2023) with the longest match, and frequency to choose among its continuations as in
SuffixDecoding (arXiv:2411.04975).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import ClassVar, Generic, NamedTuple, Protocol, TypeVar

from outrider.core.data import DraftToken, Request

MIN_MATCH = 2
"""tokens: after a single one the guess is right about one time in five, after two one in three"""
ALONG = 8
"""Of the places that go on as a draft does, the latest so many are looked at for its next token."""
_DOUBT, _DOUBT_DECAY = 5.0, 1.5
"""Phantom misses against a match of one token, and the power of the match length by which they fade. They
minimise the log-loss on a replay over Python sources and English prose."""


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


T = TypeVar("T", bound=Text)


class LookupDrafter(ABC, Generic[T]):
    """A drafter that looks up what may come next. It keeps a text of each running sequence."""

    name: ClassVar[str]
    is_free = True

    def __init__(self) -> None:
        self._texts: dict[int, T] = {}

    @abstractmethod
    def begin(self, sequence: int, request: Request) -> None: ...

    def observe(self, sequence: int, tokens: Sequence[int]) -> None:
        if (text := self._texts.get(sequence)) is not None:
            text.extend(tokens)

    def end(self, sequence: int) -> None:
        self._texts.pop(sequence, None)

    def reset(self) -> None:
        self._texts.clear()

    @abstractmethod
    def _reader(self, sequence: int) -> Reader: ...

    def propose(self, sequence: int, prefix: Sequence[int]) -> Iterator[DraftToken]:
        """What follows the committed text and `prefix`; nothing where nothing matches."""
        if sequence not in self._texts:
            return
        reader = self._reader(sequence)
        for token in prefix:
            reader.read(token)
        while (match := reader.find()) is not None:
            evidence = (float(match.length), float(match.right), float(match.total))
            yield DraftToken(match.token, self.name, match.acceptance, evidence)
            reader.read(match.token)


class Index(Protocol):
    """Texts in which the places after a run of tokens can be found."""

    def search(self, text: Sequence[int], min_length: int) -> tuple[list[int], int]:
        """Places after the longest suffix of `text` that something followed, the latest first, and its length
        in tokens; no places where it is shorter than `min_length`."""

    def follower(self, place: int) -> int:
        """The token at a place; negative where a text ends."""

    def next(self, place: int) -> int:
        """The place after the token at a place."""


class IndexReader:
    """The end of a text and what is drafted after it, looked up where the longest match is.

    Of the places after that match the latest `ALONG` stay that go on as the draft does; when none is left, or
    nothing follows any of them, the match is searched again. Of equal matches that in the first index counts,
    and those of fewer than `min_match` tokens are not used. `text` has the last tokens, up to `depth`.
    """

    __slots__ = ("_depth", "_followers", "_index", "_indexes", "_length", "_min_match", "_places", "_recent")

    def __init__(self, indexes: Sequence[Index], text: Sequence[int], min_match: int, depth: int) -> None:
        self._indexes, self._index = indexes, indexes[0]
        self._recent = list(text)
        self._min_match, self._depth = min_match, depth
        self._places: list[int] = []
        self._followers: list[int] = []
        self._length = 0

    def read(self, token: int) -> None:
        self._recent.append(token)
        if self._places:
            reached = zip(self._places, self._followers, strict=True)
            self._go_to([self._index.next(place) for place, follower in reached if follower == token][:ALONG])
            self._length += 1

    def find(self) -> Match | None:
        if not self._places:
            recent, places, self._length = self._recent[-self._depth :], list[int](), 0
            for index in self._indexes:
                found, length = index.search(recent, self._min_match)
                if length > self._length:
                    places, self._length, self._index = found, length, index
            self._go_to(places)
        if not self._places:
            return None
        followers = self._followers
        best, count, total = followers[0], followers.count(followers[0]), len(followers)
        if count < total:
            ((best, count),) = Counter(followers).most_common(1)  # of several that of the latest place
        return Match(best, self._length, count, total)

    def _go_to(self, places: list[int]) -> None:
        """Keep those of these places that something follows."""
        follower = self._index.follower
        followers = [follower(place) for place in places]
        if followers and min(followers) < 0:
            places = [place for place, token in zip(places, followers, strict=True) if token >= 0]
            followers = [token for token in followers if token >= 0]
        self._places, self._followers = places, followers


# In a text itself

_RUNS = (16, 6, 3, 2, 1)  # lengths of the runs that are indexed, the longest first
_SAMPLE = 32  # places that are looked at of those after a run, the latest
_DEPTH = 64  # tokens of the longest match whose length is known


class TextIndex:
    """A growing text, and where runs of a few lengths ended in it. A place is a number of tokens: what
    follows it is the token of that index.

    The longest run that is found again leads to the places whose match is then measured token by token, so
    that adding a token takes a few entries in a table, and a search a look at `_SAMPLE` places.
    """

    __slots__ = ("_ends", "_runs", "tokens")

    def __init__(self, min_match: int) -> None:
        self.tokens: list[int] = []
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
        del min_length  # the shortest run
        for run in self._runs:
            ends = self._ends.get(tuple(text[-run:])) if run <= len(text) else None
            latest = [end for end in ends[: -_SAMPLE - 2 : -1] if end < len(self.tokens)] if ends else []
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
        return self.tokens[place] if place < len(self.tokens) else -1

    def next(self, place: int) -> int:
        return place + 1


class SuffixDrafter(LookupDrafter[TextIndex]):
    """Drafts from a sequence's own text, without a model.

    A draft continues the longest suffix of the text (followed by what others drafted) that occurred before in
    the text, by the token that followed it most often, and goes on from there. Matches of fewer than
    `min_match` tokens are not used.
    """

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

    def _reader(self, sequence: int) -> IndexReader:
        text = self._texts[sequence]
        return IndexReader([text], text.tokens[-_DEPTH:], self._min_match, _DEPTH)
