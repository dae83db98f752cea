"""What all lookups share: what they find, how good it is, and the draft that is made from it."""

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
    nothing follows any of them, the match is searched again.

    Args:
        indexes: Where to look; of equal matches that in the first counts.
        text: The last tokens of the text, `depth` at most.
        min_match: Shorter matches are not used.
        depth: The longest match whose length is known, in tokens.
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
