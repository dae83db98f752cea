"""A vocabulary in the form that llguidance works with.

llguidance needs the bytes of every token, which tokens end a text, which are no text at all, and how
the model's own tokenizer cuts text: forced text is tokenized as the model is used to.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from llguidance import LLTokenizer
from llguidance._tokenizer import TokenizerWrapper

from outrider.core.contracts import Vocabulary

_SENTINEL = "\x02"

_tokenizers: weakref.WeakKeyDictionary[Vocabulary, LLTokenizer] = weakref.WeakKeyDictionary()


def tokenizer_for(vocabulary: Vocabulary) -> LLTokenizer:
    """The tokenizer of a vocabulary, made once (a second for 150,000 tokens). The caller keeps the
    vocabulary alive as long as it uses the tokenizer."""
    tokenizer = _tokenizers.get(vocabulary)
    if tokenizer is None:
        tokenizer = LLTokenizer(TokenizerWrapper(_Described(vocabulary)), eos_token=end_tokens(vocabulary))
        _tokenizers[vocabulary] = tokenizer
    return tokenizer


def end_tokens(vocabulary: Vocabulary) -> list[int]:
    """All tokens by which the model may end its text."""
    return [token for token in range(vocabulary.size) if vocabulary.ends_generation(token)]


class _Described:
    """What llguidance's wrapper asks of a tokenizer. Control tokens are listed as special, so that no
    text is ever made of them, however they are spelled."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokens = range(vocabulary.size)
        self.special_token_ids = [t for t in tokens if vocabulary.is_control(t)]
        self.tokens = [
            vocabulary.spelling(t) if vocabulary.is_control(t) else vocabulary.piece(t) for t in tokens
        ]
        self.eos_token_id = end_tokens(vocabulary)[0]
        self.bos_token_id = None
        self._vocabulary = weakref.ref(vocabulary)
        self._cut: Callable[[str], list[int]] = (
            self._tokenize if self._spells("{") else self._tokenize_behind_sentinel
        )

    def __call__(self, text: bytes | str) -> list[int]:
        return self._cut(text if isinstance(text, str) else text.decode("utf-8"))

    def _spells(self, text: str) -> bool:
        return b"".join(self.tokens[t] for t in self._tokenize(text)) == text.encode()

    def _tokenize(self, text: str) -> list[int]:
        vocabulary = self._vocabulary()
        return [] if vocabulary is None else vocabulary.tokenize(text, add_special=False)

    def _tokenize_behind_sentinel(self, text: str) -> list[int]:
        """For tokenizers that put a blank before the first word: the sentinel takes it."""
        tokens = self._tokenize(_SENTINEL + text)
        for i, token in enumerate(tokens):
            if self.tokens[token].endswith(_SENTINEL.encode()):
                return tokens[i + 1 :]
        return tokens
