"""One request's rule: draws the drafts' tokens, judges them, and learns which kind fares better."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, Self

import numpy as np

from outrider.core.data import Distribution, Draft, Request, Verdict
from outrider.core.params import Verification
from outrider.sampling import LazyDistributions, draw, probability
from outrider.verify.noise import pick
from outrider.verify.rules import excess, verify_block, verify_lenient, verify_stable, verify_tokens

__all__ = ["Judge", "Verifier"]


class Judge(Protocol):
    """What the engine asks of a verification rule. `position` counts generated tokens."""

    @property
    def name(self) -> str:
        """The rule in force, for people."""
        ...

    @property
    def compares(self) -> bool:
        """Whether it wants to know the distributions behind certain drafts."""
        ...

    def drawing(self, position: int) -> Callable[[Distribution, int], int] | None:
        """How a draft model's tokens are drawn in this step, from `position` on; None: as certain
        as they are likeliest. Decided by earlier steps alone, or the drafts would be biased."""
        ...

    def judge(self, target: LazyDistributions, draft: Draft, position: int) -> Verdict:
        """What the target makes of a draft."""
        ...


class Overlap:
    """How much of a draft model's offers the target accepts, drawn or likeliest.

    At a position with distributions p (target) and q (draft), a drawn token stands with probability
    Σ min(p, q) and the most likely with p(argmax q). Both can be had without offering either, so the
    better kind is known after a few positions. Older positions fade.
    """

    FADE = 0.98
    """weight of a position relative to the next: about the last 50 count"""

    def __init__(self) -> None:
        self._drawn = 0.0
        self._likeliest = 0.0

    @property
    def favours_drawing(self) -> bool:
        """Whether drawn tokens were accepted more. The most likely are the first to be tried."""
        return self._drawn > self._likeliest

    def observe(self, target: Distribution, draft: Distribution) -> None:
        """One position at which both were computed."""
        best = int(draft.tokens[np.argmax(draft.probs)])
        self._drawn = self.FADE * self._drawn + 1.0 - float(excess(target, draft).sum())
        self._likeliest = self.FADE * self._likeliest + probability(target, best)


class Verifier:
    """The Judge that `verification` describes, for one request with its seed."""

    @classmethod
    def of(cls, request: Request, seed: int) -> Self:
        """The Verifier of a request."""
        return cls(request.verification, seed, greedy=request.sampling.is_greedy)

    def __init__(self, verification: Verification, seed: int, *, greedy: bool) -> None:
        self._settings = verification
        self._greedy = greedy
        self._seed = seed
        self._rng = np.random.default_rng(seed)
        self._overlap = Overlap()
        rule = verification.rule
        self._rule = ("token" if verification.is_lossy else "block") if rule == "auto" else rule

    @property
    def name(self) -> str:
        """The rule in force, for people."""
        if self._settings.is_lossy:
            return f"lossy: lenience {self._settings.lenience:g}, the text is not the target's own"
        if self._greedy:
            return "greedy: a token stands when it is the target's likeliest"
        kind = "likeliest drafts" if self._settings.draft_sampling == "greedy" else "drawn drafts"
        if self.compares:
            kind = "the better of drawn and most likely drafts"
        return {
            "token": f"token-wise rejection, {kind}",
            "block": f"block verification, {kind}",
            "stable": f"seed-stable, {kind}",
        }[self._rule]

    @property
    def compares(self) -> bool:
        """Whether drawn and most likely drafts are still being compared."""
        return self._settings.draft_sampling == "auto" and self._rule != "stable" and not self._greedy

    def drawing(self, position: int) -> Callable[[Distribution, int], int] | None:
        """How a draft model's tokens are drawn from `position` on; None: the most likely are offered."""
        wanted = self._settings.draft_sampling
        if self._greedy or wanted == "greedy":
            return None
        if wanted == "auto" and not self._overlap.favours_drawing and self._rule != "stable":
            return None
        if self._rule == "stable":
            return lambda offered, index: pick(offered, self._seed, position + index)
        return lambda offered, _index: draw(offered, self._rng)

    def judge(self, target: LazyDistributions, draft: Draft, position: int) -> Verdict:
        """What the target makes of a draft."""
        verdict = self._apply(target, draft, position)
        if self.compares:
            self._learn(target, draft, verdict)
        return verdict

    def _apply(self, target: LazyDistributions, draft: Draft, position: int) -> Verdict:
        lenience = self._settings.lenience
        if self._rule == "stable":
            return verify_stable(target, draft, lambda p, index: pick(p, self._seed, position + index))
        if self._greedy and lenience < 1:
            return verify_lenient(target.ratio, target, draft, lenience)
        # On certain drafts the block rule keeps as many tokens, and looks at more rows.
        if self._rule == "token" or draft.probs is None:
            return verify_tokens(target, draft, self._rng, lenience)
        return verify_block(target, draft, self._rng)

    def _learn(self, target: Sequence[Distribution], draft: Draft, verdict: Verdict) -> None:
        offered = draft.probs or draft.greedy_probs
        for i in range(min(len(offered), verdict.num_accepted + 1)):
            self._overlap.observe(target[i], offered[i])
