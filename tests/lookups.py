"""What the tests of the free drafters share: asking for a draft, and answers found by brute force."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engines import sampler
from outrider.core.contracts import Drafter, Extend, Wish
from outrider.core.data import Draft, DraftWork, Hint


@dataclass(frozen=True, slots=True)
class UpTo:
    """Extends to so many tokens, and keeps what it was asked."""

    wanted: int = 1000
    taken: int = 1000
    asked: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    hints: list[Hint] = field(default_factory=list)

    def wants(self, wish: Wish, drafted: Sequence[int]) -> bool:
        assert len(drafted) < wish.max_tokens
        self.asked.append(("wants", tuple(drafted)))
        return len(drafted) < self.wanted

    def takes(self, wish: Wish, drafted: Sequence[int], hint: Hint) -> bool:
        assert len(drafted) < wish.max_tokens
        assert 0 < hint.acceptance < 1
        self.asked.append(("takes", tuple(drafted)))
        self.hints.append(hint)
        return len(drafted) < self.taken

    def follows(self, wish: Wish, drafted: Sequence[int]) -> Draft:
        del wish, drafted
        return Draft()


def propose(
    drafter: Drafter,
    *,
    sequence: int = 0,
    max_tokens: int = 8,
    prefix: Sequence[int] = (),
    extend: Extend | None = None,
) -> Draft:
    """One draft for one wish; checks that no model was called and that the draft is whole."""
    wish = Wish(sequence, max_tokens, sampler(), prefix=tuple(prefix))
    (draft,), work = drafter.propose([wish], extend or UpTo())
    assert work == DraftWork()
    assert draft.probs is None
    assert len(draft.hints) == len(draft) <= max_tokens
    assert draft.acceptance == tuple(hint.acceptance for hint in draft.hints)
    assert draft.sources == (drafter.name,) * len(draft)
    return draft


def ends_of(part: Sequence[int], text: Sequence[int]) -> list[int]:
    """The places in `text` where `part` ends, ascending."""
    size = len(part)
    return [end for end in range(size, len(text) + 1) if list(text[end - size : end]) == list(part)]


def longest_match(context: Sequence[int], text: Sequence[int], at_most: int = 1000) -> int:
    """The length of the longest suffix of `context` that occurs in `text`."""
    lengths = range(min(len(context), len(text), at_most), 0, -1)
    return next((size for size in lengths if ends_of(context[-size:], text)), 0)
