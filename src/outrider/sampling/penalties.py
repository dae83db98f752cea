"""Repetition, frequency and presence penalties over the last tokens of a text."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from outrider.core.contracts import Vocabulary
from outrider.core.data import Row
from outrider.core.errors import SettingError
from outrider.core.params import SamplingParams
from outrider.sampling.selection import Tokens


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
        """These tokens follow the text."""
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


# What is added to single logits whatever the text: bias, bans, and the bar on end tokens.


@dataclass(frozen=True, slots=True)
class Bias:
    """`values[i]` is added to the logit of `tokens[i]`; -inf bars it. No token occurs twice."""

    tokens: Tokens
    values: npt.NDArray[np.float32]

    def __bool__(self) -> bool:
        return len(self.tokens) > 0

    def add_to(self, row: Row) -> None:
        """Change a row of logits in place."""
        row[self.tokens] += self.values


def bias_of(params: SamplingParams, vocabulary: Vocabulary) -> Bias:
    """The logit bias and the bans of a request.

    Raises SettingError for a token that the vocabulary lacks.
    """
    for name, tokens in (("logit bias", (t for t, _ in params.logit_bias)), ("banned", params.banned)):
        _check_tokens(name, tokens, vocabulary.size)
    return _merged([*params.logit_bias, *((token, -math.inf) for token in params.banned)])


def with_end_barred(params: SamplingParams, vocabulary: Vocabulary) -> Bias:
    """The same while fewer than `min_tokens` tokens were generated: no end token may be chosen."""
    barred = (*params.banned, *end_tokens(vocabulary))
    return _merged([*params.logit_bias, *((token, -math.inf) for token in barred)])


def _check_tokens(name: str, tokens: Iterable[int], size: int) -> None:
    for token in tokens:
        if not 0 <= token < size:
            why = f"the vocabulary of {size} tokens has no token {token}"
            raise SettingError(name, why, f"Give ids from 0 to {size - 1}.")


def _merged(biases: Iterable[tuple[int, float]]) -> Bias:
    sums: dict[int, float] = {}
    for token, bias in biases:
        sums[token] = sums.get(token, 0.0) + bias
    with np.errstate(over="ignore"):  # what is too large is refused with the row it is added to
        values = np.fromiter(sums.values(), np.float64, len(sums)).astype(np.float32)
    return Bias(np.fromiter(sums, np.int64, len(sums)), values)


_end_tokens: WeakKeyDictionary[Vocabulary, tuple[int, ...]] = WeakKeyDictionary()


def end_tokens(vocabulary: Vocabulary) -> tuple[int, ...]:
    """Every token that ends a generation; looked for once in each vocabulary."""
    found = _end_tokens.get(vocabulary)
    if found is None:
        found = tuple(token for token in range(vocabulary.size) if vocabulary.ends_generation(token))
        _end_tokens[vocabulary] = found
    return found
