"""Which tokens matter: how often each is used, what no draft can do without, what fewer tokens lose."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.core.contracts import Vocabulary
from outrider.models.vocab.subset import Ids, ranked

Uses = npt.NDArray[np.float64]
"""how often each token is used, or how likely it was, added up"""

_PLACEHOLDER = re.compile(rb"(unused|reserved|dummy|control|placeholder|extra|pad)\D*\d+", re.IGNORECASE)
"""Control tokens that no text has: there can be thousands."""
_MAX_DIGITS = 3
_FOLDS = 8


def floor_of(vocabulary: Vocabulary) -> Ids:
    """Tokens that are kept in any case: those of one byte, digits, white space, control tokens that are in
    use, and all that end an answer."""
    return np.array([t for t in range(vocabulary.size) if _is_needed(vocabulary, t)], dtype=np.int64)


def _is_needed(vocabulary: Vocabulary, token: int) -> bool:
    if vocabulary.ends_generation(token):
        return True
    if vocabulary.is_control(token):
        return not _PLACEHOLDER.search(vocabulary.spelling(token))
    piece = vocabulary.piece(token)
    is_number = len(piece) <= _MAX_DIGITS and piece.isdigit()
    return len(piece) == 1 or is_number or (bool(piece) and piece.isspace())


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the target's in the draft's ids, -1 for what the draft lacks; `mass`: how likely each
    token was, added up over its places, None where that is not known."""

    tokens: Ids
    mass: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """How a draft's vocabulary is used: by answers of the target, and by `other` texts. Tokens that are not
    `usable` are never kept."""

    answers: tuple[Answer, ...]
    other: Uses
    usable: npt.NDArray[np.bool_]
    floor: Ids

    def order(self, left_out: Collection[int] = ()) -> Ids:
        """All tokens in the order in which they are kept, by their uses in all texts but some answers."""
        uses = self.other.astype(np.float64)
        for number, answer in enumerate(self.answers):
            if number not in left_out:
                uses += np.bincount(answer.tokens[answer.tokens >= 0], minlength=len(uses))
                uses += 0 if answer.mass is None else answer.mass
        uses[~self.usable] = -1
        return ranked(uses, self.floor)

    def lost(self, sizes: Sequence[int], held_out: Sequence[Answer] = ()) -> list[float]:
        """For vocabularies of each size the share of the answers' tokens, 0-1, that they lack: of every
        answer by the uses in the others alone, and of those that nothing is counted in. Without any it is 0.
        """
        folds = [range(i, len(self.answers), _FOLDS) for i in range(min(_FOLDS, len(self.answers)))]
        tested = [([self.answers[number] for number in numbers], numbers) for numbers in folds]
        found, total = np.zeros(len(sizes)), 0
        for answers, left_out in [*tested, (held_out, range(0))]:
            places = np.full(len(self.other) + 1, len(self.other))  # the last: what the draft lacks
            order = self.order(left_out)
            places[order] = np.arange(len(order))
            for answer in answers:
                found += [(places[answer.tokens] >= size - 1).sum() for size in sizes]
                total += len(answer.tokens)
        return [float(count) / max(total, 1) for count in found]
