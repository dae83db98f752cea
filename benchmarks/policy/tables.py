"""Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Its lines and an empty one; all columns but the first are numbers."""
    yield f"| {' | '.join(header)} |"
    yield "|---" + "|---:" * (len(header) - 1) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""
