"""What is remembered of a running request."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.core.data import Draft
from outrider.policy.acceptance import TextState
from outrider.policy.growth import Chain

__all__ = ["Asked", "Text"]


@dataclass(slots=True)
class Asked:
    """What a draft model was asked in a step, and what it said."""

    model: str
    lead: tuple[int, ...]
    """free tokens in front of its own"""
    exploring: bool
    """whether it was asked in order to find out"""
    offer: Draft = field(default_factory=Draft)
    chances: list[float] = field(default_factory=list)
    """of every token it found, whether or not it was taken"""
    phases: list[float] = field(default_factory=list)
    """before each of these"""


@dataclass(slots=True)
class Text:
    """A request as far as it has come."""

    prompt_tokens: int
    max_tokens: int | None
    phase: float
    generated: int = 0
    states: dict[str, TextState] = field(default_factory=dict)
    readers: set[str] = field(default_factory=set)
    """draft models that have read the prompt"""
    unread: dict[str, int] = field(default_factory=dict)
    """tokens that a draft model has yet to read before it can draft, by its name"""
    spent_s: float = 0.0
    earned: float = 0.0
    """tokens that were emitted for it; older ones count less in both"""
    decoded_s: float = 0.0
    explored_s: float = 0.0
    """of it, what went to finding out what a draft model is worth"""
    behind: float = 0.0
    """how much longer than plain decoding it took so far, in plain steps"""
    offered: Chain = field(default_factory=Chain)
    """what the free drafters offered in the present step"""
    asked: Asked | None = None
    """what a draft model was asked in the present step"""
    is_constrained: bool = False
    rest_left: int = 0
    """steps in which draft models need not be weighed"""
    usual_gain_s: dict[str, float] = field(default_factory=dict)
    """what asking a draft model was last expected to gain where free drafters offered nothing"""

    @property
    def context(self) -> int:
        """Tokens so far."""
        return self.prompt_tokens + self.generated

    def state(self, name: str) -> TextState:
        """What a drafter's offers to this text have been worth."""
        return self.states.setdefault(name, TextState())
