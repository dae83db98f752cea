"""What happened inside: drafted and accepted tokens, calls, where the time went, memory, quality, hiccups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from outrider.lab.bench.results import Cell, Results
from outrider.lab.rows import AnswerRow, CaseOutcome, RunRow


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Tokens drafted and accepted at the first, second, … place of a draft, over all requests of a cell."""

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    is_measured: bool
    """else they are replay's"""

    @property
    def ratios(self) -> tuple[float | None, ...]:
        """Accepted over drafted at each place; None where nothing was drafted there."""
        return tuple(a / d if d else None for a, d in zip_longest(self.accepted, self.drafted, fillvalue=0))


@dataclass(frozen=True, slots=True)
class Hiccups:
    """Single-token target calls that took more than twice their block's median, of how many."""

    hiccups: int
    calls: int

    @property
    def ratio(self) -> float | None:
        return self.hiccups / self.calls if self.calls else None


@dataclass(frozen=True, slots=True)
class Quality:
    """A target's quantization against the reference's texts: means over all their tokens."""

    reference: str
    mean_kl: float
    """nats"""
    top1_agreement: float
    num_tokens: int


def acceptance_by_position(results: Results, cell: Cell) -> Acceptance | None:
    """Counted in real requests, or where none ran in replayed ones."""
    parts = _parts(results, cell)
    if not parts:
        return None
    drafted, accepted = _added(row.drafted for row in parts), _added(row.accepted for row in parts)
    return Acceptance(drafted, accepted, isinstance(parts[0], RunRow))


def tokens_per_target_call(results: Results, cell: Cell) -> float | None:
    """Generated tokens over target calls; of real requests, or where none ran of replayed ones."""
    counted = [(row.tokens, row.target_calls) for row in _parts(results, cell) if row.target_calls]
    return sum(tokens for tokens, _ in counted) / sum(calls for _, calls in counted) if counted else None


def model_seconds(results: Results) -> float:
    """What the model calls of the rows took: answers, scoring, real requests. Loading and measuring costs
    leave none."""
    requests: list[AnswerRow | RunRow] = [*results.answers, *results.runs]
    scored_s = sum(row.seconds for row in results.offers)
    return sum(row.prefill_s + row.decode_s for row in requests) + scored_s


def hiccups(results: Results) -> Hiccups:
    """Over all complete blocks."""
    return Hiccups(sum(row.hiccups for row in results.blocks), sum(row.calls for row in results.blocks))


def quality_of(results: Results, target: str) -> Quality | None:
    """How a target scores its reference's texts, under whichever backend; None where it was not scored."""
    same = results.same_file(target)
    rows = [row for row in results.quality if row.target in same]
    rows = [row for row in rows if row.reference == rows[-1].reference]
    total = sum(row.num_tokens for row in rows)
    if not total:
        return None
    mean_kl = sum(row.mean_kl * row.num_tokens for row in rows) / total
    agreement = sum(row.top1_agreement * row.num_tokens for row in rows) / total
    return Quality(rows[-1].reference, mean_kl, agreement, total)


def _parts(results: Results, cell: Cell) -> Sequence[RunRow | CaseOutcome]:
    """The real requests of a cell, under each of its workloads; where none ran the replayed cases."""
    names = results.workloads if cell.workload is None else (cell.workload,)
    cells = [cell._replace(workload=name) for name in names]
    if runs := [row for one in cells for row in results.runs_by_cell.get(one, ())]:
        return runs
    replayed = [results.prediction_by_cell[one] for one in cells if one in results.prediction_by_cell]
    return [case for row in replayed for case in row.cases]


def _added(counts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip_longest(*counts, fillvalue=0)))
