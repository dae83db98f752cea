"""One request's verification: how draft tokens are sampled, which are accepted, and which kind of draft is
accepted more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import numpy as np

from outrider.core.data import Distribution, Draft, Request, Verdict
from outrider.core.params import Verification
from outrider.sampling import LazyDistributions, draw, probability
from outrider.verify.rules import excess, pick, verify_block, verify_choices, verify_tokens

_FIRST_COMPARED, _COMPARED_EVERY = 64, 4
"""So many positions are compared in every step, those after them in one of so many steps."""
_FADE = 0.98  # weight of a position relative to the next: about the last 50 count


class Verifier:
    """The rule that `verification` describes, for one request with its seed. A position counts generated
    tokens.

    Which of a draft model's tokens are accepted more often, sampled or most likely ones, it finds out: at a
    position with distributions p (target) and q (draft), a sampled token is accepted with probability
    Σ min(p, q), the most likely one with p(argmax q). Both follow from p and q without drafting either, so
    the better kind is known after a few positions.
    """

    @classmethod
    def of(cls, request: Request, seed: int) -> Self:
        return cls(request.verification, seed, greedy=request.sampling.is_greedy)

    def __init__(self, verification: Verification, seed: int, *, greedy: bool) -> None:
        self._settings, self._greedy, self._seed = verification, greedy, seed
        self._rng = np.random.default_rng(seed)
        self._sampled_accepted = self._most_likely_accepted = 0.0
        self._num_compared = self._num_steps = 0
        self._rule = "block" if verification.rule == "auto" else verification.rule

    @property
    def name(self) -> str:
        """The rule in force, for people."""
        if self._greedy:
            return "greedy: a token is accepted when it is the target's most likely"
        kind = "most likely drafts" if self._settings.draft_sampling == "greedy" else "sampled drafts"
        if self._chooses:
            kind = "the better of sampled and most likely drafts"
        rules = {"token": "token-wise rejection", "block": "block verification", "stable": "seed-stable"}
        return f"{rules[self._rule]}, {kind}"

    @property
    def _chooses(self) -> bool:
        """Whether it is to find out which drafts are accepted more."""
        return self._settings.draft_sampling == "auto" and self._rule != "stable" and not self._greedy

    @property
    def compares(self) -> bool:
        """Whether sampled and most likely drafts are compared in this step: in every one at first, then in
        some, since a distribution for each drafted token takes as long as verifying it."""
        is_due = self._num_compared < _FIRST_COMPARED or self._num_steps % _COMPARED_EVERY == 0
        return self._chooses and is_due

    def drawing(self, position: int) -> Callable[[Distribution, int], int] | None:
        """How a draft model's tokens are sampled in this step, from `position` on; None: its most likely
        tokens, as point masses. Decided by earlier steps alone, or the drafts would be biased."""
        if self._greedy or self._settings.draft_sampling == "greedy":
            return None
        if self._rule == "stable":
            return lambda offered, index: pick(offered, self._seed, position + index)
        if self._chooses and self._sampled_accepted <= self._most_likely_accepted:
            return None
        return lambda offered, _index: draw(offered, self._rng)

    def verify(self, target: LazyDistributions, draft: Draft, position: int) -> Verdict:
        verdict = self._apply(target, draft, position)
        if self.compares:
            self._learn(target, draft, verdict)
        self._num_steps += 1
        return verdict

    def _apply(self, target: LazyDistributions, draft: Draft, position: int) -> Verdict:
        if self._greedy:
            return verify_choices(target.choice, draft.tokens)
        if self._rule == "stable":
            return verify_choices(lambda i: pick(target[i], self._seed, position + i), draft.tokens)
        # On point-mass drafts the block rule accepts as many tokens, and reads more rows.
        if self._rule == "token" or draft.probs is None:
            return verify_tokens(target, draft, self._rng)
        return verify_block(target, draft, self._rng)

    def _learn(self, target: Sequence[Distribution], draft: Draft, verdict: Verdict) -> None:
        offered = draft.compared_probs
        count = min(len(offered), verdict.num_accepted + 1)
        self._num_compared += count
        for i in range(count):
            p, q = target[i], offered[i]
            best = int(q.tokens[q.probs.argmax()])
            self._sampled_accepted = _FADE * self._sampled_accepted + 1.0 - float(excess(p, q).sum())
            self._most_likely_accepted = _FADE * self._most_likely_accepted + probability(p, best)
