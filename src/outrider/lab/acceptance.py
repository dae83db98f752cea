"""How often a draft model's most likely token is the target's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.lab.replay import Recording
from outrider.lab.statistics import Interval, share_of

POSITIONS = 8
"""Places of a draft that are counted separately."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How often the draft's most likely token is the answer's: over all positions, and at the first,
    second, … place of a draft, those before it being right (None: never met)."""

    rate: Interval
    positions: int
    by_position: tuple[float | None, ...]


def acceptance_of(recordings: Sequence[Recording], name: str) -> Acceptance:
    """The acceptance of the draft model's offers on at least one answer that is not empty."""
    hits = [
        [ours == theirs for ours, theirs in zip(r.offers[name].tokens, r.tokens, strict=True)]
        for r in recordings
    ]
    met, right = [0] * POSITIONS, [0] * POSITIONS
    for answer in hits:
        for start in range(len(answer)):
            for place, hit in enumerate(answer[start : start + POSITIONS]):
                met[place] += 1
                right[place] += hit
                if not hit:
                    break
    return Acceptance(
        rate=share_of([sum(answer) for answer in hits], [len(answer) for answer in hits]),
        positions=sum(map(len, hits)),
        by_position=tuple(r / m if m else None for r, m in zip(right, met, strict=True)),
    )
