"""The lookup drafter: what followed the same tokens earlier in the prompt or in the answer.

Looking the longest match up in a suffix automaton is the idea of SAM-Decoding
(arXiv:2411.10666); letting frequency choose among its continuations is that of SuffixDecoding
(arXiv:2411.04975).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.data import Request
from outrider.core.errors import SettingError
from outrider.drafters.lookup import LookupDrafter, Match


class SuffixDrafter(LookupDrafter):
    """Drafts from a sequence's own text, without a model.

    A draft continues the longest suffix of the text (followed by the request's prefix) that
    occurred before in the text, by the token that followed it most often, and goes on from there;
    where nothing followed, shorter suffixes are tried. Matches of fewer than `min_match` tokens
    are not used: after a single token the guess is right about one time in five, after two one in
    three.

    Raises SettingError for a `min_match` below 1.
    """

    name = "lookup"

    def __init__(self, min_match: int = 2) -> None:
        if min_match < 1:
            raise SettingError("lookup min match", f"{min_match} matches anything", "Give 1 or more.")
        self._min_match = min_match
        self._texts: dict[int, _Text] = {}

    def begin(self, sequence: int, request: Request) -> None:
        """Read a prompt. If it goes on from the sequence's earlier text, as the next turn of a conversation
        does, only what is new is read; any other prompt starts afresh."""
        text = self._texts.get(sequence)
        if text is None or text.tokens != list(request.prompt[: len(text.tokens)]):
            text = self._texts[sequence] = _Text()
        text.extend(request.prompt[len(text.tokens) :])

    def observe(self, sequence: int, tokens: Sequence[int]) -> None:
        """These tokens were committed."""
        self._texts.setdefault(sequence, _Text()).extend(tokens)

    def _reader(self, sequence: int) -> _TextReader | None:
        text = self._texts.get(sequence)
        return None if text is None else _TextReader(text.automaton, self._min_match)

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

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        for token in tokens:
            self.automaton.extend(token)


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


# A suffix automaton that counts: what followed the end of a growing text, earlier in it.

NONE = -1
"""no state, or no token"""

MAX_CHAIN = 16
"""How many nested matches, the longest first, one token may be counted for. Text seldom nests
deeper; one token repeated nests as deep as it is long, and must not cost more for that."""


@dataclass(slots=True)
class Continuation:
    """The most likely next token after a state.

    `count` is how often `token` followed the state's strings, `total` how often any token did.
    `last_end` is how many tokens of the text there were when it did so last, itself included.
    """

    token: int
    count: int
    total: int
    last_end: int


class SuffixAutomaton:
    """All substrings of a growing text, with how often each token followed each of them.

    A state represents the substrings that end at the same places. Its suffix link leads to the
    longest shorter suffix that ends at further places too, so the link of the whole text's state
    is the longest suffix that occurred before: the match needs no search of its own.

    A transition was taken as often as the state it leads to has occurred, and last where that
    ended last. One count and one place per state therefore serve every transition into it, and a
    clone takes over two numbers.

    A text of n tokens needs at most 2n states. Most have a single way on: each state holds its
    most likely transition in place, and only a state that branches has a dict for the others.
    """

    __slots__ = (
        "_followed", "_last", "_last_end", "_length", "_link", "_occurrences", "_others", "_target", "_token",
    )  # fmt: skip

    def __init__(self) -> None:
        self._length = [0]
        self._link = [NONE]
        self._occurrences = [0]
        self._last_end = [0]
        self._followed = [0]
        self._token = [NONE]
        self._target = [NONE]
        self._others: dict[int, dict[int, int]] = {}
        self._last = 0

    @property
    def num_states(self) -> int:
        """States in use, the root included."""
        return len(self._length)

    @property
    def num_tokens(self) -> int:
        """The length of the text."""
        return self._length[self._last]

    @property
    def match(self) -> tuple[int, int]:
        """The state of the longest suffix that also ended at an earlier place, and its length in
        tokens: the root and 0 when the last token is new."""
        return self.shorter(self._last)

    def shorter(self, state: int) -> tuple[int, int]:
        """The longest suffix of a state's strings that occurs at further places, and its length
        in tokens. The root leads to itself."""
        link = self._link[state]
        return (link, self._length[link]) if link != NONE else (0, 0)

    def after(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The longest suffix that occurs in the text, of a suffix that does (the last `length`
        tokens, which `state` represents) and one more token; its state and length.

        Reading n tokens takes O(n + length) steps: each shortens the match, or adds a token to it.
        """
        successor = self._successor(state, token)
        while successor == NONE and state != 0:
            state, length = self.shorter(state)
            successor = self._successor(state, token)
        return (0, 0) if successor == NONE else (successor, length + 1)

    def most_likely(self, state: int) -> Continuation | None:
        """The token that followed a state most often, the latest on a tie; None when nothing
        has followed it yet.

        Counts and places are exact unless more than `MAX_CHAIN` matches nest; then the shorter
        ones miss some occurrences.
        """
        target = self._target[state]
        if target == NONE:
            return None
        count = self._occurrences[target]
        # Past MAX_CHAIN a transition can be counted for a longer match that shares its target.
        total = max(self._followed[state], count)
        return Continuation(self._token[state], count, total, self._last_end[target])

    def extend(self, token: int) -> None:
        """Append a token, a vocabulary id of 0 or more. The time is O(1) amortised."""
        new = self._add_state(self._length[self._last] + 1)
        state = self._add_where_missing(self._last, token, new)
        self._last = new
        if state == NONE:
            return
        following = self._successor(state, token)
        if self._length[following] > self._length[state] + 1:
            following = self._split(state, token, following)
        self._link[new] = following
        self._count(state, token)

    def _add_state(self, length: int) -> int:
        self._length.append(length)
        self._link.append(0)
        self._occurrences.append(1)
        self._last_end.append(length)
        self._followed.append(0)
        self._token.append(NONE)
        self._target.append(NONE)
        return len(self._length) - 1

    def _successor(self, state: int, token: int) -> int:
        if self._token[state] == token:
            return self._target[state]
        others = self._others.get(state)
        return NONE if others is None else others.get(token, NONE)

    def _add_where_missing(self, state: int, token: int, new: int) -> int:
        """Lead `state` and its shorter suffixes to `new`, up to the first that has seen the
        token before; return that one, or NONE."""
        while state != NONE and self._successor(state, token) == NONE:
            self._followed[state] += 1
            best = self._target[state]
            if best == NONE:
                self._token[state], self._target[state] = token, new
            else:
                self._others.setdefault(state, {})[token] = new
                if self._occurrences[best] == 1:
                    self._prefer(state, token)
            state = self._link[state]
        return state

    def _split(self, state: int, token: int, original: int) -> int:
        """Give those strings of `original` that now end here too a state of their own."""
        clone = self._add_state(self._length[state] + 1)
        for column in (
            self._link, self._occurrences, self._last_end, self._followed, self._token, self._target,
        ):  # fmt: skip
            column[clone] = column[original]
        if original in self._others:
            self._others[clone] = self._others[original].copy()
        self._link[original] = clone
        while state != NONE and self._successor(state, token) == original:
            if self._token[state] == token:
                self._target[state] = clone
            else:
                self._others[state][token] = clone
            state = self._link[state]
        return clone

    def _count(self, state: int, token: int) -> None:
        """Note that the token followed `state` and its shorter suffixes once more."""
        counted, end = NONE, self._length[self._last]
        for _ in range(MAX_CHAIN):
            self._followed[state] += 1
            target = self._successor(state, token)
            if target != counted:
                self._occurrences[target] += 1
                self._last_end[target] = end
                counted = target
            if self._occurrences[target] >= self._occurrences[self._target[state]]:
                self._prefer(state, token)
            state = self._link[state]
            if state == NONE:
                return

    def _prefer(self, state: int, token: int) -> None:
        """Hold the transition on `token` in place of the one held so far."""
        held = self._token[state]
        if token != held:
            others = self._others[state]
            others[held] = self._target[state]
            self._token[state], self._target[state] = token, others.pop(token)
