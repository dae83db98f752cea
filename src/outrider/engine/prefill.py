"""How prompts are read beside sequences that decode: in chunks, so that none waits long."""

from __future__ import annotations

import math
from collections.abc import Mapping

MAX_TOKENS = 256
"""Prompt tokens per call on a processor: enough to run at full speed, few enough to stay interruptible."""

_MIN_TOKENS = 16
"""Fewer would read a prompt no sooner: the tokens of a call share the reading of the weights."""

GAP_STEPS = 5.0
"""Where sequences decode, a step takes no longer than so many plain ones of theirs, if nothing else is asked
(benchmarks/serve)."""

PATIENT_STEPS = 16
"""The oldest prompt that has been read for so many steps goes before all others."""

_RATE = 0.3
"""weight of the last call in what is known of their times"""


class Pace:
    """How long a step may take where sequences wait for their next tokens, and how many prompt tokens that
    leaves room for, by what the last calls took. `max_gap_s`: the longest step; None: `GAP_STEPS` plain
    ones. A chunk of `_MIN_TOKENS` is read in any case, one of `most_tokens` at most."""

    def __init__(self, max_gap_s: float | None = None, most_tokens: int = MAX_TOKENS) -> None:
        self._max_gap_s = max_gap_s
        self._most_tokens = most_tokens
        self._token_s: float | None = None
        self._plain_s: dict[int, float] = {}
        """a plain step, by the number of tokens that are decoded in it"""

    def gap_s(self, num_decoding: int) -> float:
        """The longest that a step should take in which so many tokens are decoded; infinite as long as none
        was seen that read no prompt."""
        plain_s = self._plain_step_s(num_decoding)
        if self._max_gap_s is not None:
            return max(self._max_gap_s, plain_s or 0.0)
        return math.inf if plain_s is None else GAP_STEPS * plain_s

    def tokens(self, num_decoding: int) -> int:
        """Prompt tokens for the next call. Half of the time that it may take beyond a plain step is left for
        drafts."""
        if not num_decoding:
            return self._most_tokens
        gap_s = self.gap_s(num_decoding)
        if self._token_s is None or math.isinf(gap_s):
            return _MIN_TOKENS * 4
        added_s = (gap_s - (self._plain_step_s(num_decoding) or 0.0)) / 2
        return min(max(int(added_s / self._token_s), _MIN_TOKENS), self._most_tokens)

    def note(self, num_decoding: int, num_drafted: int, num_read: int, seconds: float) -> None:
        """A call took so long in which so many tokens were decoded plainly, and so many of drafts and of
        prompts came with them."""
        plain_s, num_added = self._plain_step_s(num_decoding) or 0.0, num_drafted + num_read
        if not num_added:
            self._plain_s[num_decoding] = _mean(self._plain_s.get(num_decoding), seconds)
        elif not num_read:  # there may be drafts in every call, and without them it takes no longer
            self._plain_s[num_decoding] = min(self._plain_s.get(num_decoding, seconds), seconds)
        elif num_added >= _MIN_TOKENS and seconds > plain_s:
            self._token_s = _mean(self._token_s, (seconds - plain_s) / num_added)

    def _plain_step_s(self, num_decoding: int) -> float | None:
        """Of that many, or of the number nearest to it that was seen."""
        if not num_decoding or not self._plain_s:
            return None
        return self._plain_s[min(self._plain_s, key=lambda seen: (abs(seen - num_decoding), seen))]


def _mean(before: float | None, now: float) -> float:
    return now if before is None else before + _RATE * (now - before)


def chunks(unread: Mapping[int, int], room: int, *, is_late: bool = False) -> dict[int, int]:
    """How many tokens of each prompt to read in one call of `room` tokens; `unread` is in the order of
    arrival. `is_late`: the oldest has waited long.

    The oldest gets half, or all if it is late, so that none waits for ever; the rest goes to those that are
    nearest to their first token, which makes the mean wait shortest.
    """
    shares: dict[int, int] = {}
    if room <= 0 or not unread:
        return shares
    oldest = next(iter(unread))
    if len(unread) > 1:
        shares[oldest] = min(unread[oldest], room if is_late else room // 2)
        room -= shares[oldest]
    for key in sorted(unread, key=lambda k: unread[k]):
        more = min(unread[key] - shares.get(key, 0), room)
        shares[key] = shares.get(key, 0) + more
        room -= more
    return {key: shares[key] for key in unread if shares.get(key)}
