"""What limits a request: the constraint of its grammar, where forced text has the tokens that the model
prefers, and the budget of its reasoning."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from outrider.core.contracts import Constraint, Model, Vocabulary
from outrider.core.data import Grammar, Mask, Request, Thought
from outrider.core.errors import SettingError
from outrider.core.sequences import DraftPath

_MAX_SEEN = 16
"""Choices that count for a token; then all of them count half, so that habits may change."""


class PreferredTokenization:
    """Which token a model chooses where a constraint forces a certain text, over all its requests: it may
    prefer others than the canonical ones (`"` and `:` instead of `":`), and mostly does so again."""

    def __init__(self) -> None:
        self._chosen: defaultdict[int, Counter[int]] = defaultdict(Counter)

    def forget(self) -> None:
        self._chosen.clear()

    def note(self, canonical: int, chosen: int) -> None:
        """Where the `canonical` token was forced, the model chose this one."""
        seen = self._chosen[canonical]
        if seen.total() >= _MAX_SEEN:
            for token in seen:
                seen[token] //= 2
        seen[chosen] += 1

    def preferred(self, canonical: int) -> int:
        """The token to expect where `canonical` is forced."""
        seen = self._chosen.get(canonical)
        if not seen:
            return canonical
        chosen, times = seen.most_common(1)[0]
        return chosen if times > seen[canonical] else canonical


class PreferredConstraint:
    """The Constraint of a request. Its forced tokens are those that the model prefers for the same text, at
    most `longest`, since the forced text is tokenized again after every token that is not the canonical one.
    The seconds of all queries are added up."""

    def __init__(self, constraint: Constraint, preferred: PreferredTokenization, longest: int = 128) -> None:
        self._constraint = constraint
        self._preferred = preferred
        self._longest = longest
        self._canonical: tuple[int, ...] = ()
        """the known canonical tokens that come next"""
        self._queries = _Stopwatch()

    def take_time(self) -> float:
        """The seconds of the queries since this was last asked."""
        spent_s, self._queries.spent_s = self._queries.spent_s, 0.0
        return spent_s

    def allowed(self, drafted: Sequence[int]) -> Mask | None:
        with self._queries:
            return self._constraint.allowed(drafted)

    def permits(self, drafted: Sequence[int], tokens: Sequence[int]) -> int:
        with self._queries:
            return self._constraint.permits(drafted, tokens)

    def forced(self, drafted: Sequence[int]) -> tuple[int, ...]:
        with self._queries:
            return self._forced(drafted)

    def _forced(self, drafted: Sequence[int]) -> tuple[int, ...]:
        found: list[int] = []
        canonical = self._constraint.forced(drafted)
        while canonical and len(found) < self._longest:
            i = next(
                (i for i, t in enumerate(canonical) if self._preferred.preferred(t) != t), len(canonical)
            )
            found += canonical[:i]
            if i == len(canonical):
                break
            token = self._preferred.preferred(canonical[i])
            if not self._constraint.permits((*drafted, *found), (token,)):
                token = canonical[i]
            found.append(token)
            canonical = self._constraint.forced((*drafted, *found))
        return tuple(found[: self._longest])

    def accept(self, tokens: Sequence[int]) -> None:
        with self._queries:
            for token in tokens:
                canonical = self._canonical or self._constraint.forced(())
                self._constraint.accept((token,))
                if canonical:
                    self._preferred.note(canonical[0], token)
                self._canonical = canonical[1:] if canonical[:1] == (token,) else ()

    @property
    def is_complete(self) -> bool:
        with self._queries:
            return self._constraint.is_complete

    @property
    def is_accepted(self) -> bool:
        return self._constraint.is_accepted


class _Stopwatch:
    spent_s = 0.0

    def __enter__(self) -> None:
        self._since_s = perf_counter()

    def __exit__(self, *_exception: object) -> None:
        self.spent_s += perf_counter() - self._since_s


def limits_of(
    request: Request,
    target: Model,
    constrain: Callable[[Grammar], Constraint] | None,
    preferred: PreferredTokenization,
) -> tuple[PreferredConstraint | None, ThoughtLimit | None]:
    """The constraint of a request, and the part of it that limits its reasoning. Raises GrammarError, and
    SettingError for a grammar without `constrain`."""
    inner: Constraint | None = None
    if request.grammar is not None:
        if constrain is None:
            raise SettingError("grammar", "this engine was made without constraints", "Give it `constrain`.")
        inner = constrain(request.grammar)
    thought = None
    if request.thought is not None and (inner is not None or request.thought.budget is not None):
        inner = thought = ThoughtLimit(request.thought, target.vocabulary, inner)
    if inner is None:
        return None, None
    return PreferredConstraint(inner, preferred, min(target.max_batch_tokens, target.max_rows)), thought


@dataclass(frozen=True, slots=True)
class _State:
    """Where a text is: `phase` says whether its reasoning may begin, has begun or is over; `tail` is the end
    of the text that may be a part of a marker; `spent` tokens were reasoning; of the forced closing
    `num_forced` tokens were written."""

    phase: str
    tail: bytes = b""
    spent: int = 0
    num_forced: int = 0


class ThoughtLimit:
    """Fulfils `core.contracts.Constraint`: what `inner` allows (None: anything), but no more reasoning than
    `Thought.budget`. The last character and a marker that has begun may still be completed. Where `inner`
    does not allow the closing, nothing is forced."""

    def __init__(self, thought: Thought, vocabulary: Vocabulary, inner: Constraint | None = None) -> None:
        self._thought = thought
        self._vocabulary = vocabulary
        self._inner = inner
        self._budget = thought.budget
        self._opener, self._closer = thought.opener.encode(), thought.closer.encode()
        self._closing = vocabulary.tokenize(thought.closing, add_special=False, parse_special=True)
        self._path = DraftPath(_State("inside" if thought.opened else "before"))

    @property
    def is_over(self) -> bool:
        """Whether no more reasoning may come and nothing else is limited."""
        state = self._path.known[0]
        return self._inner is None and state.phase == "over" and not state.num_forced

    @property
    def was_forced(self) -> bool:
        """Whether the reasoning ended because its budget was used up."""
        state = self._path.known[0]
        return state.phase != "inside" and self._budget is not None and state.spent > self._budget

    # As a constraint

    def allowed(self, drafted: Sequence[int]) -> Mask | None:
        inner = None if self._inner is None else self._inner.allowed(drafted)
        if self._ends(drafted):
            return inner
        if (token := self._demanded(drafted)) is not None:
            mask = np.zeros(self._vocabulary.size, dtype=np.bool_)
            mask[token] = True
            return mask
        barred = self._barred(self._after(drafted))
        if not barred:
            return inner
        mask = np.ones(self._vocabulary.size, dtype=np.bool_) if inner is None else inner.copy()
        mask[barred] = False
        return mask if mask.any() else inner

    def permits(self, drafted: Sequence[int], tokens: Sequence[int]) -> int:
        if self._ends(drafted):
            return 0
        number = len(tokens) if self._inner is None else self._inner.permits(drafted, tokens)
        for i in range(number):
            before = (*drafted, *tokens[:i])
            if self._ends(before):
                return i
            demanded = self._demanded(before)
            if demanded not in (None, tokens[i]) or tokens[i] in self._barred(self._after(before)):
                return i
        return number

    def forced(self, drafted: Sequence[int]) -> tuple[int, ...]:
        found: list[int] = []
        while not self._ends(drafted) and (token := self._demanded((*drafted, *found))) is not None:
            found.append(token)
        if self._inner is not None:
            after = self._inner.forced((*drafted, *found))
            found += after[: self.permits((*drafted, *found), after)]
        return tuple(found)

    def accept(self, tokens: Sequence[int]) -> None:
        if self._inner is not None:
            self._inner.accept(tokens)
        self._after(tokens)
        self._path.advance(len(tokens))

    @property
    def is_complete(self) -> bool:
        return self._inner is not None and self._inner.is_complete

    @property
    def is_accepted(self) -> bool:
        return self._inner is None or self._inner.is_accepted

    # What is demanded and barred after a text

    def _ends(self, drafted: Sequence[int]) -> bool:
        return any(map(self._vocabulary.ends_generation, drafted))

    def _demanded(self, drafted: Sequence[int]) -> int | None:
        state = self._after(drafted)
        if not state.num_forced and (not self._is_used_up(state) or self._is_cut(state.tail)):
            return None
        rest = self._closing[state.num_forced :]
        may = self._inner is None or self._inner.permits(drafted, rest) == len(rest)
        return rest[0] if may else None

    def _is_cut(self, tail: bytes) -> bool:
        """Whether a character or the closing marker has begun and may yet be completed."""
        if any(tail.endswith(self._closer[:i]) for i in range(1, len(self._closer))):
            return True
        start = next((i for i, byte in enumerate(tail) if byte & 0xC0 != 0x80), len(tail))
        try:
            tail[start:].decode()
        except UnicodeDecodeError as error:
            return error.reason == "unexpected end of data"
        return False

    def _barred(self, state: _State) -> list[int]:
        """Tokens by which reasoning would begin again after its budget is used up."""
        head = self._thought.reopens.encode()
        is_open = state.phase == "before" and not state.num_forced and head and state.tail.endswith(head)
        if not is_open or self._budget is None or state.spent < self._budget:
            return []
        rest = self._thought.opener.encode()[len(head) :].decode()
        texts = (rest[:i] for i in range(1, len(rest) + 1))
        found = (self._vocabulary.tokenize(text, add_special=False, parse_special=True) for text in texts)
        return [tokens[0] for tokens in found if len(tokens) == 1]

    # The state after a text

    def _after(self, drafted: Sequence[int]) -> _State:
        shared = self._path.shared(drafted)
        if shared < len(drafted):
            self._path.cut(shared)
        for token in drafted[shared:]:
            self._path.append(token, self._next(self._path.known[-1], token))
        return self._path.known[len(drafted)]

    def _next(self, state: _State, token: int) -> _State:
        vocabulary = self._vocabulary
        shown = vocabulary.spelling if vocabulary.is_control(token) else vocabulary.piece
        tail, spent, forced = state.tail + shown(token), state.spent, state.num_forced
        if forced or self._is_used_up(state):
            is_next = token == self._closing[forced]
            forced = (forced + 1) % len(self._closing) if is_next else 0
        if state.phase == "inside":
            head, found, rest = tail.partition(self._closer)
            if not found:
                return _State("inside", head[-len(self._closer) :], spent + 1, forced)
            return _State("before" if self._thought.reopens else "over", rest, spent + 1, forced)
        if state.phase == "before":
            return replace(self._begun(tail, spent), num_forced=forced)
        return replace(state, num_forced=forced)

    def _is_used_up(self, state: _State) -> bool:
        return state.phase == "inside" and self._budget is not None and state.spent >= self._budget

    def _begun(self, tail: bytes, spent: int) -> _State:
        if self._thought.reopens:
            head, found, rest = tail.partition(self._opener)
            if found:
                return _State("inside", rest, spent)
            return _State("before", head[-len(self._opener) :], spent)
        begun = tail.lstrip()
        if begun.startswith(self._opener):
            return _State("inside", begun[len(self._opener) :], spent)
        return _State("before" if self._opener.startswith(begun) else "over", begun, spent)
