"""What a picture is: panels of inline SVG, one sentence that says what they show, and their numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.lab.bench.report.tables import Table
from outrider.lab.drawing import MARKERS, SERIES, STYLES


@dataclass(frozen=True, slots=True)
class Panel:
    """One drawing."""

    title: str
    svg: str


@dataclass(frozen=True, slots=True)
class Picture:
    """Panels that belong together."""

    id: str
    title: str
    finding: str
    """the main finding in figures, one sentence"""
    reading: str
    """how to read it"""
    panels: tuple[Panel, ...]
    table: Table


@dataclass(frozen=True, slots=True)
class Missing:
    """A picture that has nothing to show, and why."""

    title: str
    why: str


def series(number: int) -> dict[str, Any]:
    """How the points of a series are drawn: its colour and its marker."""
    return {"color": SERIES[number % len(SERIES)], "marker": MARKERS[number % len(MARKERS)]}


def line(number: int) -> dict[str, Any]:
    """How the line of a series is drawn: its colour and its style."""
    return {"color": SERIES[number % len(SERIES)], "linestyle": STYLES[number % len(STYLES)]}
