"""What it is worth to ask a draft model about a token that a lookup offers: do the two agree?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

__all__ = ["Probing"]

_AGREEING = 1.0
_AGREED, _DISAGREED = 0.97, 0.6
"""As measured on recorded texts: how often a model agrees for each time that the lookup is right, and how
often a token of its own is right where it does and where it does not."""
_PRESUMED = 20.0
"""tokens that these count for"""
_MEMORY = 0.99
"""weight of the older tokens"""


@dataclass(slots=True)
class Probing:
    """How a draft model's tokens compare with a lookup's, and which of them are right: sums over tokens."""

    asked: float = _PRESUMED
    """expected agreements: how likely the lookup's tokens were"""
    agreed: float = _PRESUMED * _AGREEING
    agreed_right: float = _PRESUMED * _AGREEING * _AGREED
    disagreed: float = _PRESUMED
    disagreed_right: float = _PRESUMED * _DISAGREED

    def agreement(self, chance: float) -> float:
        """The probability that the model will say the same, where the lookup's token stands with `chance`."""
        return min(chance * self.agreed / self.asked, 1.0)

    @property
    def when_agreed(self) -> float:
        """The acceptance of a token that both say."""
        return self.agreed_right / self.agreed

    @property
    def when_disagreed(self) -> float:
        """The acceptance of the model's token where the lookup says another."""
        return self.disagreed_right / self.disagreed

    def note(self, chance: float, agrees: bool, right: bool) -> None:
        """The model was asked where a lookup offered a token; its own turned out right or not."""
        for name, presumed in _BEGINNING.items():
            setattr(self, name, presumed + _MEMORY * (getattr(self, name) - presumed))
        self.asked += chance
        if agrees:
            self.agreed += 1
            self.agreed_right += right
        else:
            self.disagreed += 1
            self.disagreed_right += right

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """What `asdict` made plain data of. Raises KeyError, TypeError or ValueError."""
        probing = cls(**{name: float(data[name]) for name in _BEGINNING})
        sums = (probing.asked, probing.agreed, probing.disagreed)
        rights = (probing.agreed_right / probing.agreed, probing.disagreed_right / probing.disagreed)
        if not (all(map(math.isfinite, sums)) and min(sums) > 0 and all(0 <= p <= 1 for p in rights)):
            raise ValueError("its agreements are damaged")
        return probing


_BEGINNING = {name: getattr(Probing(), name) for name in Probing.__slots__}
