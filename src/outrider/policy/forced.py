"""What a constraint says about drafts: tokens that must follow, and where an offer stops being allowed."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.contracts import Wish
from outrider.core.data import Draft, Hint

__all__ = ["FORCED", "forced", "permitted"]

FORCED = "grammar"
"""The source of forced tokens."""

_SURE = Hint(acceptance=0.995)
"""That the text must follow is certain, but the model may spell it with other tokens."""


def forced(wish: Wish, drafted: Sequence[int] = ()) -> Draft:
    """The tokens that the constraint forces behind the wish's prefix and `drafted`, as far as there is
    room behind `drafted`."""
    if wish.constraint is None:
        return Draft()
    room = max(wish.max_tokens - len(drafted), 0)
    tokens = wish.constraint.forced((*wish.prefix, *drafted))[:room]
    size = len(tokens)
    return Draft(tokens, None, (_SURE.acceptance,) * size, (FORCED,) * size, hints=(_SURE,) * size)


def permitted(wish: Wish, offer: Draft) -> Draft:
    """The offer as far as the constraint allows it. Only for tokens that are certain: cutting drawn ones
    for what they are would bias the output."""
    if wish.constraint is None or not offer.tokens:
        return offer
    size = wish.constraint.permits(wish.prefix, offer.tokens)
    if size == len(offer):
        return offer
    return Draft(
        offer.tokens[:size], None, offer.acceptance[:size], offer.sources[:size], hints=offer.hints[:size]
    )
