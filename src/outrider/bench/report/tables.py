"""A table of texts: what stands behind a picture, and what the terminal prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.lab.numbers import escape

__all__ = ["Table"]


@dataclass(frozen=True, slots=True)
class Table:
    """Columns and rows of plain texts. Columns named in `figures` hold numbers and stand to the right."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    figures: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        caption: str,
        columns: Sequence[str],
        rows: Iterable[Sequence[str]],
        *,
        figures: Iterable[str] = (),
    ) -> Table:
        """A table of any sequences of texts."""
        return cls(caption, tuple(columns), tuple(tuple(row) for row in rows), frozenset(figures))

    def html(self) -> str:
        """As a table element in a box of its own, which scrolls where it is wider than the page."""
        head = "".join(f"<th scope='col'{self._mark(name)}>{escape(name)}</th>" for name in self.columns)
        body = "\n".join(f"<tr>{self._cells(row)}</tr>" for row in self.rows)
        label = escape(self.caption)
        return (
            f"<div class='wide' role='region' tabindex='0' aria-label='{label}'><table>\n"
            f"<caption>{label}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
        )

    def _cells(self, row: Sequence[str]) -> str:
        cells = zip(self.columns, row, strict=True)
        first, *others = [(self._mark(name), escape(text)) for name, text in cells]
        head = f"<th scope='row'{first[0]}>{first[1]}</th>"
        return head + "".join(f"<td{mark}>{text}</td>" for mark, text in others)

    def _mark(self, column: str) -> str:
        return " class='number'" if column in self.figures else ""
