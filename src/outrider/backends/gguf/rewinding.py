"""How contexts of some weights are taken back to an earlier token, found out by trying.

The KV of attention layers can be cut anywhere. The state of a recurrent layer cannot: it has no memory of
what it was before. There are two ways out. A checkpoint is a copy of the state, made before a call whose
tokens may be rejected; what is to stay of that call is evaluated again with the next one. Snapshots are kept
by llama.cpp for the last tokens of a call (`n_rs_seq`), for the kinds of models that it knows how to: nothing
is evaluated again, but every call takes longer (benchmarks/hybrid), so they are kept where they are asked
for. Some of its versions say that a state was restored which was not, so whatever a library says is compared
with a text that never went further.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import cycle, islice
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from outrider.backends.gguf.library import Library, State
from outrider.backends.machine import available_bytes
from outrider.core.contracts import RewindKind
from outrider.core.data import Logits, Span
from outrider.core.errors import OutriderError
from outrider.core.saved import SavedState
from outrider.costs.timer import ordinary_tokens

if TYPE_CHECKING:
    from outrider.backends.gguf.model import GgufModel, Weights

MAX_SEQUENCES = 2
"""of a context with snapshots. Where three sequences and more have parts of different length in a call,
llama.cpp 0.3.36 restores other states than those of before."""
_TRIED_SNAPSHOTS = 4
_TRIED_MICRO_BATCH = 8
"""so that the calls of a trial are split"""
_MAX_DIFFERENCE = 0.3
"""in parts of the difference between the logits of two positions. Rounding by another size of call makes less
than 0.1 (delta-net layers in two orders of summation: 0.04 to 0.05); a state that holds a token too many
differs by about 1."""


@dataclass(frozen=True, slots=True)
class Rewinding:
    """How contexts are taken back. `state_bytes`: the recurrent state of a sequence; `notice`: what was asked
    for and cannot be had. `several`: how contexts of more than `MAX_SEQUENCES` are, where that differs."""

    kind: RewindKind
    state_bytes: int = 0
    notice: str | None = None
    several: RewindKind | None = None

    def of(self, max_sequences: int) -> Rewinding:
        """That of a context of so many sequences."""
        if self.several is None or max_sequences <= MAX_SEQUENCES:
            return self
        return Rewinding(self.several, self.state_bytes)

    def snapshots(self, asked: int, max_sequences: int, micro_batch_tokens: int) -> int:
        """How many snapshots each of so many sequences gets: as many as are asked for and fit. The library
        ends the process where a micro-batch has no room for them and more."""
        if self.kind != "snapshots":
            return 0
        room = available_bytes() / max(self.state_bytes * max_sequences, 1)
        return int(max(min(asked, room - 1, micro_batch_tokens - 2), 0))


class Snapshots:
    """How far each sequence of a context with snapshots can be taken back. A snapshot is good for once, right
    after the call that it was made in."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._reach: dict[int, int] = {}
        self._past: set[int] = set()

    def after_call(self, spans: Sequence[Span]) -> None:
        """A call was made over these spans."""
        self._reach = {span.sequence: min(len(span.tokens) - 1, self._most) for span in spans}
        self._past.difference_update(self._reach)

    def gone_back(self, sequence: int, length: int) -> None:
        """A sequence was taken back to `length` tokens: the state there has no snapshots of its own."""
        self._reach.pop(sequence, None)
        (self._past.add if length else self._past.discard)(sequence)

    def shared(self, sequence: int) -> None:
        """A sequence was copied: it shares its state with the copy until its next call."""
        self._reach.pop(sequence, None)

    def reach(self, sequence: int) -> int:
        """How many of a sequence's last tokens can be taken back."""
        return self._reach.get(sequence, 0)

    def is_past(self, sequence: int) -> bool:
        """Whether a sequence was taken back since its last call: its state is restored by the next one."""
        return sequence in self._past


