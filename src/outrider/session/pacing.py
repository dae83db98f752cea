"""Text that comes in bursts, let out evenly.

Speculation shows several tokens at once and then nothing until the next step is done. A `Pacer` spreads the
text of each step over the time that the next one is expected to take: complete, in order, and no character
later than the end of the next step. It reads no clock, starts no thread and never waits: its caller passes
the time. It aims at 95 of 100 gaps between characters shorter than those of plain decoding; steps whose
drafts were mostly rejected, and durations that cannot be foreseen, keep it from that.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import groupby, pairwise

from outrider.core.data import Piece

_RECENT_STEPS = 32
"""Steps whose durations foretell the next one's."""

_PACE_QUANTILE = 0.75
"""The pace is that of a rather slow recent step. Lower, and the text runs dry more often than it
need; higher, and much of it waits for nothing and still comes out in bursts, when a step ends early."""

_MAX_RELEASES = 16
"""Parts that the text of a step is let out in: finer ones are not seen, and each costs a wake-up."""


class Pacer:
    """Decides when each character of a stream is shown. Times are seconds of any clock.

    >>> pacer = Pacer()
    >>> pacer.push(0.0, [Piece("ab", "target")])
    >>> [piece.text for piece in pacer.due(0.0)]  # nothing is known yet about how long a step takes
    ['ab']
    >>> pacer.push(1.0, [Piece("cd", "draft")])
    >>> [piece.text for piece in pacer.due(1.0)], pacer.next_s
    (['c'], 1.75)
    >>> pacer.due(1.5), [piece.text for piece in pacer.due(1.75)]
    ((), ['d'])
    """

    def __init__(self) -> None:
        self._durations_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._releases: deque[tuple[float, tuple[Piece, ...]]] = deque()  # when due, and what
        self._arrived_s: float | None = None
        self._last_s = 0.0  # when the last release was, or will be, due
        self._interval_s = 0.0  # between the releases of the last text

    @property
    def next_s(self) -> float | None:
        """When something is due next; None when nothing is held."""
        return self._releases[0][0] if self._releases else None

    def push(self, now_s: float, pieces: Sequence[Piece]) -> None:
        """A step has ended, with this text or none; what an earlier step left is due at once."""
        if left := self.due(math.inf):
            self._release([now_s], left)
        num_characters = sum(len(piece.text) for piece in pieces)
        if not num_characters:
            return
        if self._arrived_s is not None:
            self._durations_s.append(now_s - self._arrived_s)
        self._arrived_s = now_s
        num_releases = min(num_characters, _MAX_RELEASES) if self._durations_s else 1
        self._release(self._times_s(now_s, num_releases), pieces)

    def due(self, now_s: float) -> tuple[Piece, ...]:
        """What is to be shown by now and was not handed out yet."""
        pieces: list[Piece] = []
        while self._releases and self._releases[0][0] <= now_s:
            pieces += self._releases.popleft()[1]
        return tuple(pieces)

    def flush(self) -> tuple[Piece, ...]:
        """All that is held, when no step will follow: the next text begins another stream."""
        self._arrived_s = None
        return self.due(math.inf)

    def _times_s(self, now_s: float, num_releases: int) -> list[float]:
        """When the parts of a text are due: in the middle of equal shares of the expected step.

        The first comes earlier where the stream has run dry: as long after the last one as the
        pauses within both texts are on average, so that a text of one character between longer ones
        has not the whole pause on one side.
        """
        if not self._durations_s:
            return [now_s]
        ordered = sorted(self._durations_s)
        step_s = ordered[int(_PACE_QUANTILE * len(ordered))]
        interval_s = step_s / num_releases
        wanted_s = self._last_s + (self._interval_s + interval_s) / 2
        first_s = min(max(now_s, wanted_s), now_s + interval_s / 2)
        self._interval_s = interval_s
        between_s = (now_s + step_s - interval_s / 2 - first_s) / max(num_releases - 1, 1)
        return [first_s + index * between_s for index in range(num_releases)]

    def _release(self, times_s: Sequence[float], pieces: Sequence[Piece]) -> None:
        """Let the text out in as many parts as there are times, of the same length, give or take a character;
        each knows its sources."""
        characters = [Piece(character, piece.source) for piece in pieces for character in piece.text]
        cuts = [len(characters) * index // len(times_s) for index in range(len(times_s) + 1)]
        for at_s, (start, end) in zip(times_s, pairwise(cuts), strict=True):
            runs = groupby(characters[start:end], key=lambda piece: piece.source)
            part = tuple(Piece("".join(piece.text for piece in run), source) for source, run in runs)
            self._releases.append((at_s, part))
        self._last_s = times_s[-1]
