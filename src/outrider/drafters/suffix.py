"""The lookup drafter: what followed the same tokens earlier in the prompt or in the answer.

Looking the longest match up in a suffix automaton is the idea of SAM-Decoding
(arXiv:2411.10666); letting frequency choose among its continuations is that of SuffixDecoding
(arXiv:2411.04975).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outrider.core.contracts import DraftRequest, StoppingRule
from outrider.core.data import Draft, DraftWork, Request
from outrider.core.errors import SettingError
from outrider.drafters.automaton import SuffixAutomaton
from outrider.drafters.lookup import Match, grow


class SuffixDrafter:
    """Drafts from a sequence's own text, without a model.

    A draft continues the longest suffix of the text (followed by the request's prefix) that
    occurred before in the text, by the token that followed it most often, and goes on from there;
    where nothing followed, shorter suffixes are tried. Matches of fewer than `min_match` tokens
    are not used: after a single token the guess is right about one time in five, after two one in
    three. Its tokens are point masses.

    Raises SettingError for a `min_match` below 1.
    """

    name = "lookup"
    is_free = True

    def __init__(self, min_match: int = 2) -> None:
        if min_match < 1:
            raise SettingError("lookup min match", f"{min_match} matches anything", "Give 1 or more.")
        self._min_match = min_match
        self._texts: dict[int, _Text] = {}

    def begin(self, sequence: int, request: Request) -> None:
        """Take in a prompt. If it goes on from the sequence's earlier text, as the next turn of
        a conversation does, only what is new is read; any other prompt starts afresh."""
        text = self._texts.get(sequence)
        if text is None or not text.begins(request.prompt):
            text = self._texts[sequence] = _Text()
        text.extend(request.prompt[len(text.tokens) :])

    def observe(self, sequence: int, tokens: Sequence[int]) -> None:
        """Take in tokens that became final."""
        self._texts.setdefault(sequence, _Text()).extend(tokens)

    def propose(
        self, requests: Sequence[DraftRequest], stopping: StoppingRule
    ) -> tuple[list[Draft], DraftWork]:
        """One draft per request, empty where nothing matches; no model is called for it."""
        return [self._draft(request, stopping) for request in requests], DraftWork()

    def _draft(self, request: DraftRequest, stopping: StoppingRule) -> Draft:
        text = self._texts.get(request.sequence)
        if text is None:
            return Draft()
        return grow(_TextReader(text.automaton, self._min_match), request, stopping, self.name)

    def end(self, sequence: int) -> None:
        """Nothing is given up: the next prompt of the sequence may go on from this text."""

    def reset(self) -> None:
        """Forget every sequence."""
        self._texts.clear()


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


class _TextReader:
    """The end of a text and what is drafted after it, as a place in the text's automaton."""

    __slots__ = ("_automaton", "_min_match", "_place", "_position")

    def __init__(self, automaton: SuffixAutomaton, min_match: int) -> None:
        self._automaton = automaton
        self._min_match = min_match
        self._place = automaton.match
        self._position = automaton.num_tokens

    def read(self, token: int) -> None:
        self._place = self._automaton.after(*self._place, token)
        self._position += 1

    def find(self) -> Match | None:
        state, length = self._place
        while length >= self._min_match:
            likely = self._automaton.most_likely(state)
            if likely is not None:
                # Along a copied run the distance stays the same: both ends move on together.
                age = self._position + 1 - likely.last_end
                return Match(likely.token, length, likely.count, likely.total, age)
            state, length = self._automaton.shorter(state)
        return None
