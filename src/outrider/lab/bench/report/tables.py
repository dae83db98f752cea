"""A table of texts: the numbers of a picture, and what the terminal prints."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

Row = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of plain texts by column, all with the same columns; those in `figures` are aligned right."""

    caption: str
    rows: Sequence[Row]
    figures: Collection[str] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """Their heads; none where there are no rows."""
        return tuple(self.rows[0]) if self.rows else ()
