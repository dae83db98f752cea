"""What happened inside: drafted and accepted tokens, calls, where the time went, memory, quality, hiccups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from outrider.bench.results import Cell, Results
from outrider.lab.rows import CaseOutcome, ModelRow, RunRow


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
class TimeShares:
    """Where the decoding time of a cell went, as shares of it: they add up to 1."""

    target_calls: float
    draft_calls: float
    own: float
    """the engine's own: all that is no model call"""
    is_measured: bool


@dataclass(frozen=True, slots=True)
class Hiccups:
    """Single-token target calls that took more than twice their block's median, of how many."""

    hiccups: int
    calls: int

    @property
    def ratio(self) -> float | None:
        """Their share; None without calls."""
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
    """Counted in real requests, or where none ran in replayed ones; other engines report no positions."""
    rows = _runs(results, cell)
    parts: Sequence[RunRow | CaseOutcome] = rows or _cases(results, cell)
    if not parts:
        return None
    drafted, accepted = (_added([row.drafted for row in parts]), _added([row.accepted for row in parts]))
    return Acceptance(drafted, accepted, bool(rows))


def time_shares(results: Results, cell: Cell) -> TimeShares | None:
    """Of real requests that say where their time went, or where none ran of replayed ones."""
    rows = _runs(results, cell)
    timed = [
        (row.decode_s, row.verify_s, row.draft_s or 0.0) for row in rows if row.verify_s is not None
    ] or [(case.seconds, case.verify_s, case.draft_s) for case in ([] if rows else _cases(results, cell))]
    whole = sum(seconds for seconds, _, _ in timed)
    if whole <= 0:
        return None
    verify = sum(verify_s for _, verify_s, _ in timed) / whole
    drafting = sum(draft_s for _, _, draft_s in timed) / whole
    return TimeShares(verify, drafting, max(1 - verify - drafting, 0.0), bool(rows))


def tokens_per_target_call(results: Results, cell: Cell) -> float | None:
    """Generated tokens over target calls; of real requests, or where none ran of replayed ones."""
    rows = _runs(results, cell)
    parts: Sequence[RunRow | CaseOutcome] = rows or _cases(results, cell)
    counted = [(row.tokens, row.target_calls) for row in parts if row.target_calls]
    return sum(tokens for tokens, _ in counted) / sum(calls for _, calls in counted) if counted else None


def hiccups(results: Results, target: str | None = None) -> Hiccups:
    """Over all complete blocks, of one target or of all."""
    blocks = [row for row in results.blocks if target in (None, row.target)]
    return Hiccups(sum(row.hiccups for row in blocks), sum(row.calls for row in blocks))


def memory_bytes(results: Results, target: str, draft: str | None) -> int | None:
    """What target and draft add to the process; of a model where it was not measured the size of its file."""
    rows = _models(results, target, draft)
    found = [row.memory_bytes or row.file_bytes for row in rows if row is not None]
    return sum(found) if len(found) == len(rows) else None


def memory_is_measured(results: Results, target: str, draft: str | None) -> bool:
    """Whether `memory_bytes` is measured for all of it."""
    return all(row is not None and row.memory_bytes for row in _models(results, target, draft))


def _models(results: Results, target: str, draft: str | None) -> list[ModelRow | None]:
    """The row of the target and of the draft beside it, in the same library."""
    rows = [results.model(target, "target")]
    return rows if draft is None else [*rows, results.model(draft, "draft", results.backend(target))]


def quality_of(results: Results, target: str, workload: str | None = None) -> Quality | None:
    """How a target scores its reference's texts, under whichever backend; None where it was not scored."""
    same = results.same_file(target)
    rows = [row for row in results.quality if row.target in same and workload in (None, row.workload)]
    rows = [row for row in rows if row.reference == rows[-1].reference]
    total = sum(row.num_tokens for row in rows)
    if not total:
        return None
    mean_kl = sum(row.mean_kl * row.num_tokens for row in rows) / total
    agreement = sum(row.top1_agreement * row.num_tokens for row in rows) / total
    return Quality(rows[-1].reference, mean_kl, agreement, total)


def _runs(results: Results, cell: Cell) -> list[RunRow]:
    return [row for one in _singles(results, cell) for row in results.runs_by_cell.get(one, ())]


def _cases(results: Results, cell: Cell) -> list[CaseOutcome]:
    rows = [results.prediction_by_cell.get(one) for one in _singles(results, cell)]
    return [case for row in rows if row is not None for case in row.cases]


def _singles(results: Results, cell: Cell) -> list[Cell]:
    """The cell under each of its workloads."""
    names = results.workloads if cell.workload is None else (cell.workload,)
    return [cell._replace(workload=name) for name in names]


def _added(counts: Sequence[tuple[int, ...] | None]) -> tuple[int, ...]:
    return tuple(map(sum, zip_longest(*[count for count in counts if count], fillvalue=0)))
