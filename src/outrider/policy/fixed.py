"""Draft lengths that the user sets, and what drafts of any policy share: how a draft model's grow, and what a
constraint says about them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Protocol

from outrider.core.contracts import Drafters, DraftInput, DraftModel, DraftRequest
from outrider.core.data import Draft, DraftToken, DraftWork, StepRecord
from outrider.core.errors import SettingError

FORCED = "grammar"  # the source of forced tokens
_FORCED_ACCEPTANCE = 0.995  # the text is certain, but the model may prefer another tokenization of it


def ids(tokens: Iterable[DraftToken]) -> tuple[int, ...]:
    """The tokens alone."""
    return tuple([token.token for token in tokens])


def forced(request: DraftRequest, drafted: Sequence[int] = ()) -> list[DraftToken]:
    """The tokens that the constraint forces after `drafted`, as far as there is room for them."""
    if request.constraint is None:
        return []
    room = max(request.max_tokens - len(drafted), 0)
    tokens = request.constraint.forced(tuple(drafted))[:room]
    return [DraftToken(token, FORCED, _FORCED_ACCEPTANCE, (_FORCED_ACCEPTANCE,)) for token in tokens]


def permitted(request: DraftRequest, drafted: Sequence[int], offer: list[DraftToken]) -> list[DraftToken]:
    """The offer after `drafted` as far as the constraint allows it. Only for point masses: cutting sampled
    tokens for what they are would bias the output."""
    if request.constraint is None or not offer:
        return offer
    return offer[: request.constraint.permits(tuple(drafted), ids(offer))]


class Growing(Protocol):
    """A draft under construction."""

    request: DraftRequest

    def next_input(self) -> DraftInput: ...

    def take(self, offers: Iterable[DraftToken]) -> bool:
        """Decide on what the model offers after `next_input`; whether it is asked again. A sampled token may
        be left out for its distribution and for the tokens before it, never for what it is."""


def grow(model: DraftModel, drafts: Sequence[Growing]) -> DraftWork:
    """Let a draft model offer tokens until every draft has ended; returns what that cost."""
    model_round = model.start([draft.request for draft in drafts])
    growing = {draft.request.sequence: draft for draft in drafts}
    while growing:
        offers = model_round.step({sequence: draft.next_input() for sequence, draft in growing.items()})
        growing = {s: draft for s, draft in growing.items() if draft.take(offers.get(s, ()))}
    return model_round.work


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """The user's own draft length: lookups are asked in order, then the draft model; the first offer is
    taken.

    Raises SettingError for a value out of range.

    Args:
        draft_max: The most drafted tokens of a step (0 decodes plainly), not counting those that a constraint
            forces before them and after.
        p_min: A draft ends before a token whose estimated acceptance is below this.
        hand_over: The same for lookups while a draft model could be asked instead.
    """

    draft_max: int = 8
    p_min: float = 0.65
    hand_over: float = 0.7

    def __post_init__(self) -> None:
        if self.draft_max < 0:
            raise SettingError("draft max", f"{self.draft_max} is negative", "Give 0 (off) or more.")
        for name, value in (("draft p-min", self.p_min), ("hand over", self.hand_over)):
            if not 0 <= value <= 1:
                raise SettingError(name, f"{value} is not a probability", "Give 0 to 1.")

    def propose(
        self, drafters: Drafters, requests: Sequence[DraftRequest], others: int = 0
    ) -> tuple[list[Draft], DraftWork]:
        """One draft per request: what a constraint forces, then the first offer that is not empty."""
        del others
        if self.draft_max == 0:
            return [Draft() for _ in requests], DraftWork()
        drafts = [_FixedDraft(request, self) for request in requests]
        asking = [draft for draft in drafts if draft.look_up(drafters.for_request(draft.request.drafting))]
        work = grow(drafters.model, asking) if drafters.model is not None and asking else DraftWork()
        return [draft.finish() for draft in drafts], work

    def begin(self, sequence: int, prompt_tokens: int, max_tokens: int | None) -> None: ...

    def observe(self, records: Mapping[int, StepRecord]) -> None: ...


class _FixedDraft:
    """One request's draft: what a constraint forces; then a drafter's tokens, and what is forced between
    them."""

    def __init__(self, request: DraftRequest, policy: FixedPolicy) -> None:
        self.request, self.policy = request, policy
        self.tokens = forced(request)
        self.num_forced = len(self.tokens)
        self._room = max(min(request.max_tokens - self.num_forced, policy.draft_max), 0)
        self._asks_model = False

    def look_up(self, drafters: Drafters) -> bool:
        """Take the first offer of a lookup; whether the draft model is to be asked, since there is none or a
        doubtful one."""
        has_model, prefix = drafters.model is not None, ids(self.tokens)
        p_min = max(self.policy.p_min, self.policy.hand_over) if has_model else self.policy.p_min
        for lookup in drafters.lookups:
            offers = islice(lookup.propose(self.request.sequence, prefix), self._room)
            likely = list(takewhile(lambda token: token.acceptance >= p_min, offers))
            offer = permitted(self.request, prefix, likely)
            if offer:
                self.tokens += offer
                return False
        self._asks_model = has_model and self._room > 0
        return self._asks_model

    def next_input(self) -> DraftInput:
        return DraftInput(ids(self.tokens))

    def take(self, offers: Iterable[DraftToken]) -> bool:
        offer = next(iter(offers), None)
        if offer is None or offer.acceptance < self.policy.p_min:
            return False
        self.tokens.append(offer)
        if self.request.constraint is not None:
            self.tokens += forced(self.request, ids(self.tokens))
        return len(self.tokens) - self.num_forced < self._room

    def finish(self) -> Draft:
        if self._asks_model or len(self.tokens) == self.num_forced:
            return Draft(tuple(self.tokens))
        return Draft((*self.tokens, *forced(self.request, ids(self.tokens))))
