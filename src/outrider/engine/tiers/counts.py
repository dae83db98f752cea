"""What became of texts whose KV left a model, and what calls, copies and files took."""

from __future__ import annotations

from dataclasses import dataclass, field

_DECAY = 0.9
"""weight of all earlier observations beside the last one"""


@dataclass(slots=True)
class Rate:
    """Seconds of a unit, by what real calls took: the last ones weigh most."""

    units: float = 0.0
    seconds: float = 0.0

    def note(self, units: float, seconds: float) -> None:
        self.units = self.units * _DECAY + units
        self.seconds = self.seconds * _DECAY + seconds

    def of(self, units: float, unknown: float) -> float:
        """Seconds of so many units; so much a unit where nothing is known."""
        return units * (self.seconds / self.units if self.units else unknown)


@dataclass(slots=True)
class TierCounts:
    """What became of texts: by tier ("memory", "disk") how often one was restored, and what is there."""

    hits: dict[str, int] = field(default_factory=lambda: {"memory": 0, "disk": 0})
    restored_tokens: dict[str, int] = field(default_factory=lambda: {"memory": 0, "disk": 0})
    num_bytes: dict[str, int] = field(default_factory=lambda: {"memory": 0, "disk": 0})
    misses: int = 0
    """requests that found nothing to restore"""
    kept: int = 0
    not_written: int = 0
    refused: int = 0
    """files and copies that turned out to be of no use"""
