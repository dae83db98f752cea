"""Control tokens that a client spells out are text: no client can forge a turn by writing `<|im_end|>`. The
template's own control tokens are read as such, so a client's text must not contain any. A mark is put after
the first character of each that it spells; the template leaves the mark alone, and the rendered text is split
there before it is tokenized."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from outrider.core.contracts import Vocabulary

MARK = "\ufdd0"
"""A code point that never becomes a character."""
_WRITTEN_MARK = re.compile(r"\\ufdd0", re.IGNORECASE)
"""The mark as ASCII JSON writes it."""
_READ_BY_TEMPLATES = ("<think>", "</think>", "[THINK]", "[/THINK]")
"""Templates look for these in earlier answers; they open no turn."""


class ControlTokens:
    """The spellings of a vocabulary's control tokens, collected at first use."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def escape(self, value: Any) -> Any:
        """A client's plain data, with a mark in each control token that its texts spell."""
        if isinstance(value, str):
            return self._pattern.sub(rf"\1{MARK}", value.replace(MARK, "\ufffd"))
        if isinstance(value, Mapping):
            return {self.escape(key): self.escape(part) for key, part in value.items()}
        return [self.escape(part) for part in value] if isinstance(value, list) else value

    @staticmethod
    def split(rendered: str) -> list[str]:
        """A rendered text, split at its marks."""
        return _WRITTEN_MARK.sub(MARK, rendered).split(MARK)

    def count(self, text: str) -> int:
        """How many control tokens a text spells."""
        return sum(1 for _ in self._pattern.finditer(text))

    @cached_property
    def longest_bytes(self) -> int:
        """Bytes of the vocabulary's longest token."""
        tokens = range(self._vocabulary.size)
        return max(len(self._vocabulary.piece(t) or self._vocabulary.spelling(t)) for t in tokens)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        """The first character of each control token that is spelled out, overlapping ones too."""
        vocabulary = self._vocabulary
        spellings = {
            vocabulary.spelling(token).decode("utf-8", errors="ignore")
            for token in range(vocabulary.size)
            if vocabulary.is_control(token)
        }
        found = sorted(spellings.difference(_READ_BY_TEMPLATES, [""]), key=len, reverse=True)
        return re.compile(rf"(?=(?:{'|'.join(map(re.escape, found))}))(.)" if found else r"(?!)()", re.DOTALL)
