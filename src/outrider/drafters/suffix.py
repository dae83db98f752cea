"""The lookup drafter: what followed the same tokens earlier in the prompt or in the answer.

Looking the longest match up in a suffix automaton is the idea of SAM-Decoding
(arXiv:2411.10666); letting frequency choose among its continuations is that of SuffixDecoding
(arXiv:2411.04975).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from outrider.core.contracts import Extend, Wish
from outrider.core.data import Draft, DraftWork
from outrider.core.errors import SettingError
from outrider.drafters.automaton import Continuation, SuffixAutomaton

__all__ = ["SuffixDrafter", "estimate"]

DOUBT = 5.0
"""phantom misses against a match of one token"""

DOUBT_DECAY = 1.5
"""power of the match length by which they fade"""


def estimate(match_length: int, count: int, total: int) -> float:
    """The probability that a token is accepted which followed a match of `match_length` tokens
    `count` out of `total` times (1 or more, each).

    It is `count / (total + DOUBT / match_length ** DOUBT_DECAY)`: the share, smoothed as Laplace
    did by events that were not seen, here misses only, and the fewer the longer the match. It
    rises with the match length and with the share and stays below 1. The constants minimise the
    log-loss on the drafts of a replay over Python sources and English prose.
    """
    return count / (total + DOUBT / math.pow(match_length, DOUBT_DECAY))


class SuffixDrafter:
    """Drafts from a sequence's own text, without a model.

    A draft continues the longest suffix of the text that occurred before, by the token that
    followed it most often, and goes on from there; where nothing followed, shorter suffixes are
    tried. Matches of fewer than `min_match` tokens are not used: after a single token the guess
    is right about one time in five, after two one in three. Tokens are proposed as certain.

    Raises SettingError for a `min_match` below 1.
    """

    def __init__(self, min_match: int = 2) -> None:
        if min_match < 1:
            raise SettingError("lookup min match", f"{min_match} matches anything", "Give 1 or more.")
        self._min_match = min_match
        self._texts: dict[int, _Text] = {}

    @property
    def name(self) -> str:
        """The source that its tokens are credited to."""
        return "lookup"

    def begin(self, sequence: int, tokens: Sequence[int]) -> None:
        """Take in a prompt. If it goes on from the sequence's earlier text, as the next turn of
        a conversation does, only what is new is read; any other prompt starts afresh."""
        text = self._texts.get(sequence)
        if text is None or not text.begins(tokens):
            text = self._texts[sequence] = _Text()
        text.extend(tokens[len(text.tokens) :])

    def observe(self, sequence: int, tokens: Sequence[int]) -> None:
        """Take in tokens that became final."""
        self._texts.setdefault(sequence, _Text()).extend(tokens)

    def propose(self, wishes: Sequence[Wish], extend: Extend) -> tuple[list[Draft], DraftWork]:
        """One draft per wish, empty where nothing matches; no model is called for it."""
        return [self._draft(wish, extend) for wish in wishes], DraftWork()

    def end(self, sequence: int) -> None:
        """Nothing is given up: the next prompt of the sequence may go on from this text."""

    def reset(self) -> None:
        """Forget every sequence."""
        self._texts.clear()

    def _draft(self, wish: Wish, extend: Extend) -> Draft:
        text = self._texts.get(wish.sequence)
        if text is None:
            return Draft()
        state, match_length = text.automaton.match
        tokens: list[int] = []
        acceptance: list[float] = []
        for num_drafted in range(wish.max_tokens):
            found = self._look_up(text.automaton, state, match_length)
            if found is None:
                break
            likely, match_length = found
            chance = estimate(match_length, likely.count, likely.total)
            if not extend(num_drafted, chance):
                break
            tokens.append(likely.token)
            acceptance.append(chance)
            state, match_length = likely.successor, match_length + 1
        return Draft(tuple(tokens), None, tuple(acceptance), (self.name,) * len(tokens))

    def _look_up(
        self, automaton: SuffixAutomaton, state: int, match_length: int
    ) -> tuple[Continuation, int] | None:
        """What follows the longest match that anything followed, and that match's length."""
        while match_length >= self._min_match:
            likely = automaton.most_likely(state)
            if likely is not None:
                return likely, match_length
            state, match_length = automaton.shorter(state)
        return None


class _Text:
    """One sequence's tokens and their automaton."""

    __slots__ = ("automaton", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.automaton = SuffixAutomaton()

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            self.automaton.extend(token)

    def begins(self, tokens: Sequence[int]) -> bool:
        """Whether `tokens` start with this text."""
        return self.tokens == list(tokens[: len(self.tokens)])
