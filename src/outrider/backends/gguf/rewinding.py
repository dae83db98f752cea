"""How contexts of some weights go back to an earlier token. Whether a library restores a recurrent state is
found out by trying: some versions of llama.cpp say that one was restored which was not, so the logits are
compared with those of a text that never went further."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from random import Random

import numpy as np

from outrider.backends.gguf.library import Library
from outrider.backends.machine import available_bytes
from outrider.backends.rewinding import Attention, Checkpoints, Rewinder, Window
from outrider.core.contracts import CHECKPOINTS, FREE, UNABLE, WINDOW, Model, Rewinding, RewindKind
from outrider.core.data import Logits, Span
from outrider.costs.calibrate import ordinary_tokens

_COPIES_SHARE = 4
"""This part of what is free when a context is opened may go to copies of states from where texts turn."""
MAX_DIFFERENCE = 0.3
"""in parts of the difference between the logits of two positions. Rounding by another size of call makes less
than 0.1 (delta-net layers in two orders of summation: 0.04 to 0.05); a state that holds a token too many
differs by about 1."""


@dataclass(frozen=True, slots=True)
class RewindSupport:
    """How contexts of some weights go back; `state_bytes`: the recurrent state of a sequence; `notice`: why
    there is no way."""

    kind: RewindKind
    state_bytes: int = 0
    notice: str | None = None

    @property
    def rewinding(self) -> Rewinding:
        """What the way comes to."""
        return {"free": FREE, "window": WINDOW, "checkpoints": CHECKPOINTS, "none": UNABLE}[self.kind]

    def rewinder(self, library: Library, context: int, window_tokens: int, *, is_copied: bool) -> Rewinder:
        """What keeps track of a context. `is_copied`: its copies hold what is outside of a window, too."""
        states = partial(library.save_state, context), partial(library.restore_state, context)
        room_bytes = available_bytes() / _COPIES_SHARE
        if self.kind == "none":
            return Rewinder()
        if self.kind == "checkpoints":
            return Checkpoints(*states, room_bytes)
        kept_window = window_tokens if library.keeps_windows else 0
        oldest = partial(library.oldest_position, context)
        attention = Attention(self.rewinding, kept_window, oldest, is_copied=is_copied)
        return attention if self.kind == "free" else Window(attention, *states, room_bytes)

    def line(self, target: Model) -> str | None:
        """What it takes to reject drafts of a recurrent target, or why that cannot be."""
        if target.rewinding.kind != "checkpoints":
            return self.notice
        size = f"{2 * self.state_bytes * target.max_sequences / 1e6:,.1f} MB"
        return (
            f"{target.name} takes rejected drafts back by checkpoints of its recurrent state ({size}): "
            "accepted tokens of a rejected draft are evaluated twice (docs/backends.md)"
        )


def difference_after_rewind(model: Model) -> float:
    """The difference that going back leaves in the logits, in parts of that between two positions: after a
    call in several parts and one in a single part, twice in a row, beside another sequence."""
    ordinary = dict.fromkeys(ordinary_tokens(model.vocabulary, Random(0)))
    tokens = tuple(islice(cycle(ordinary), 28))
    text, wrong = tokens[:20], tokens[20:]
    model.decode([Span(0, text[:4], 0, 0), Span(1, wrong, 0, 0)])
    rows = [*_went_back(model, text[:13], 9, wrong[:4])]
    rows += _went_back(model, text[:18], 5, wrong[:2])
    rows += _went_back(model, text, 2, ())
    model.truncate(1, 0)
    [expected] = model.decode([Span(1, text, 0, len(text))])
    between = _distance(expected[5:], expected[4:-1])
    return _distance(np.array(rows), expected[4:]) / between if between else np.inf


def _went_back(model: Model, text: tuple[int, ...], num_rows: int, wrong: tuple[int, ...]) -> list[Logits]:
    """The last rows of a text whose first tokens are stored, evaluated with wrong tokens after it, which are
    taken back."""
    stored = model.length(0)
    tokens = (*text[stored:], *wrong)
    [rows] = model.decode([Span(0, tokens, stored, num_rows + len(wrong), checkpoint=bool(wrong))])
    kept = [row.copy() for row in rows[:num_rows]]
    model.truncate(0, model.reach(0, len(text)))
    return kept


def _distance(a: Logits, b: Logits) -> float:
    """Root mean square of the differences; infinite where something is no number."""
    distance = float(np.sqrt(np.mean((a.astype(np.float64) - b) ** 2)))
    return distance if np.isfinite(distance) else np.inf
