"""How far a sweep has come, and how long the rest will take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

_MIN_DONE_S = 60.0
_MAX_RATIO = 2.0


@dataclass(frozen=True, slots=True)
class Progress:
    """`stage` is what is being done, `detail` on what; `done` is the part of everything, 0 to 1, `left_s` the
    seconds that the rest may take, None while nothing is known."""

    stage: str
    done: float
    left_s: float | None
    detail: str


class Meter:
    """Adds up what each part of the work is expected to take, and tells of it.

    Parts have any names; what is expected of one is replaced when more is known, and is 0 when it is over.
    """

    def __init__(self, tell: Callable[[Progress], None], clock: Callable[[], float] = perf_counter) -> None:
        self._tell = tell
        self._clock = clock
        self._started_s = clock()
        self._expected_s: dict[str, float] = {}
        self._known_s: float | None = None
        """since when the expectations rest on measured times"""
        self._done_s = 0.0
        """what was expected of everything that was done since it was known"""

    def expect(self, part: str, seconds: float) -> None:
        """So much is left of this part."""
        self._expected_s[part] = max(seconds, 0.0)

    def known(self) -> None:
        """From now on the expectations rest on measured times."""
        if self._known_s is None:
            self._known_s = self._clock()

    def did(self, part: str, share: float) -> None:
        """This share of what was left of the part is done."""
        expected_s = self._expected_s.get(part, 0.0)
        done_s = expected_s * min(max(share, 0.0), 1.0)
        self._expected_s[part] = expected_s - done_s
        self._done_s += 0.0 if self._known_s is None else done_s

    def say(self, stage: str, detail: str = "") -> None:
        left_s = sum(self._expected_s.values())
        if self._known_s is not None and self._done_s >= _MIN_DONE_S:
            # What everything took lately over what was expected of it.
            slowness = (self._clock() - self._known_s) / self._done_s
            left_s *= min(max(slowness, 1 / _MAX_RATIO), _MAX_RATIO)
        spent_s = self._clock() - self._started_s
        done = spent_s / (spent_s + left_s) if spent_s + left_s > 0 else 0.0
        self._tell(Progress(stage, min(done, 1.0), None if self._known_s is None else left_s, detail))
