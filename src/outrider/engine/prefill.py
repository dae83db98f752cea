"""How prompts are read beside sequences that decode: in chunks, so that none waits long."""

from __future__ import annotations

from collections.abc import Mapping

MAX_TOKENS = 256
"""Prompt tokens per call: enough to run at full speed, few enough to stay interruptible."""

_MIN_TOKENS = 16
"""Fewer would read a prompt no sooner: the tokens of a call share the reading of the weights."""

MAX_PAUSE_S = 2.5
"""How long reading a prompt may hold up those that decode, in one step. Less makes more of their tokens
wait, and the prompt wait longer; more lets a long prompt stall them (benchmarks/serve)."""

_RATE = 0.3
"""weight of the last call in the time of a token"""


class Pace:
    """How many prompt tokens a call takes, by what the last ones took: beside sequences that decode so
    many that these wait no longer than `max_pause_s`."""

    def __init__(self, max_pause_s: float = MAX_PAUSE_S) -> None:
        self._max_pause_s = max_pause_s
        self._token_s: float | None = None

    def tokens(self, *, alone: bool) -> int:
        """Prompt tokens for the next call; `alone`: no sequence decodes in it."""
        if alone:
            return MAX_TOKENS
        if self._token_s is None:
            return _MIN_TOKENS * 4
        return min(max(int(self._max_pause_s / self._token_s), _MIN_TOKENS), MAX_TOKENS)

    def note(self, num_tokens: int, seconds: float) -> None:
        """A call with prompts in it took so long for all its tokens."""
        token_s = seconds / num_tokens
        self._token_s = (
            token_s if self._token_s is None else self._token_s + _RATE * (token_s - self._token_s)
        )


def chunks(unread: Mapping[int, int], room: int) -> dict[int, int]:
    """How many tokens of each prompt to read in one call of `room` tokens; `unread` is in the order of
    arrival.

    The oldest gets half, so that none waits for ever; the rest goes to those that are nearest to their
    first token, which makes the mean wait shortest.
    """
    shares: dict[int, int] = {}
    if room <= 0 or not unread:
        return shares
    oldest = next(iter(unread))
    if len(unread) > 1:
        shares[oldest] = min(unread[oldest], room // 2)
        room -= shares[oldest]
    for key in sorted(unread, key=lambda k: unread[k]):
        more = min(unread[key] - shares.get(key, 0), room)
        shares[key] = shares.get(key, 0) + more
        room -= more
    return {key: shares[key] for key in unread if shares.get(key)}
