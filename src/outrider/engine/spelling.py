"""How a model spells text that has only one way to go on: learned from what it did."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from outrider.core.contracts import Constraint
from outrider.core.data import Mask

_MAX_SEEN = 16
"""Choices that count for a token; then all of them count half, so that habits may change."""


class Spelling:
    """Which token a model chooses where a constraint would have a certain one, over all its requests.

    The usual tokens of a forced text are a matter of the tokenizer. A model may prefer others for the
    same text (`"` and `:` where `":` is usual), and mostly does so again.
    """

    def __init__(self) -> None:
        self._chosen: defaultdict[int, Counter[int]] = defaultdict(Counter)

    def forget(self) -> None:
        """Know nothing again. What is drafted then depends on no earlier request."""
        self._chosen.clear()

    def note(self, usual: int, chosen: int) -> None:
        """Where `usual` was forced, the model chose this token."""
        seen = self._chosen[usual]
        if seen.total() >= _MAX_SEEN:
            for token in seen:
                seen[token] //= 2
        seen[chosen] += 1

    def preferred(self, usual: int) -> int:
        """The token to expect where `usual` is forced."""
        seen = self._chosen.get(usual)
        if not seen:
            return usual
        chosen, times = seen.most_common(1)[0]
        return chosen if times > seen[usual] else usual


class Spelled:
    """A Constraint whose forced tokens are those that the model is known to prefer for the same text: the
    first `longest` of them, for a text is worked out anew behind every token that is not the usual one."""

    def __init__(self, constraint: Constraint, spelling: Spelling, longest: int = 128) -> None:
        self._constraint = constraint
        self._spelling = spelling
        self._longest = longest
        self._usual: tuple[int, ...] = ()
        """what is known already of the usual tokens that come next"""

    def allowed(self, drafted: Sequence[int]) -> Mask | None:
        return self._constraint.allowed(drafted)

    def permits(self, drafted: Sequence[int], tokens: Sequence[int]) -> int:
        return self._constraint.permits(drafted, tokens)

    def forced(self, drafted: Sequence[int]) -> tuple[int, ...]:
        found: list[int] = []
        usual = self._constraint.forced(drafted)
        while usual and len(found) < self._longest:
            behind = (*drafted, *found)
            i = next((i for i, t in enumerate(usual) if self._spelling.preferred(t) != t), len(usual))
            found += usual[:i]
            if i == len(usual):
                break
            token = self._spelling.preferred(usual[i])
            if not self._constraint.permits((*behind, *usual[:i]), (token,)):
                token = usual[i]
            found.append(token)
            usual = self._constraint.forced((*drafted, *found))
        return tuple(found[: self._longest])

    def accept(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            usual = self._usual or self._constraint.forced(())
            self._constraint.accept((token,))
            if usual:
                self._spelling.note(usual[0], token)
            self._usual = usual[1:] if usual[:1] == (token,) else ()

    @property
    def is_complete(self) -> bool:
        return self._constraint.is_complete

    @property
    def is_accepted(self) -> bool:
        return self._constraint.is_accepted
