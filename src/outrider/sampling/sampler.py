"""One request's sampler: what it added to the logits, then the chain of filters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from outrider.core.contracts import Constraint, Sampler, Vocabulary
from outrider.core.data import Distribution, Logits, Mask, Row, TokenLogprob, TopLogits, point_mass
from outrider.core.errors import ConstraintError, OutriderError, SettingError
from outrider.core.params import SamplingParams
from outrider.sampling.chain import Chain, argmax, ranked
from outrider.sampling.penalties import Dry, Penalties, bias_of, penalises


class RequestSampler:
    """The Sampler of one request, over the target's vocabulary; `tokens` is its prompt. What `constraint`
    does not allow is barred before every filter. Raises SettingError for a token that the vocabulary lacks,
    and on a row of which bias, bans and penalties leave no token; ConstraintError where the constraint leaves
    none."""

    def __init__(
        self,
        params: SamplingParams,
        vocabulary: Vocabulary,
        tokens: Sequence[int],
        constraint: Constraint | None = None,
    ) -> None:
        self.params = params
        self._chain = Chain(params)
        self.top = self._chain.needed
        self._constraint = constraint
        self._num_generated = 0
        self._bias = bias_of(params, vocabulary)
        self._early_bias = bias_of(params, vocabulary, bars_end=params.min_tokens > 0)
        self._penalties: list[Penalties | Dry] = [Penalties(params, tokens)] if penalises(params) else []
        if params.dry_multiplier > 0 and params.dry_penalty_last_n != 0:
            self._penalties.append(Dry(params, vocabulary, tokens))
        self._adjusts_all = bool(self._bias is not None or self._penalties)

    def constrain(self, constraint: Constraint | None) -> None:
        """From the next token on this is what the output may be."""
        self._constraint = constraint

    def accept(self, tokens: Sequence[int]) -> None:
        """These tokens became final."""
        self._num_generated += len(tokens)
        for penalty in self._penalties:
            penalty.extend(tokens)

    def adjusts(self, drafted: Sequence[int]) -> bool:
        return self._constraint is not None or self._applies(drafted)

    def adjust(self, row: Row, drafted: Sequence[int]) -> Row:
        allowed = None if self._constraint is None else self._constraint.allowed(drafted)
        if allowed is None and not self._applies(drafted):
            return row
        adjusted = row.copy() if allowed is None else _masked(row, allowed)
        bias = self._early_bias if self._is_early(drafted) else self._bias
        # What is no number, in the row or by these sums, is refused below.
        with np.errstate(over="ignore", invalid="ignore"):
            if bias is not None:
                adjusted[bias[0]] += bias[1]
            for penalty in self._penalties:
                penalty.lower(adjusted, drafted)
        best = float(adjusted.max())
        if not math.isfinite(best):
            argmax(row)
            raise _unusable(best, constrained=allowed is not None)
        return adjusted

    def distribution(self, row: Row | TopLogits, drafted: Sequence[int]) -> Distribution:
        return self._chain.distribution(row if isinstance(row, TopLogits) else self.adjust(row, drafted))

    def look(
        self, row: Row | TopLogits, *, with_distribution: bool
    ) -> tuple[int, float, Distribution | None]:
        return self._chain.look(row, with_distribution=with_distribution)

    def _applies(self, drafted: Sequence[int]) -> bool:
        return self._adjusts_all or (self._is_early(drafted) and self._early_bias is not None)

    def _is_early(self, drafted: Sequence[int]) -> bool:
        return self._num_generated + len(drafted) < self.params.min_tokens


_MINUS_INFINITY = np.array(-np.inf, dtype=np.float32).view(np.int32)


def _masked(row: Row, allowed: Mask) -> Row:
    """The row with -inf for what is not allowed: 0 or -inf is put together bit by bit and added. `np.where`
    takes up to ten times as long where a mask follows no pattern."""
    bits = allowed.astype(np.int32)
    bits -= 1  # no bit where it is allowed, all of them where not
    bits &= _MINUS_INFINITY
    masked: Row = bits.view(np.float32)
    masked += row
    return masked


def _unusable(best: float, *, constrained: bool) -> OutriderError:
    if best == -math.inf and constrained:
        why = "of the tokens that it allows here none is left by bias, bans and penalties"
        return ConstraintError("constrained output", why, "Ban fewer tokens, or change the grammar.")
    if best == -math.inf:
        return SettingError(
            "banned", "no token is left", "Ban fewer tokens, or soften the logit bias and the penalties."
        )
    why = "they raise a logit beyond all numbers"
    return SettingError("logit bias and penalties", why, "Choose values nearer to 0 (repeat penalty: 1).")


_NO_TOKEN = -1


class LazyDistributions(Sequence[Distribution]):
    """The distributions of several rows, each computed once, when it is first asked for.

    Row i follows the first i drafted tokens. A rejected draft never looks at the rows after
    the rejection. `dead_end` is the first row where a constraint leaves no token, and why: whether
    it matters depends on the verdict; until then all its mass lies on a token that does not exist, so that
    no drafted token is accepted there.
    """

    def __init__(self, logits: Logits, sampler: Sampler, drafted: Sequence[int]) -> None:
        self._logits = logits
        self._sampler = sampler
        self._drafted = drafted
        self._computed: dict[int, Distribution] = {}
        self.dead_end: tuple[int, ConstraintError] | None = None

    def __len__(self) -> int:
        return len(self._logits)

    def __getitem__(self, i: int) -> Distribution:  # type: ignore[override]  # nobody asks for slices
        if i not in self._computed:
            try:
                self._computed[i] = self._sampler.distribution(self._logits[i], self._drafted[:i])
            except ConstraintError as error:
                self._computed[i] = point_mass(self._end_at(i, error))
        return self._computed[i]

    def _end_at(self, i: int, error: ConstraintError) -> int:
        if self.dead_end is None or i < self.dead_end[0]:
            self.dead_end = i, error
        return _NO_TOKEN

    def choice(self, i: int) -> int:
        """The token of a point mass; without making one where it is the most likely token."""
        if self._sampler.top != 1:
            return int(self[i].tokens[0])
        row = self._logits[i]
        try:
            return argmax(row if isinstance(row, TopLogits) else self.row(i))
        except ConstraintError as error:
            return self._end_at(i, error)

    def row(self, i: int) -> Row:
        """The logits after bias, bans and penalties. Raises ConstraintError at a dead end."""
        return self._sampler.adjust(self._logits[i], self._drafted[:i])


def score_tokens(
    logits: Logits, rows: LazyDistributions, tokens: Sequence[int], num_top: int
) -> tuple[TokenLogprob, ...]:
    """The log probability of each token in its row of logits, and the `num_top` most likely there. `rows` are
    the same rows after bans: where a ban leaves one token, it was forced."""
    scores = []
    for i, token in enumerate(tokens):
        row, forced = logits[i], bool(np.count_nonzero(rows.row(i) > -np.inf) == 1)
        best = row.max()
        log_total = float(best) + float(np.log(np.exp(row - best).sum(dtype=np.float64)))
        top = ranked(row, num_top).tolist() if num_top else ()
        likely = tuple((other, float(row[other]) - log_total) for other in top)
        scores.append(TokenLogprob(token, float(row[token]) - log_total, likely, forced))
    return tuple(scores)
