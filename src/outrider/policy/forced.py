"""What a constraint says about drafts: tokens that must follow, and where an offer stops being allowed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outrider.core.contracts import DraftRequest
from outrider.core.data import DraftToken

FORCED = "grammar"
"""The source of forced tokens."""

_ACCEPTANCE = 0.995
"""The text is certain, but the model may prefer another tokenization of it."""


def ids(tokens: Iterable[DraftToken]) -> tuple[int, ...]:
    """The tokens alone."""
    return tuple([token.token for token in tokens])


def forced(request: DraftRequest, drafted: Sequence[int] = ()) -> list[DraftToken]:
    """The tokens that the constraint forces after `drafted`, as far as there is room for them."""
    if request.constraint is None:
        return []
    room = max(request.max_tokens - len(drafted), 0)
    tokens = request.constraint.forced(tuple(drafted))[:room]
    return [DraftToken(token, FORCED, _ACCEPTANCE, (_ACCEPTANCE,)) for token in tokens]


def permitted(
    request: DraftRequest, drafted: Sequence[int], offer: Sequence[DraftToken]
) -> Sequence[DraftToken]:
    """The offer after `drafted` as far as the constraint allows it. Only for point masses: cutting sampled
    tokens for what they are would bias the output."""
    if request.constraint is None or not offer:
        return offer
    return offer[: request.constraint.permits(tuple(drafted), [token.token for token in offer])]
