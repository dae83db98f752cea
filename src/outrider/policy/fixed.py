"""Draft lengths that the user sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from outrider.core.contracts import Drafter, DraftRequest
from outrider.core.data import Draft, DraftWork, StepRecord, TokenEstimate
from outrider.core.errors import SettingError
from outrider.policy.forced import forced, permitted


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """The user's own draft length: the drafters are asked in order, the first offer is taken.

    `draft_max` caps the drafted tokens of a step (0 decodes plainly), not counting those that a
    constraint forces before them and after. A draft ends before a token
    whose estimated acceptance is below `p_min`; while a draft model could be asked instead, also
    below `hand_over`. A draft that is certain of its tokens and has fewer than `draft_min` is
    dropped; a sampled one is kept (see the package's docstring).

    Raises SettingError for a value out of range.
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
                raise SettingError(name, f"{value} is no probability", "Give 0 to 1.")

    def propose(
        self, drafters: Sequence[Drafter], requests: Sequence[DraftRequest], others: int = 0
    ) -> tuple[list[Draft], DraftWork]:
        """One draft per request: what a constraint forces, then the first non-empty offer in the
        order of `drafters`."""
        del others
        if self.draft_max == 0:
            return [Draft() for _ in requests], DraftWork()
        prefixes = [forced(request) for request in requests]
        requests = [_after(request, prefix) for request, prefix in zip(requests, prefixes, strict=True)]
        offers, work = self._ask(drafters, requests)
        suffixes = [forced(request, offer.tokens) for request, offer in zip(requests, offers, strict=True)]
        joined = zip(prefixes, offers, suffixes, strict=True)
        return [
            prefix + offer + suffix if prefix or suffix else offer for prefix, offer, suffix in joined
        ], work

    def _ask(
        self, drafters: Sequence[Drafter], requests: Sequence[DraftRequest]
    ) -> tuple[list[Draft], DraftWork]:
        drafts = [Draft() for _ in requests]
        work = DraftWork()
        for drafter in drafters:
            able = [
                i
                for i, request in enumerate(requests)
                if not drafts[i].tokens and request.max_tokens > 0 and request.allows(drafter)
            ]
            if not able:
                continue
            capped = [
                replace(requests[i], max_tokens=min(requests[i].max_tokens, self.draft_max)) for i in able
            ]
            # A doubtful lookup makes way for a draft model, which is asked last.
            gives_way = drafter.is_free and not drafters[-1].is_free
            p_min = max(self.p_min, self.hand_over) if gives_way else self.p_min
            offers, cost = drafter.propose(capped, _Threshold(self.draft_max, p_min))
            work += cost
            for i, offer in zip(able, offers, strict=True):
                allowed = permitted(requests[i], offer) if drafter.is_free else offer
                if allowed.probs is not None or len(allowed) >= self.draft_min:
                    drafts[i] = allowed
        return drafts, work

    def begin(self, sequence: int, prompt_tokens: int, max_tokens: int | None) -> None:
        """Nothing depends on the request."""

    def observe(self, records: Mapping[int, StepRecord]) -> None:
        """Nothing is learned."""


def _after(request: DraftRequest, prefix: Draft) -> DraftRequest:
    if not prefix.tokens:
        return request
    return replace(
        request, prefix=request.prefix + prefix.tokens, max_tokens=request.max_tokens - len(prefix)
    )


@dataclass(frozen=True, slots=True)
class _Threshold:
    """StoppingRule a draft up to a length, while the next token is likely enough."""

    draft_max: int
    p_min: float

    def should_continue(self, request: DraftRequest, drafted: Sequence[int]) -> bool:
        del request
        return len(drafted) < self.draft_max

    def accept(self, request: DraftRequest, drafted: Sequence[int], estimate: TokenEstimate) -> bool:
        del request, drafted
        return estimate.acceptance >= self.p_min

    def append_forced(self, request: DraftRequest, drafted: Sequence[int]) -> Draft:
        return forced(request, drafted)
