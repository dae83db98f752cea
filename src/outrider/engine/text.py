"""Tokens to text, piece by piece, without half characters and without a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from outrider.core.contracts import Vocabulary
from outrider.core.errors import SettingError


class TextStream:
    """The text of one generation, released as soon as it can no longer change.

    Held back are the bytes of an unfinished character and whatever may still turn out to
    be the start of a stop string. All releases joined, `flush` included, are the text of all
    tokens up to the stop string that starts first, however the tokens cut that text; bytes
    that are not UTF-8 become U+FFFD. Where one stop string is complete while one that
    started earlier may still become so, the stream waits for the earlier one.

    `stop` may be one string. `visible` are control tokens that are shown as they are spelled; all others
    add nothing. Raises SettingError for an empty stop string.
    """

    def __init__(
        self, vocabulary: Vocabulary, stop: Sequence[str] = (), visible: Collection[int] = ()
    ) -> None:
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(stops):
            raise SettingError("stop", "an empty stop string ends every text at once", "Leave it out.")
        self._vocabulary = vocabulary
        self._visible = frozenset(visible)
        # Of two that start at the same place the shorter one is complete first.
        self._stops = sorted(stops, key=len)
        self._longest = max(map(len, stops), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._stopped: str | None = None

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, or None. Nothing is released after it."""
        return self._stopped

    def push(self, token: int) -> str:
        """The text that may be shown now that `token` has come. End tokens add none, nor do control
        tokens that are not to be visible."""
        if token in self._visible:
            return self._release(self._vocabulary.spelling(token), final=False)
        if self._vocabulary.ends_generation(token):
            return ""
        return self._release(self._vocabulary.piece(token), final=False)

    def flush(self) -> str:
        """What was held back, when no token will follow. It may still complete a stop string."""
        return self._release(b"", final=True)

    def _release(self, piece: bytes, *, final: bool) -> str:
        if not self._stops:  # nothing is ever held back
            return self._decoder.decode(piece, final)
        if self._stopped is not None:
            return ""
        text = self._held + self._decoder.decode(piece, final)
        start, stop = self._first_stop(text)
        safe = len(text) if final else self._safe_length(text)
        if stop is not None and start <= safe:
            self._stopped, self._held = stop, ""
            return text[:start]
        self._held = text[safe:]
        return text[:safe]

    def _first_stop(self, text: str) -> tuple[int, str | None]:
        """Where the first complete stop string starts, and which it is."""
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        return min(found, key=lambda match: match[0], default=(len(text), None))

    def _safe_length(self, text: str) -> int:
        """Characters of `text` before the first place where a stop string may have begun."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            end = text[start:]
            if any(stop.startswith(end) and stop != end for stop in self._stops):
                return start
        return len(text)
