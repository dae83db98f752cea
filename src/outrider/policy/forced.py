"""What a constraint says about drafts: tokens that must follow, and where an offer stops being allowed."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.contracts import DraftRequest
from outrider.core.data import Draft, TokenEstimate

FORCED = "grammar"
"""The source of forced tokens."""

_ESTIMATE = TokenEstimate(acceptance=0.995)
"""The text is certain, but the model may prefer another tokenization of it."""


def forced(request: DraftRequest, drafted: Sequence[int] = ()) -> Draft:
    """The tokens that the constraint forces after the request's prefix and `drafted`, as far as there is
    room after `drafted`."""
    if request.constraint is None:
        return Draft()
    room = max(request.max_tokens - len(drafted), 0)
    tokens = request.constraint.forced((*request.prefix, *drafted))[:room]
    size = len(tokens)
    return Draft(
        tokens, None, (_ESTIMATE.acceptance,) * size, (FORCED,) * size, estimates=(_ESTIMATE,) * size
    )


def permitted(request: DraftRequest, offer: Draft) -> Draft:
    """The offer as far as the constraint allows it. Only for tokens that are certain: cutting sampled ones
    for what they are would bias the output."""
    if request.constraint is None or not offer.tokens:
        return offer
    return offer.first(request.constraint.permits(request.prefix, offer.tokens))
