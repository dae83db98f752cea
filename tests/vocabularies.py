"""A tokenizer small enough to see through, for the tests of what rests on the contract."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.backends.fake import FakeVocabulary
from outrider.core.contracts import PartOf
from outrider.models.vocab import tokenizer_id


@dataclass(frozen=True, slots=True)
class Token:
    """One entry of a `TableVocabulary`; text adds its own spelling unless `piece` says otherwise."""

    spelling: bytes
    control: bool = False
    end: bool = False
    piece: bytes | None = None


class TableVocabulary:
    """Longest match over a table of tokens, inside the words that `words` cuts the text into."""

    def __init__(
        self,
        tokens: Sequence[Token],
        *,
        words: str = r"(?s).+",
        kind: str = "table",
        bos: int | None = None,
        part_of: PartOf | None = None,
    ) -> None:
        self.part_of = part_of
        self.kind = kind
        self._tokens = list(tokens)
        self._words = re.compile(words)
        self._bos = bos
        self._ids: dict[bytes, int] = {}
        self._controls: dict[bytes, int] = {}
        for i, token in enumerate(tokens):
            (self._controls if token.control else self._ids).setdefault(token.spelling, i)
        self._longest = max((len(token.spelling) for token in tokens if not token.control), default=0)

    @property
    def size(self) -> int:
        """Number of tokens."""
        return len(self._tokens)

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """As the contract has it; the start token is `bos`, and there is no end token."""
        out = [self._bos] if add_special and self._bos is not None else []
        names = sorted(self._controls, key=len, reverse=True) if parse_special else []
        pattern = "|".join(re.escape(name.decode()) for name in names)
        for part in re.split(f"({pattern})", text) if pattern else [text]:
            if part.encode() in names:
                out.append(self._controls[part.encode()])
            else:
                out += [t for word in self._words.findall(part) for t in self._cut(word.encode())]
        return out

    def _cut(self, word: bytes) -> list[int]:
        out: list[int] = []
        while word:
            length = next(n for n in range(self._longest, 0, -1) if word[:n] in self._ids and n <= len(word))
            out.append(self._ids[word[:length]])
            word = word[length:]
        return out

    def piece(self, token: int) -> bytes:
        """What the token adds to the text."""
        entry = self._tokens[token]
        own = entry.spelling if entry.piece is None else entry.piece
        return b"" if entry.control else own

    def spelling(self, token: int) -> bytes:
        """The token's name."""
        return self._tokens[token].spelling

    def is_control(self, token: int) -> bool:
        """Whether it is control."""
        return self._tokens[token].control

    def ends_generation(self, token: int) -> bool:
        """Whether it ends the text."""
        return self._tokens[token].end


def bytes_and(*words: str) -> list[Token]:
    """All 256 bytes as tokens, then these words."""
    return [Token(bytes([i])) for i in range(256)] + [Token(word.encode()) for word in words]


class ReducedVocabulary(FakeVocabulary):
    """Some characters of another vocabulary, its end token, and after it a token for all that is missing."""

    part_of: PartOf

    def __init__(self, whole: FakeVocabulary, characters: str) -> None:
        super().__init__(characters)
        self._end, self._other = len(characters), len(characters) + 1
        self.size = len(characters) + 2
        known = (*whole.tokenize(characters), whole.size - 1, -1)
        self.part_of = PartOf(known, self._other, tokenizer_id(whole), "fake")

    def piece(self, token: int) -> bytes:
        return b"" if self.is_control(token) else self._characters[token].encode()

    def spelling(self, token: int) -> bytes:
        return b"<|other|>" if token == self._other else super().spelling(token)

    def is_control(self, token: int) -> bool:
        return token >= self._end

    def ends_generation(self, token: int) -> bool:
        return token == self._end
