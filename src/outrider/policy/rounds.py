"""A draft model's drafts grow, one call for all sequences after the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from outrider.core.contracts import DraftInput, DraftModel, DraftRequest
from outrider.core.data import DraftToken, DraftWork


class Growing(Protocol):
    """A draft under construction."""

    @property
    def request(self) -> DraftRequest: ...

    def next_input(self) -> DraftInput:
        """What the model reads next."""

    def take(self, offers: Iterable[DraftToken]) -> bool:
        """Decide on what the model offers after `next_input`; whether it is asked again.

        A sampled token may be left out for the distribution that it was sampled from and for the tokens
        before it, never for what it is.
        """


def grow(model: DraftModel, drafts: Sequence[Growing]) -> DraftWork:
    """Let a draft model offer tokens until every draft has ended; returns what that cost."""
    model_round = model.start([draft.request for draft in drafts])
    growing = {draft.request.sequence: draft for draft in drafts}
    while growing:
        offers = model_round.step({sequence: draft.next_input() for sequence, draft in growing.items()})
        growing = {
            sequence: draft for sequence, draft in growing.items() if draft.take(offers.get(sequence, ()))
        }
    return model_round.work
