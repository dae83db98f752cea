"""A draft model's logits, read as the target's tokens under a request's sampler."""

from __future__ import annotations

import numpy as np

from outrider.core.contracts import DraftRequest
from outrider.core.data import Distribution, Row
from outrider.models.vocab import Alignment
from outrider.sampling import argmax, confidence

_FARTHEST = 60.0
"""A logit so far above the best common one leaves that one no chance worth telling from another."""


class Rows:
    """Looks at one row at a time; `alignment` is the draft's with its target.

    A target can have many more tokens than its draft. Where the request's sampler leaves logits as they are,
    only those of the common tokens are looked at, in the target's order; else they are spread over its
    vocabulary.
    """

    def __init__(self, alignment: Alignment) -> None:
        self._alignment = alignment
        self._spread: Row | None = None

    def argmax(self, row: Row, request: DraftRequest, drafted: tuple[int, ...]) -> tuple[int, float] | None:
        """The target's token that the draft model finds most likely, and its confidence, before
        temperature and filters.

        None for a point-mass draft where something that the target lacks, or the draft does not know,
        is likelier: its second best is no guess worth making. What the target lacks takes its share of the
        confidence too. Neither holds under a constraint, which would bar an unknown part of that.

        Raises SettingError or ConstraintError where the request leaves no token, BackendError for logits
        that are not numbers.
        """
        alignment, plain = self._alignment, not request.sampler.adjusts(drafted)
        values = (
            alignment.common_part(row) if plain else request.sampler.adjust(self._over_target(row), drafted)
        )
        best = argmax(values)
        certainty = confidence(values, best)
        if request.constraint is None and len(alignment.foreign):
            gaps = row[alignment.foreign] - values[best]
            if request.draw is None and gaps.max() > 0:
                return None
            certainty = 1 / (1 / certainty + float(np.exp(np.minimum(gaps, _FARTHEST)).sum()))
        return int(alignment.common[best]) if plain else best, certainty

    def distribution(self, row: Row, request: DraftRequest, drafted: tuple[int, ...]) -> Distribution:
        """The distribution to sample from, over the tokens that both models have."""
        if self._alignment.identical or request.sampler.adjusts(drafted):
            return request.sampler.distribution(self._over_target(row), drafted)
        found = request.sampler.distribution(self._alignment.common_part(row), drafted)
        return Distribution(self._alignment.common[found.tokens], found.probs)

    def _over_target(self, row: Row) -> Row:
        # One buffer for all: a sampler keeps no row, and large ones are slow to get anew.
        if self._alignment.identical:
            return row
        self._spread = self._alignment.in_target(row, self._spread)
        return self._spread
