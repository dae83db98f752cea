"""How contexts of some weights go back to an earlier token, found out by trying.

Checkpoints and snapshots (`backends.rewinding`) are for the kinds of models for which the library can take
states out of a context, or keeps them itself (`n_rs_seq`). With snapshots nothing is evaluated again, but
every call takes longer (benchmarks/hybrid), so they are kept where they are asked for. Some versions of
llama.cpp say that a state was restored which was not, so whatever a library says is compared with a text that
never went further.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from random import Random

import numpy as np

from outrider.backends.gguf.library import Library
from outrider.backends.machine import available_bytes
from outrider.backends.rewinding import Attention, Checkpoints, Rewinder, Snapshots, Window
from outrider.core.contracts import CHECKPOINTS, FREE, UNABLE, WINDOW, Model, Rewinding, RewindKind, snapshots
from outrider.core.data import Logits, Span
from outrider.core.errors import OutriderError
from outrider.costs.calibrate import ordinary_tokens

MAX_SEQUENCES = 2
"""of a context with snapshots. Where three sequences and more have parts of different length in a call,
llama.cpp 0.3.36 restores other states than those of before."""
_COPIES_SHARE = 4
"""This part of what is free when a context is opened may go to copies of states from where texts turn."""
TRIED_SNAPSHOTS = 4
TRIED_MICRO_BATCH = 8
"""so that the calls of a trial are split"""
_MAX_DIFFERENCE = 0.3
"""in parts of the difference between the logits of two positions. Rounding by another size of call makes less
than 0.1 (delta-net layers in two orders of summation: 0.04 to 0.05); a state that holds a token too many
differs by about 1."""


@dataclass(frozen=True, slots=True)
class RewindSupport:
    """How contexts of some weights go back.

    Attributes:
        kind: the way.
        state_bytes: the recurrent state of a sequence.
        notice: what was asked for and cannot be had.
        several: the way of contexts of more than `MAX_SEQUENCES`, where that differs.
    """

    kind: RewindKind
    state_bytes: int = 0
    notice: str | None = None
    several: RewindKind | None = None

    def of(self, max_sequences: int) -> RewindSupport:
        """That of a context of so many sequences."""
        if self.several is None or max_sequences <= MAX_SEQUENCES:
            return self
        return RewindSupport(self.several, self.state_bytes)

    def rewinding(self, asked_snapshots: int) -> Rewinding:
        """What the way comes to, with as many snapshots as are asked for."""
        ways = {"free": FREE, "window": WINDOW, "checkpoints": CHECKPOINTS, "none": UNABLE}
        return ways.get(self.kind) or snapshots(asked_snapshots)

    def snapshots(self, asked: int, max_sequences: int, micro_batch_tokens: int) -> int:
        """How many snapshots each of so many sequences gets: as many as are asked for and fit. The library
        ends the process where a micro-batch has no room for them and more."""
        if self.kind != "snapshots":
            return 0
        room = available_bytes() / max(self.state_bytes * max_sequences, 1)
        return int(max(min(asked, room - 1, micro_batch_tokens - 2), 0))

    def rewinder(self, library: Library, context: int, window_tokens: int, *, is_copied: bool) -> Rewinder:
        """What keeps track of a context. `is_copied`: its copies hold what is outside of a window, too."""
        states = partial(library.save_state, context), partial(library.restore_state, context)
        room_bytes = available_bytes() / _COPIES_SHARE
        match self.kind:
            case "none":
                return Rewinder()
            case "snapshots":
                return Snapshots(library.snapshots(context), *states, room_bytes)
            case "checkpoints":
                return Checkpoints(*states, room_bytes)
        kept_window = window_tokens if library.reuses_window_cells else 0
        attention = Attention(
            self.rewinding(0), kept_window, partial(library.oldest_position, context), is_copied=is_copied
        )
        return attention if self.kind == "free" else Window(attention, *states, room_bytes)

    def notices(self, name: str, found: Rewinding, max_sequences: int) -> list[str]:
        """How drafts of a recurrent target are rejected, and what that takes; why not, if it cannot be.
        `found` is that of its context."""
        notices = [self.notice] if self.notice else []
        size = self.state_bytes * max_sequences / 1e6
        how = f"{name} takes rejected drafts back by"
        if found.kind == "snapshots":
            notices.append(
                f"{how} snapshots of its recurrent state ({found.max_rejected} for each sequence, "
                f"{size * found.max_rejected:,.1f} MB): no draft is longer, and every call takes longer, "
                "plain ones that it is compared with included (docs/backends.md)"
            )
        elif self.kind == "snapshots":
            notices.append(
                f"{name}: snapshots are for {MAX_SEQUENCES} sequences at most, checkpoints are used for "
                f"{max_sequences} (docs/backends.md)"
            )
        if found.kind == "checkpoints":
            notices.append(
                f"{how} checkpoints of its recurrent state ({2 * size:,.1f} MB): accepted tokens of a "
                "rejected draft are evaluated twice (docs/backends.md)"
            )
        return notices


Try = Callable[[RewindKind], tuple[float, int]]
"""Opens a context that goes back in this way; returns the difference that going back leaves in its logits
(infinite where it has no state to go back to), and the bytes of a sequence's state."""


def find_support(library: Library, name: str, asked_snapshots: int, attempt: Try) -> RewindSupport:
    """How contexts of recurrent weights go back: by snapshots where these are asked for, else by
    checkpoints."""
    if not library.keeps_states:
        return RewindSupport("none")

    def tried(kind: RewindKind) -> RewindSupport:
        try:
            difference, state_bytes = attempt(kind)
        except OutriderError as error:
            return RewindSupport("none", notice=f"{name}: {kind} of its state could not be tried ({error})")
        if not state_bytes:
            return RewindSupport(
                "none", notice=f"{name}: {library.title} keeps no snapshots of its kind of state"
            )
        if difference > _MAX_DIFFERENCE:
            why = f"after going back by {kind} {library.title} has other logits than without"
            return RewindSupport("none", notice=f"{name}: {why}, so these are not used")
        return RewindSupport(kind, state_bytes)

    checkpoints = tried("checkpoints")
    if not asked_snapshots:
        return checkpoints
    found = tried("snapshots")
    if found.kind == "snapshots":
        return replace(found, several=checkpoints.kind)
    return replace(checkpoints, notice=found.notice)


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
