"""A table of texts: the numbers of a picture, and what the terminal prints."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
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

    def packed(self) -> Iterator[list[tuple[str, str, int]]]:
        """Of each row the cells to write, as column, text and how many rows it spans: a text that repeats in
        the first columns is written once, for all rows that follow each other with it."""
        names = self.columns
        keys = [name for name in names if name not in self.figures][:-1]
        starts = [0] * len(keys)
        spans: list[dict[str, int]] = []
        for number, row in enumerate(self.rows):
            spans.append(dict.fromkeys(names, 1))
            is_new = number == 0
            for place, name in enumerate(keys):
                is_new = is_new or name != names[place] or row[name] != self.rows[number - 1][name]
                if is_new:
                    starts[place] = number
                else:
                    spans[starts[place]][name] += 1
                    spans[number][name] = 0
        for row, span in zip(self.rows, spans, strict=True):
            yield [(name, row[name], span[name]) for name in names if span[name]]
