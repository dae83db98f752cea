"""Where DRY stops looking for repetitions: strings, and the token sequences that spell them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

from outrider.core.contracts import Vocabulary

_MAX_BYTES = 40
"""A breaker is cut to this length, as llama.cpp does."""

MAX_TAIL_TOKENS = 20
"""The tokens after a breaker's first one are cut to so many, as llama.cpp does."""

Breakers = dict[int, frozenset[tuple[int, ...]]]
"""For each token in which a breaker begins, the token sequences that complete one; () where the token alone
contains a breaker"""

_known: WeakKeyDictionary[Vocabulary, dict[bytes, Breakers]] = WeakKeyDictionary()


def breakers_of(strings: Sequence[str], vocabulary: Vocabulary) -> Breakers:
    """The breakers in terms of a vocabulary; each string is looked up in it once.

    A breaker may be part of a token, or begin in one and end in later ones, as they would be
    tokenized on their own.
    """
    known = _known.setdefault(vocabulary, {})
    wanted = [string.encode()[:_MAX_BYTES] for string in strings if string]
    missing = [breaker for breaker in wanted if breaker not in known]
    if missing:
        words = [_word(vocabulary, token) for token in range(vocabulary.size)]
        known.update({breaker: _in_tokens(breaker, words, vocabulary) for breaker in missing})
    merged: Breakers = {}
    for breaker in wanted:
        for token, tails in known[breaker].items():
            merged[token] = merged.get(token, frozenset()) | tails
    return merged


def _word(vocabulary: Vocabulary, token: int) -> bytes:
    """What the token looks like in a text that spells out control tokens."""
    return vocabulary.piece(token) or (vocabulary.spelling(token) if vocabulary.is_control(token) else b"")


def _in_tokens(breaker: bytes, words: Sequence[bytes], vocabulary: Vocabulary) -> Breakers:
    beginnings = list(_beginnings(breaker, vocabulary))
    found: Breakers = {}
    for token, word in enumerate(words):
        if breaker in word:
            found[token] = frozenset([()])
        elif tails := frozenset(tail for beginning, tail in beginnings if word.endswith(beginning)):
            found[token] = tails
    return found


def _beginnings(breaker: bytes, vocabulary: Vocabulary) -> Iterator[tuple[bytes, tuple[int, ...]]]:
    """Every proper beginning of the breaker and the tokens of what it lacks.

    A cut inside a character is left out: the rest would not be text.
    """
    for cut in range(1, len(breaker)):
        try:
            rest = breaker[cut:].decode()
        except UnicodeDecodeError:
            continue
        tail = vocabulary.tokenize(rest, add_special=False)[:MAX_TAIL_TOKENS]
        yield breaker[:cut], tuple(tail)