class Checkpoints:
    """Copies of the recurrent states of a context's sequences: of each one from before its last draft, and
    one from near its prompt's end."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._kept: dict[int, dict[bool, tuple[int, State]]] = {}
        """by sequence and whether the span had a draft: the length, and the state"""

    def before_call(self, context: int, spans: Sequence[Span]) -> None:
        """Copy the states of the sequences whose spans ask for it. Where that fails there is no copy."""
        for span in spans:
            kept = self._kept.setdefault(span.sequence, {})
            if not span.checkpoint or any(length == span.start for length, _ in kept.values()):
                continue  # of a sequence that was just taken back it is there
            size = self._library.state_bytes(context, span.sequence)
            _, state = kept.pop(span.rows > 1, (0, None))
            if state is None or state.size != size:
                state = np.empty(size, dtype=np.uint8)
            if size and self._library.save_state(context, span.sequence, state):
                kept[span.rows > 1] = (span.start, state)

    def reach(self, sequence: int, length: int) -> int:
        """The length of the longest copy of no more than `length` tokens; 0 for none."""
        kept = self._kept.get(sequence, {}).values()
        return max((at for at, _ in kept if at <= length), default=0)

    def restore(self, context: int, source: int, length: int, sequence: int) -> bool:
        """Give a sequence the state that `source` had after `length` tokens; whether that was possible."""
        kept = self._kept.get(source, {}).values()
        state = next((state for at, state in kept if at == length), None)
        return state is not None and self._library.restore_state(context, sequence, state)

    def saved(self, sequence: int) -> tuple[tuple[int, ...], list[State]]:
        """Copies of a sequence's copies, which are written over: their lengths in rising order, and they
        themselves."""
        kept = {length: state for length, state in self._kept.get(sequence, {}).values() if length}
        return tuple(sorted(kept)), [kept[length].copy() for length in sorted(kept)]

    def restored(self, sequence: int, saved: SavedState) -> None:
        """A sequence holds what was saved, and has the copies that were saved with it."""
        pairs = zip(saved.extent.checkpoints, saved.parts[1:], strict=True)
        # The first is that of its prompt.
        self._kept[sequence] = {bool(i): (at, state.copy()) for i, (at, state) in enumerate(pairs)}

    def gone_back(self, sequence: int, length: int) -> None:
        """A sequence was taken back to `length` tokens."""
        kept = self._kept.pop(sequence, {})
        if length:
            self._kept[sequence] = {of: found for of, found in kept.items() if found[0] <= length}


def find_rewinding(weights: Weights) -> Rewinding:
    """How these weights' contexts are taken back: known for attention alone, else tried."""
    native = weights.library.functions
    if not (native.llama_model_is_recurrent(weights.handle) or native.llama_model_is_hybrid(weights.handle)):
        windowed = weights.window_tokens > 0 and weights.library.keeps_windows
        return Rewinding("window" if windowed and not weights.options.full_window else "free")
    if not weights.options.snapshots:
        return _tried(weights, "checkpoints")
    found, instead = _tried(weights, "snapshots"), _tried(weights, "checkpoints")
    if found.kind == "snapshots":
        return replace(found, several=instead.kind)
    return replace(instead, notice=found.notice)


def _tried(weights: Weights, kind: RewindKind) -> Rewinding:
    """This kind where it works, else "none" with the reason."""
    name, title = weights.name, weights.library.title
    if not weights.library.keeps_states:
        return Rewinding("none")
    try:
        asked = replace(weights.options, micro_batch_tokens=_TRIED_MICRO_BATCH, snapshots=_TRIED_SNAPSHOTS)
        trial = weights.open(128, max_sequences=MAX_SEQUENCES, options=asked, rewinding=Rewinding(kind))
        with closing(trial) as model:
            if not model.max_draft:
                return Rewinding("none", notice=f"{name}: {title} keeps no snapshots of its kind of state")
            difference = _difference(model)
            state_bytes = weights.library.state_bytes(model.native_context, 0)
    except OutriderError as error:
        return Rewinding("none", notice=f"{name}: {kind} of its state could not be tried ({error})")
    if difference > _MAX_DIFFERENCE:
        why = f"after going back by {kind} {title} has other logits than a text that never went further"
        return Rewinding("none", notice=f"{name}: {why}, so these are not used")
    return Rewinding(kind, state_bytes)


def _difference(model: GgufModel) -> float:
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


def _went_back(
    model: GgufModel, text: tuple[int, ...], num_rows: int, wrong: tuple[int, ...]
) -> list[Logits]:
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
