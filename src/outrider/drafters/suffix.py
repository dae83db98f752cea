"""The lookup drafter: what followed the same tokens earlier in the prompt or in the answer.

Prompt lookup (Saxena, 2023) with the longest match, and frequency to choose among its continuations as in
SuffixDecoding (arXiv:2411.04975).
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.data import Request
from outrider.drafters.lookup import MIN_MATCH, IndexReader, LookupDrafter

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
