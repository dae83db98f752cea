"""Draft lengths that the user sets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

from outrider.core.contracts import Drafters, DraftInput, DraftRequest
from outrider.core.data import Draft, DraftToken, DraftWork, StepRecord
from outrider.core.errors import SettingError
from outrider.policy.forced import forced, permitted
from outrider.policy.rounds import grow


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """The user's own draft length: lookups are asked in order, then the draft model; the first offer is
    taken.

    Raises SettingError for a value out of range.

    Args:
        draft_max: The most drafted tokens of a step (0 decodes plainly), not counting those that a constraint
            forces before them and after.
        draft_min: A draft of point masses that has fewer tokens is dropped; a sampled one is kept (see the
            package's docstring).
        p_min: A draft ends before a token whose estimated acceptance is below this.
        hand_over: The same for lookups while a draft model could be asked instead.
    """

    draft_max: int = 8
    draft_min: int = 0
    p_min: float = 0.65
    hand_over: float = 0.7

    def __post_init__(self) -> None:
        if self.draft_max < 0:
            raise SettingError("draft max", f"{self.draft_max} is negative", "Give 0 (off) or more.")
        if not 0 <= self.draft_min <= self.draft_max:
            raise SettingError(
                "draft min", f"{self.draft_min} is out of range", f"Give 0 to draft max ({self.draft_max})."
            )
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
        for draft in drafts:
            draft.look_up(drafters.for_request(draft.request.drafting))
        asking = [draft for draft in drafts if draft.asks_model]
        work = grow(drafters.model, asking) if drafters.model is not None and asking else DraftWork()
        return [draft.finish() for draft in drafts], work

    def begin(self, sequence: int, prompt_tokens: int, max_tokens: int | None) -> None:
        """Nothing depends on the request."""

    def observe(self, records: Mapping[int, StepRecord]) -> None:
        """Nothing is learned."""


@dataclass(slots=True)
class _FixedDraft:
    """One request's draft."""

    request: DraftRequest
    policy: FixedPolicy
    forced: list[DraftToken] = field(init=False)
    """before the drafters' own tokens"""
    own: list[DraftToken] = field(default_factory=list)
    """a drafter's, and what is forced between them"""
    asks_model: bool = False

    def __post_init__(self) -> None:
        self.forced = forced(self.request)

    @property
    def prefix(self) -> list[int]:
        return [token.token for token in self.forced]

    @property
    def _room(self) -> int:
        return min(self.request.max_tokens - len(self.forced), self.policy.draft_max)

    def look_up(self, drafters: Drafters) -> None:
        """Take the first offer of a lookup; a doubtful one makes way for a draft model."""
        has_model = drafters.model is not None
        p_min = max(self.policy.p_min, self.policy.hand_over) if has_model else self.policy.p_min
        for lookup in drafters.lookups:
            likely = takewhile(
                lambda token: token.acceptance >= p_min, lookup.propose(self.request.sequence, self.prefix)
            )
            offer = permitted(self.request, self.prefix, list(islice(likely, max(self._room, 0))))
            if offer and len(offer) >= self.policy.draft_min:
                self.own = list(offer)
                return
        self.asks_model = has_model and self._room > 0

    def next_input(self) -> DraftInput:
        return DraftInput((*self.prefix, *(token.token for token in self.own)))

    def take(self, offers: Iterable[DraftToken]) -> bool:
        offer = next(iter(offers), None)
        if offer is None or offer.acceptance < self.policy.p_min:
            return False
        self.own.append(offer)
        if self.request.constraint is not None:
            self.own += forced(self.request, [*self.prefix, *(token.token for token in self.own)])
        return len(self.own) < self._room

    def finish(self) -> Draft:
        if self.asks_model and len(self.own) < self.policy.draft_min:
            self.own = self.own if any(token.drawn_from for token in self.own) else []
        found = [*self.forced, *self.own]
        if self.asks_model or not self.own:
            return Draft(tuple(found))
        return Draft((*found, *forced(self.request, [token.token for token in found])))
