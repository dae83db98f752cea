"""Tokens to pieces of an answer, without half characters and without a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby

from outrider.core.contracts import Vocabulary
from outrider.core.data import TARGET, AnswerReader, Character, Kind, Part, Piece, TokenLogprob


class TextStream:
    """The text of one generation in pieces, released as soon as they can no longer change.

    Held back are the bytes of an unfinished character, what a reader of the answer is not certain of, and
    content that may still turn out to be the start of a stop string: of several the one that starts first
    ends the text, and it has no reasoning or call in it. Bytes that are not UTF-8 become U+FFFD. A token is
    in the piece that has the first character of it that is shown.

    `visible` are control tokens that are shown as they are spelled; all others add nothing. Without a
    `reader` all is content.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop: Sequence[str] = (),
        visible: Collection[int] = (),
        reader: Callable[[], AnswerReader] | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._visible = frozenset(visible)
        # Of two that start at the same place the shorter one is complete first.
        self._stops = sorted(stop, key=len)
        self._longest = max(map(len, stop), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._unfinished: tuple[int, ...] = ()
        """places of the tokens of a character whose last byte has not come"""
        self._reader = reader and reader()
        self._shows_at_once = not stop and reader is None
        self._held: list[Part] = []
        """content that may begin a stop string"""
        self._stopped: str | None = None
        self._tokens: list[tuple[int, str, TokenLogprob | None]] = []
        """with who drafted each"""
        self._kinds: list[Kind | None] = []
        self._shown: set[int] = set()
        """places of tokens that are in a piece"""

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, or None. Nothing is released after it."""
        return self._stopped

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What each token was generated for; those of stop strings and end tokens for the content."""
        return tuple([kind or "content" for kind in self._kinds])

    def push(self, token: int, source: str = TARGET, logprob: TokenLogprob | None = None) -> list[Piece]:
        """What may be shown now that `token` has come. End tokens add nothing, nor do control tokens that
        are not to be visible."""
        self._tokens.append((token, source, logprob))
        spelled = self._spelled(token)
        if spelled and self._shows_at_once and not self._unfinished and spelled.isascii():
            self._shown.add(len(self._kinds))
            self._kinds.append("content")
            scored = () if logprob is None else (logprob,)
            return [Piece(spelled.decode(), source, tokens=(token,), logprobs=scored)]
        self._kinds.append(None)
        return self._pieces(self._parts(self._characters(spelled)))

    def flush(self) -> list[Piece]:
        """What was held back, when no token will follow. It may still complete a stop string."""
        text = self._decoder.decode(b"", final=True)
        parts = self._parts([Character(text, self._unfinished)] if text else [])
        return self._pieces([*parts, *(self._reader.end() if self._reader else ())], final=True)

    def end_was_forced(self) -> None:
        if self._reader is not None:
            self._reader.is_forced = True

    def _spelled(self, token: int) -> bytes:
        if token in self._visible:
            return self._vocabulary.spelling(token)
        if self._vocabulary.ends_generation(token):
            return b""
        return self._vocabulary.piece(token)

    def _characters(self, piece: bytes) -> list[Character]:
        place = (len(self._tokens) - 1,)
        if not self._unfinished and piece.isascii():
            return [Character(piece.decode(), place)]
        if not piece:
            return [Character("", place)]
        text, begun = self._decoder.decode(piece), self._unfinished
        self._unfinished = () if text else begun
        if self._decoder.getstate()[0]:
            self._unfinished += place
        if not begun or not text:
            return [Character(text, place)] if text else []
        return [Character(text[0], begun + place), *([Character(text[1:], place)] if text[1:] else [])]

    def _parts(self, characters: list[Character]) -> list[Part]:
        if self._reader is not None:
            return self._reader.push(*characters)
        return [Part("content", text, tokens) for text, tokens in characters]

    # Stop strings

    def _up_to_stop(self, parts: Iterable[Part], *, final: bool) -> Iterator[Part]:
        """The parts that no stop string can change any more."""
        for part in parts:
            if self._stopped is not None:
                return
            if not (part.text or part.name):
                yield part
            elif part.kind == "content":
                self._held.append(part)
                yield from self._release(final=False)
            else:
                yield from self._release(final=True)
                if self._stopped is None:
                    yield part
        if final and self._stopped is None:
            yield from self._release(final=True)

    def _release(self, *, final: bool) -> Iterator[Part]:
        held, self._held = self._held, []
        text = "".join(part.text for part in held)
        start, stop = self._first_stop(text)
        safe = len(text) if final else self._safe_length(text)
        if stop is not None and start <= safe:
            self._stopped, safe = stop, start
        for part in held:
            if shown := part.text[:safe]:
                yield part._replace(text=shown)
            if (rest := part.text[safe:]) and self._stopped is None:
                self._held.append(part._replace(text=rest))
            safe = max(safe - len(part.text), 0)

    def _first_stop(self, text: str) -> tuple[int, str | None]:
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        return min(found, key=lambda match: match[0], default=(len(text), None))

    def _safe_length(self, text: str) -> int:
        """Characters of `text` before the first place where a stop string may have begun."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            end = text[start:]
            if any(stop.startswith(end) and stop != end for stop in self._stops):
                return start
        return len(text)

    # Pieces

    def _pieces(self, parts: Iterable[Part], *, final: bool = False) -> list[Piece]:
        """The parts that may be shown, neighbours of one kind, call and source joined."""
        certain = self._up_to_stop(parts, final=final) if self._stops else parts
        shown = [part for part in certain if self._is_shown(part)]
        if len(shown) < 2:
            return [self._piece(shown)] if shown else []
        groups = groupby(shown, lambda part: (part.kind, part.call, part.name, self._source(part)))
        return [self._piece(list(group)) for _, group in groups]

    def _is_shown(self, part: Part) -> bool:
        """Whether a part has something to show; of another the tokens are noted."""
        if part.text or part.name:
            return True
        for place in part.tokens:
            if self._kinds[place] is None:
                self._kinds[place] = part.kind
        return False

    def _source(self, part: Part) -> str:
        return self._tokens[part.tokens[-1]][1] if part.tokens else TARGET

    def _piece(self, parts: Sequence[Part]) -> Piece:
        """One of all these parts, with the tokens that are shown in no earlier one."""
        kind, _, _, call, name = parts[0]
        places = [place for part in parts for place in part.tokens if place not in self._shown]
        places = list(dict.fromkeys(places)) if len(places) > 1 else places
        self._shown.update(places)
        for place in places:
            self._kinds[place] = kind
        tokens = [self._tokens[place] for place in places]
        scored = [logprob for _, _, logprob in tokens if logprob is not None]
        text, ids = "".join([part.text for part in parts]), tuple([token for token, _, _ in tokens])
        return Piece(text, self._source(parts[0]), kind, call, name, ids, tuple(scored))
