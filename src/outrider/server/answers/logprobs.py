"""Log probabilities of tokens, as chat completions and as completions have them."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from outrider.core.contracts import Vocabulary
from outrider.core.data import TokenLogprob

__all__ = ["Offsets", "chat_entries", "shown"]

_LEAST = -9_999.0
"""What OpenAI gives for a token that is next to impossible; JSON has no infinity."""


def shown(
    scored: Iterable[TokenLogprob], vocabulary: Vocabulary, visible: Sequence[int] = ()
) -> list[TokenLogprob]:
    """The tokens that are part of the text: none that only end it, or stand for structure."""
    return [
        one
        for one in scored
        if one.token in visible
        or not (vocabulary.ends_generation(one.token) or vocabulary.is_control(one.token))
    ]


def chat_entries(scored: Iterable[TokenLogprob], vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """A chat's `logprobs.content`. A token that is a part of a character has U+FFFD for a text; its
    bytes are whole."""
    return [
        _entry(one.token, one.logprob, vocabulary)
        | {"top_logprobs": [_entry(token, logprob, vocabulary) for token, logprob in one.top]}
        for one in scored
    ]


def _entry(token: int, logprob: float, vocabulary: Vocabulary) -> dict[str, Any]:
    spelled = _bytes(token, vocabulary)
    return {
        "token": spelled.decode("utf-8", errors="replace"),
        "logprob": max(logprob, _LEAST),
        "bytes": list(spelled),
    }


def _bytes(token: int, vocabulary: Vocabulary) -> bytes:
    """The text of a token; of one that shows none, its spelling."""
    return vocabulary.piece(token) or vocabulary.spelling(token)


class Offsets:
    """Where the tokens of a completion start in its text, in characters, from `start` on."""

    def __init__(self, vocabulary: Vocabulary, start: int = 0) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._position = start

    def entries(self, scored: Sequence[TokenLogprob]) -> dict[str, Any]:
        """A completion's `logprobs` for these tokens, which follow those before."""
        offsets = []
        for one in scored:
            offsets.append(self._position)
            self._position += len(self._decoder.decode(self._vocabulary.piece(one.token)))
        return {
            "tokens": [self._name(one.token) for one in scored],
            "token_logprobs": [max(one.logprob, _LEAST) for one in scored],
            "top_logprobs": [self._top(one) for one in scored],
            "text_offset": offsets,
        }

    def _top(self, one: TokenLogprob) -> dict[str, float]:
        names = {self._name(token): max(logprob, _LEAST) for token, logprob in reversed(one.top)}
        return dict(reversed(names.items()))

    def _name(self, token: int) -> str:
        spelled = _bytes(token, self._vocabulary)
        try:
            return spelled.decode()
        except UnicodeDecodeError:  # as OpenAI spells a part of a character
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
