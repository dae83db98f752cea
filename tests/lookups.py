"""What the tests of the free drafters share: asking for a draft, and answers found by brute force."""

from collections.abc import Sequence
from itertools import islice

from outrider.core.contracts import Lookup
from outrider.core.data import Draft


def propose(drafter: Lookup, *, sequence: int = 0, max_tokens: int = 8, prefix: Sequence[int] = ()) -> Draft:
    """The first tokens that it offers; checks what they say of themselves."""
    draft = Draft(tuple(islice(drafter.propose(sequence, prefix), max_tokens)))
    assert draft.probs is None
    assert all(0 < acceptance < 1 for acceptance in draft.acceptance)
    assert all(len(token.evidence) == 3 for token in draft.items)
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
