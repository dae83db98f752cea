"""What a request adds to single logits: penalties on tokens of the text so far, bias, bans, and the bar on
end tokens."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from outrider.core.contracts import Vocabulary
from outrider.core.data import Row
from outrider.core.errors import SettingError
from outrider.core.params import SamplingParams
from outrider.sampling.chain import Tokens


def penalises(params: SamplingParams) -> bool:
    """Whether any of the three penalties is on."""
    neutral = params.repeat_penalty == 1 and params.frequency_penalty == 0 and params.presence_penalty == 0
    return params.repeat_last_n != 0 and not neutral


class Penalties:
    """The penalties of one request, on tokens among the last of a growing text.

    The repetition penalty divides positive logits and multiplies the others (Keskar et al. 2019,
    arXiv:1909.05858, and what llama.cpp made of it); the frequency penalty is then subtracted
    once per occurrence, the presence penalty once.
    """

    def __init__(self, params: SamplingParams, tokens: Sequence[int]) -> None:
        self._params = params
        self._window = deque(tokens, maxlen=params.repeat_last_n if params.repeat_last_n >= 0 else None)
        self._counts = Counter(self._window)

    def extend(self, tokens: Sequence[int]) -> None:
        self._counts = +self._after(tokens)  # those alone that occur
        self._window.extend(tokens)

    def lower(self, row: Row, drafted: Sequence[int]) -> None:
        """Change a row of logits in place, as if the text were followed by `drafted`."""
        params, found = self._params, +self._after(drafted)
        tokens, counts = np.fromiter(found, np.int64, len(found)), np.fromiter(found.values(), np.int64)
        logits = row[tokens]
        if params.repeat_penalty != 1:
            penalty = np.float32(params.repeat_penalty)
            logits = np.where(logits > 0, logits / penalty, logits * penalty)
        row[tokens] = logits - (counts * params.frequency_penalty + params.presence_penalty)

    def _after(self, tokens: Sequence[int]) -> Counter[int]:
        counts = self._counts.copy()
        counts.update(tokens)
        if self._window.maxlen is not None:
            num_leaving = max(0, len(self._window) + len(tokens) - self._window.maxlen)
            counts.subtract(islice(chain(self._window, tokens), num_leaving))
        return counts


# DRY: a penalty on the token that would go on repeating what the text said before. Breakers are strings where
# it stops looking for repetitions, and the token sequences that spell them.

_LOG_MAX_FLOAT = 88.7228391
"""Natural logarithm of the largest float32: larger powers of the base are cut to it."""


@dataclass(frozen=True, slots=True)
class _Window:
    """The last tokens of a text. `lengths[j]`: how many tokens in front of `tokens[j]` are also the text's
    last, so how long a repetition `tokens[j]` would go on. `heads[j]`: whether a breaker may begin in it."""

    tokens: Tokens
    lengths: npt.NDArray[np.int64]
    heads: npt.NDArray[np.bool_]

    def appended(self, token: int, is_head: bool, size: int) -> _Window:
        """The window one token later. What that token repeats grew by one; all else starts again at 0."""
        lengths = np.where(self.tokens == token, self.lengths + 1, 0)
        start = max(0, len(self.tokens) + 1 - size) if size >= 0 else 0
        return _Window(
            np.append(self.tokens, token)[start:],
            np.concatenate([[0], lengths])[start:],
            np.append(self.heads, is_head)[start:],
        )


class Dry:
    """The DRY penalty of one request; a position costs time linear in the window."""

    def __init__(self, params: SamplingParams, vocabulary: Vocabulary, tokens: Sequence[int]) -> None:
        self._params = params
        self._breakers = breakers_of(params.dry_sequence_breakers, vocabulary)
        last = tokens[-params.dry_penalty_last_n :] if params.dry_penalty_last_n > 0 else tokens
        heads = np.array([token in self._breakers for token in last], dtype=np.bool_)
        self._window = _Window(np.array(last, dtype=np.int64), _repeat_lengths(last), heads)

    def extend(self, tokens: Sequence[int]) -> None:
        self._window = self._after(tokens)

    def _after(self, tokens: Sequence[int]) -> _Window:
        window = self._window
        for token in tokens:
            window = window.appended(token, token in self._breakers, self._params.dry_penalty_last_n)
        return window

    def lower(self, row: Row, drafted: Sequence[int]) -> None:
        """Lower, in place, the logits of tokens that would go on a repetition, were the text followed by
        `drafted`, by multiplier * base ** (repeated tokens - allowed length)."""
        allowed, base = self._params.dry_allowed_length, self._params.dry_base
        repeats = _longest_repeats(self._after(drafted), allowed, self._breakers)
        kept = {token: n for token, n in repeats.items() if () not in self._breakers.get(token, ())}
        exponents = np.fromiter(kept.values(), np.float64, len(kept)) - allowed
        largest = int(_LOG_MAX_FLOAT / math.log(base)) if base > 1.000001 else 0
        if largest:
            np.minimum(exponents, largest, out=exponents)
        with np.errstate(over="ignore"):  # an infinite penalty is a ban
            penalties = (self._params.dry_multiplier * base**exponents).astype(np.float32)
        row[np.fromiter(kept, np.int64, len(kept))] -= penalties


def _repeat_lengths(tokens: Sequence[int]) -> npt.NDArray[np.int64]:
    """`_Window.lengths` of a whole text in linear time: the Z-algorithm on the text reversed."""
    size = len(tokens)
    text = tokens[::-1]
    matches = [0] * size
    left = right = 0  # the match that reaches furthest is text[left:right]
    for i in range(1, size):
        n = min(right - i, matches[i - left]) if i < right else 0
        while i + n < size and text[n] == text[i + n]:
            n += 1
        matches[i] = n
        if i + n > right:
            left, right = i, i + n
    # The match that begins at i in the reversed text ends in front of tokens[size - i].
    return np.array([0, *matches[:0:-1]][:size], dtype=np.int64)


def _longest_repeats(window: _Window, allowed: int, breakers: Breakers) -> dict[int, int]:
    """Each token that would go on a repetition of `allowed` or more tokens, and the longest such."""
    size = len(window.tokens)
    limit = _unbroken(window, breakers)
    if size <= allowed or limit < allowed:
        return {}
    lengths = np.minimum(np.minimum(window.lengths, np.arange(size)), limit)
    found = np.flatnonzero(lengths[1:] >= allowed) + 1
    found = found[np.argsort(lengths[found], kind="stable")]  # the longest last: it is kept
    return dict(zip(window.tokens[found].tolist(), lengths[found].tolist(), strict=True))


def _unbroken(window: _Window, breakers: Breakers) -> int:
    size = len(window.tokens)
    for head in reversed(np.flatnonzero(window.heads).tolist()):
        following = window.tokens[head + 1 :][:_MAX_TAIL_TOKENS].tolist()
        tails = breakers[int(window.tokens[head])]
        whole = [len(tail) for tail in tails if tuple(following[: len(tail)]) == tail]
        if whole:
            return size - 1 - head - max(whole)
    return size


_MAX_BYTES, _MAX_TAIL_TOKENS = 40, 20
"""A breaker, and the tokens after its first one, are cut to so many, as llama.cpp does."""

Breakers = dict[int, frozenset[tuple[int, ...]]]
"""For each token in which a breaker begins, the token sequences that complete one; () where the token alone
contains a breaker"""

_known: WeakKeyDictionary[Vocabulary, dict[bytes, Breakers]] = WeakKeyDictionary()


def breakers_of(strings: Sequence[str], vocabulary: Vocabulary) -> Breakers:
    """The breakers in terms of a vocabulary; each is looked up in it once. It may be part of a token, or
    begin in one and end in later ones."""
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
    """Every proper beginning of the breaker, and the tokens of the rest; no cuts inside a character."""
    for cut in range(1, len(breaker)):
        try:
            rest = breaker[cut:].decode()
        except UnicodeDecodeError:
            continue
        yield breaker[:cut], tuple(vocabulary.tokenize(rest, add_special=False)[:_MAX_TAIL_TOKENS])


# Whatever the text: bias, bans, and the bar on end tokens


Bias = tuple[Tokens, npt.NDArray[np.float32]]
"""What is added to the logits of some tokens, of which none occurs twice; -inf bars one"""


def bias_of(params: SamplingParams, vocabulary: Vocabulary, *, bars_end: bool = False) -> Bias | None:
    """The logit bias and the bans of a request, if it has any; `bars_end`: and no end token may be chosen.
    Raises SettingError for a token that the vocabulary lacks."""
    biased = [token for token, _ in params.logit_bias]
    for name, tokens in (("logit bias", biased), ("banned", params.banned)):
        for token in tokens:
            if not 0 <= token < vocabulary.size:
                why = f"the vocabulary of {vocabulary.size} tokens has no token {token}"
                raise SettingError(name, why, f"Give ids from 0 to {vocabulary.size - 1}.")
    barred = (*params.banned, *(end_tokens(vocabulary) if bars_end else ()))
    sums: dict[int, float] = {}
    for token, bias in (*params.logit_bias, *((token, -math.inf) for token in barred)):
        sums[token] = sums.get(token, 0.0) + bias
    with np.errstate(over="ignore"):  # what is too large is refused with the row it is added to
        values = np.fromiter(sums.values(), np.float64, len(sums)).astype(np.float32)
    return (np.fromiter(sums, np.int64, len(sums)), values) if sums else None


_end_tokens: WeakKeyDictionary[Vocabulary, tuple[int, ...]] = WeakKeyDictionary()


def end_tokens(vocabulary: Vocabulary) -> tuple[int, ...]:
    """Every token that ends a generation; looked for once in each vocabulary."""
    found = _end_tokens.get(vocabulary)
    if found is None:
        found = tuple(token for token in range(vocabulary.size) if vocabulary.ends_generation(token))
        _end_tokens[vocabulary] = found
    return found
