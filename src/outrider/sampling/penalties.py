"""Repetition, frequency and presence penalties over the last tokens of a text."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from outrider.core.data import Row
from outrider.core.params import SamplingParams
from outrider.sampling.selection import Tokens

Counts = npt.NDArray[np.int64]


def penalises(params: SamplingParams) -> bool:
    """Whether any of the three penalties is on."""
    neutral = params.repeat_penalty == 1 and params.frequency_penalty == 0 and params.presence_penalty == 0
    return params.repeat_last_n != 0 and not neutral


def penalise(row: Row, tokens: Tokens, counts: Counts, params: SamplingParams) -> None:
    """Lower, in place, the logits of tokens that occurred so many times.

    The repetition penalty divides positive logits and multiplies the others (Keskar et al. 2019,
    arXiv:1909.05858, and what llama.cpp made of it); the frequency penalty is then subtracted
    once per occurrence, the presence penalty once.
    """
    logits = row[tokens]
    if params.repeat_penalty != 1:
        penalty = np.float32(params.repeat_penalty)
        logits = np.where(logits > 0, logits / penalty, logits * penalty)
    row[tokens] = logits - (counts * params.frequency_penalty + params.presence_penalty)


class TokenCounts:
    """How often each token occurs among the last `window` tokens of a growing text (-1: of all).

    Every token that was ever counted keeps its slot, so that a step costs what is new in it, and
    looking ahead no more than a copy.
    """

    def __init__(self, window: int, tokens: Sequence[int]) -> None:
        self._window: deque[int] | None = deque(tokens, maxlen=window) if window >= 0 else None
        counted = Counter(tokens if self._window is None else self._window)
        self._slots = {token: slot for slot, token in enumerate(counted)}
        self._tokens = array("q", counted.keys())
        self._counts = array("q", counted.values())

    def extend(self, tokens: Sequence[int]) -> None:
        """These tokens follow the text."""
        leaving, entering = self._moves(tokens)
        for token in leaving:
            self._counts[self._slots[token]] -= 1
        for token in entering:
            slot = self._slots.setdefault(token, len(self._slots))
            if slot == len(self._tokens):
                self._tokens.append(token)
                self._counts.append(0)
            self._counts[slot] += 1
        if self._window is not None:
            self._window.extend(tokens)

    def after(self, drafted: Sequence[int]) -> tuple[Tokens, Counts]:
        """The tokens in the window, were the text followed by these, and how often each occurs."""
        leaving, entering = self._moves(drafted)
        tokens, counts = np.array(self._tokens), np.array(self._counts)
        for token in leaving:
            counts[self._slots[token]] -= 1
        new: Counter[int] = Counter()
        for token in entering:
            slot = self._slots.get(token)
            if slot is None:
                new[token] += 1
            else:
                counts[slot] += 1
        present = np.flatnonzero(counts)
        tokens, counts = tokens[present], counts[present]
        if not new:
            return tokens, counts
        return np.append(tokens, list(new)), np.append(counts, list(new.values()))

    def _moves(self, tokens: Sequence[int]) -> tuple[list[int], Sequence[int]]:
        """Which tokens leave the window and which enter it when these follow the text."""
        if self._window is None or self._window.maxlen is None:
            return [], tokens
        entering = tokens[-self._window.maxlen :]
        num_leaving = max(0, len(self._window) + len(entering) - self._window.maxlen)
        return list(islice(self._window, num_leaving)), entering
