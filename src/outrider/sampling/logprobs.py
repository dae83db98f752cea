"""How likely the model itself held the tokens that were emitted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.core.data import Logits, Row, TokenLogprob
from outrider.sampling.sampler import LazyDistributions
from outrider.sampling.selection import top_k


def score_tokens(
    logits: Logits, rows: LazyDistributions, tokens: Sequence[int], num_top: int
) -> tuple[TokenLogprob, ...]:
    """The log probability of each token in its row of logits, and the `num_top` most likely there.

    `rows` are the same rows after bans: where a ban leaves one token, it was forced.
    """
    return tuple(
        _score(logits[i], token, num_top, forced=bool(np.count_nonzero(rows.row(i) > -np.inf) == 1))
        for i, token in enumerate(tokens)
    )


def _score(row: Row, token: int, num_top: int, *, forced: bool) -> TokenLogprob:
    best = row.max()
    log_total = float(best) + float(np.log(np.exp(row - best).sum(dtype=np.float64)))
    top = top_k(row, num_top) if num_top else ()
    return TokenLogprob(
        token,
        float(row[token]) - log_total,
        tuple((int(other), float(row[other]) - log_total) for other in top),
        forced,
    )
