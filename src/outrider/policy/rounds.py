"""A draft model's drafts grow, token by token, one call for all sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.core.contracts import DraftModel, DraftRequest
from outrider.core.data import DraftToken, DraftWork


class Growing(Protocol):
    """A draft under construction."""

    @property
    def request(self) -> DraftRequest: ...

    @property
    def prefix(self) -> Sequence[int]:
        """Tokens before the model's own."""

    def take(self, offer: DraftToken) -> Sequence[int] | None:
        """Decide on the model's next token: what the model has to read before another one, the token and what
        is forced after it; None where the draft ends, with the token or without it.

        A sampled token may be left out for the distribution that it was sampled from, never for what it is.
        """


def grow(model: DraftModel, drafts: Sequence[Growing]) -> DraftWork:
    """Let a draft model offer tokens until every draft has ended; returns what that cost."""
    model_round = model.start([draft.request for draft in drafts], [draft.prefix for draft in drafts])
    open_drafts = {draft.request.sequence: draft for draft in drafts}
    unread: dict[int, Sequence[int]] = dict.fromkeys(open_drafts, ())
    while unread:
        offers = model_round.step(unread)
        taken = {sequence: open_drafts[sequence].take(offer) for sequence, offer in offers.items()}
        unread = {sequence: tokens for sequence, tokens in taken.items() if tokens is not None}
    return model_round.work
