"""A vocabulary with several ways to spell a text, and a constraint that can be worked out by hand."""

from collections.abc import Collection, Sequence
from itertools import takewhile

import numpy as np

from outrider.backends.fake import FakeVocabulary
from outrider.core.data import Mask
from outrider.core.errors import ConstraintError


class Pieces(FakeVocabulary):
    """Tokens of one character or more, and an end token with the highest id."""

    def __init__(self, *pieces: str) -> None:
        super().__init__("x" * len(pieces))
        self.pieces = pieces

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """The longest piece first."""
        del add_special, parse_special
        tokens = []
        while fits := [piece for piece in self.pieces if text.startswith(piece)]:
            longest = max(fits, key=len)
            tokens.append(self.pieces.index(longest))
            text = text[len(longest) :]
        return tokens

    def piece(self, token: int) -> bytes:
        return b"" if token == self.size - 1 else self.pieces[token].encode()

    def text(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self.piece, tokens)).decode()


class OneOf:
    """The Constraint that the output is one of a few texts, however it is spelled.

    `forcing` False never forces. `canonical` allows nothing but the forced token where there is one.
    """

    def __init__(
        self, vocabulary: Pieces, texts: Collection[str], *, forcing: bool = True, canonical: bool = False
    ) -> None:
        self._vocabulary = vocabulary
        self._texts = sorted(texts)
        self._forcing = forcing
        self._canonical = canonical
        self.final: list[int] = []
        self.num_asked = 0

    def allowed(self, drafted: Sequence[int]) -> Mask | None:
        self.num_asked += 1
        vocabulary = self._vocabulary
        if self._ended(drafted):
            return None
        mask = np.array([self._may_follow(drafted, token) for token in range(vocabulary.size)])
        if not mask.any():
            raise ConstraintError("output", f"nothing may follow {self._text(drafted)!r}")
        if self._canonical and (ways := self._certain(drafted)):
            mask[:] = False
            mask[ways[0]] = True
        return mask

    def permits(self, drafted: Sequence[int], tokens: Sequence[int]) -> int:
        whole = [*drafted]

        def fits(token: int) -> bool:
            if self._ended(whole) or not self._may_follow(whole, token):
                return False
            whole.append(token)
            return True

        return len(list(takewhile(fits, tokens)))

    def forced(self, drafted: Sequence[int]) -> tuple[int, ...]:
        return self._certain(drafted) if self._forcing else ()

    def accept(self, tokens: Sequence[int]) -> None:
        assert self.permits((), tokens) == len(tokens)
        self.final += tokens

    @property
    def is_complete(self) -> bool:
        return self._left(()) == [self._text(())]

    @property
    def is_accepted(self) -> bool:
        return self._text(()) in self._texts

    def _certain(self, drafted: Sequence[int]) -> tuple[int, ...]:
        if self._ended(drafted):
            return ()
        text = self._text(drafted)
        # What the first and the last of sorted texts share, all of them do.
        left = self._left(drafted)
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(left[0], left[-1], strict=False))
        common = "".join(first for first, _ in pairs)
        return tuple(self._vocabulary.tokenize(common[len(text) :]))

    def _may_follow(self, drafted: Sequence[int], token: int) -> bool:
        text = self._text(drafted)
        if token == self._vocabulary.size - 1:
            return text in self._texts
        return bool([t for t in self._left(drafted) if t.startswith(text + self._vocabulary.pieces[token])])

    def _left(self, drafted: Sequence[int]) -> list[str]:
        return [text for text in self._texts if text.startswith(self._text(drafted))]

    def _ended(self, drafted: Sequence[int]) -> bool:
        return self._vocabulary.size - 1 in (*self.final, *drafted)

    def _text(self, drafted: Sequence[int]) -> str:
        return self._vocabulary.text((*self.final, *drafted))
