"""What limits a request, and which tokens a model prefers for forced text."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from time import perf_counter

from outrider.core.contracts import Constraint, Model
from outrider.core.data import Grammar, Mask, Request
from outrider.core.errors import SettingError
from outrider.engine.thought import ThoughtLimit

_MAX_SEEN = 16
"""Choices that count for a token; then all of them count half, so that habits may change."""


class PreferredTokenization:
    """Which token a model chooses where a constraint forces a certain text, over all its requests.

    The tokenizer has one canonical tokenization of a text. A model may prefer other tokens for the same
    text (`"` and `:` instead of `":`), and mostly does so again.
    """

    def __init__(self) -> None:
        self._chosen: defaultdict[int, Counter[int]] = defaultdict(Counter)

    def forget(self) -> None:
        """Forget everything: drafts then depend on no earlier request."""
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
    """Adds up the seconds spent in its blocks."""

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
