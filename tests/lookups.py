"""What the tests of the free drafters share: asking for a draft, and answers found by brute force."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engines import sampler
from outrider.core.contracts import Drafter, DraftRequest, StoppingRule
from outrider.core.data import Draft, DraftWork, TokenEstimate


@dataclass(frozen=True, slots=True)
class UpTo:
    """Extends to so many tokens, and keeps what it was asked."""

    wanted: int = 1000
    taken: int = 1000
    asked: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    estimates: list[TokenEstimate] = field(default_factory=list)

    def should_continue(self, request: DraftRequest, drafted: Sequence[int]) -> bool:
        assert len(drafted) < request.max_tokens
        self.asked.append(("wants", tuple(drafted)))
        return len(drafted) < self.wanted

    def accept(self, request: DraftRequest, drafted: Sequence[int], estimate: TokenEstimate) -> bool:
        assert len(drafted) < request.max_tokens
        assert 0 < estimate.acceptance < 1
        self.asked.append(("takes", tuple(drafted)))
        self.estimates.append(estimate)
        return len(drafted) < self.taken

    def append_forced(self, request: DraftRequest, drafted: Sequence[int]) -> Draft:
        del request, drafted
        return Draft()


def propose(
    drafter: Drafter,
    *,
    sequence: int = 0,
    max_tokens: int = 8,
    prefix: Sequence[int] = (),
    stopping: StoppingRule | None = None,
) -> Draft:
    """One draft for one request; checks that no model was called and that the draft is whole."""
    request = DraftRequest(sequence, max_tokens, sampler(), prefix=tuple(prefix))
    (draft,), work = drafter.propose([request], stopping or UpTo())
    assert work == DraftWork()
    assert draft.probs is None
    assert len(draft.estimates) == len(draft) <= max_tokens
    assert draft.acceptance == tuple(estimate.acceptance for estimate in draft.estimates)
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
