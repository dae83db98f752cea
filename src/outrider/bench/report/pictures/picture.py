"""What a picture is: panels of inline SVG, one sentence that says what they show, and their numbers."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.bench.report.tables import Table


@dataclass(frozen=True, slots=True)
class Panel:
    """One drawing."""

    title: str
    svg: str
    is_broad: bool = False
    """too wide for a phone to show at once"""


@dataclass(frozen=True, slots=True)
class Picture:
    """Panels that belong together. `more` are shown on demand; `key` explains numbered marks."""

    id: str
    title: str
    finding: str
    """the main finding in figures, one sentence"""
    reading: str
    """how to read it"""
    panels: tuple[Panel, ...]
    table: Table
    more: tuple[Panel, ...] = ()
    key: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Missing:
    """A picture that has nothing to show, and why."""

    title: str
    why: str
