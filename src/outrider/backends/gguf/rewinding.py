"""How a model's context can be taken back to an earlier token, found out by trying.

The KV of attention layers can be cut anywhere. The state of a recurrent layer cannot: it has no memory of
what it was before. llama.cpp keeps snapshots of it for the last tokens of a call (`n_rs_seq`), for the kinds
of models that it knows how to. Some of its versions say that a state was restored which was not, so whatever
a library says is compared with a text that never went further.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outrider.backends.machine import available_bytes
from outrider.core.contracts import RewindKind
from outrider.core.data import Logits, Span
from outrider.core.errors import OutriderError, RewindUnsupported

if TYPE_CHECKING:
    from outrider.backends.gguf.model import GgufModel, Weights

MAX_SNAPSHOTS = 16
"""of a sequence: drafts of a model are no longer than this"""
_MEMORY_SHARE = 1 / 8
"""of the free memory that snapshots may take"""
_TRIED_SNAPSHOTS = 4
_TRIED_MICRO_BATCH = 8
_MAX_DIFFERENCE = 0.2
"""between the logits after a rewind and those of a text that never went further, in parts of the difference
between two positions of a text. Calls of other sizes are rounded otherwise; a state that was not restored
differs by about 1."""


@dataclass(frozen=True, slots=True)
class Rewinding:
    """How contexts are taken back. `state_bytes`: the recurrent state of a sequence; `notice`: why snapshots
    that a library keeps cannot be used."""

    kind: RewindKind
    state_bytes: int = 0
    notice: str | None = None

    def snapshots(self, max_sequences: int, micro_batch_tokens: int) -> int:
        """How many snapshots each of so many sequences gets: as many as a draft has use for and fit. The
        library ends the process where a micro-batch has no room for them and more."""
        if self.kind != "snapshots":
            return 0
        room = available_bytes() * _MEMORY_SHARE / max(self.state_bytes * max_sequences, 1)
        return int(max(min(MAX_SNAPSHOTS, room - 1, micro_batch_tokens - 2), 0))


class Snapshots:
    """Which snapshots the sequences of a context have. They are of the last call's tokens but its first, and
    hold until the next one, which moves those of sequences that take no part in it."""

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


def find_rewinding(weights: Weights) -> Rewinding:
    """How these weights' contexts are taken back: known for attention alone, else tried."""
    native = weights.library.functions
    if native.llama_model_is_recurrent(weights.handle) or native.llama_model_is_hybrid(weights.handle):
        return _try_snapshots(weights)
    windowed = weights.window_tokens > 0 and weights.library.keeps_windows and not weights.options.full_window
    return Rewinding("window" if windowed else "free")


def _try_snapshots(weights: Weights) -> Rewinding:
    if not weights.library.keeps_snapshots:
        return Rewinding("none")
    model = weights.open_trial(128, _TRIED_SNAPSHOTS, _TRIED_MICRO_BATCH)
    try:
        if not model.max_draft:
            return Rewinding("none")
        difference = _difference(model)
        state_bytes = weights.library.state_bytes(model.native_context, 0)
    except RewindUnsupported:
        return Rewinding("none")
    except OutriderError as error:
        return Rewinding("none", notice=f"{weights.name}: going back was not possible to try ({error})")
    finally:
        model.close()
    if difference > _MAX_DIFFERENCE:
        title = weights.library.title
        return Rewinding(
            "none",
            notice=f"{weights.name}: after going back {title} has other logits than a text that never went "
            "further, so nothing is drafted",
        )
    return Rewinding("snapshots", state_bytes)


def _difference(model: GgufModel) -> float:
    """The difference that going back leaves in the logits, in parts of that between two positions: after a
    call in several parts and one in a single part, twice in a row, beside another sequence."""
    text = _tokens(model, 20)
    wrong = _tokens(model, 28)[20:]
    first, second, last = text[:13], text[13:18], text[18:]
    model.decode([Span(0, first[:4], 0, 0), Span(1, wrong, 0, 0)])
    rows = [*_went_back(model, (*first[4:], *wrong[:4]), 4, 4)]
    rows += _went_back(model, (*second, *wrong[:2]), len(first), 2)
    rows += [row.copy() for row in model.decode([Span(0, last, len(first) + len(second), len(last))])[0]]
    model.truncate(1, 0)
    [expected] = model.decode([Span(1, text, 0, len(text))])
    return _distance(np.array(rows), expected[4:]) / _distance(expected[5:], expected[4:-1])


def _went_back(model: GgufModel, tokens: tuple[int, ...], start: int, num_wrong: int) -> list[Logits]:
    """The rows of a call over these tokens, the last of which are taken back."""
    [rows] = model.decode([Span(0, tokens, start, len(tokens))])
    kept = [row.copy() for row in rows[: len(tokens) - num_wrong]]
    model.truncate(0, start + len(kept))
    return kept


def _distance(a: Logits, b: Logits) -> float:
    """Root mean square of the differences; infinite where something is no number."""
    distance = float(np.sqrt(np.mean((a.astype(np.float64) - b) ** 2)))
    return distance if np.isfinite(distance) else np.inf


def _tokens(model: GgufModel, count: int) -> tuple[int, ...]:
    """Ordinary tokens, no two alike in a row."""
    vocabulary = model.vocabulary
    found: Sequence[int] = [
        token
        for token in (7919 * i % vocabulary.size for i in range(1, 8 * count))
        if not vocabulary.is_control(token) and not vocabulary.ends_generation(token)
    ]
    return tuple(found[:count])
