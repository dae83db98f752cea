"""What rows of live.py come to: calls per token, speed-ups, validity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median, median_low

from harness import Row
from structured.bench import AUTO, OFF
from structured.cases import GROUPS


@dataclass(frozen=True, slots=True)
class Answers:
    """One case at one temperature: the finished runs of each mode (perhaps none)."""

    id: str
    group: str
    temperature: float
    runs: dict[str, list[Row]]
    divergence: Row
    bound_token_s: float | None = None

    @property
    def of_the_bound(self) -> float | None:
        """The bound's seconds per token over the automatic choice's."""
        run = self.middle(AUTO.name)
        return self.bound_token_s / token_s(run) if run and self.bound_token_s else None

    def middle(self, mode: str) -> Row | None:
        """The run of median time per token; None without any."""
        runs = self.runs.get(mode) or []
        if not runs:
            return None
        times = [token_s(run) for run in runs]
        return runs[times.index(median_low(times))]

    def calls(self, mode: str) -> float | None:
        """Target calls per generated token, over all runs."""
        return calls_per_token(self.runs.get(mode) or [])

    def speedup(self, mode: str) -> float | None:
        """Seconds per token of plain constrained decoding over the mode's, medians of the repetitions."""
        if not self.runs.get(mode) or not self.runs.get(OFF.name):
            return None
        plain, ours = (median(map(token_s, self.runs[name])) for name in (OFF.name, mode))
        return plain / ours

    def wrong(self) -> Iterator[tuple[str, str]]:
        """Mode and complaint of every run whose text is not what was asked for."""
        for mode, runs in self.runs.items():
            yield from ((mode, run["complaint"]) for run in runs if run["complaint"])


def read_answers(rows: Iterable[Row]) -> list[Answers]:
    """The cases of a file, in the order of their groups."""
    found = []
    for row in rows:
        if row.get("kind") == "case":
            runs = {name: [run for run in each if run.get("tokens")] for name, each in row["runs"].items()}
            known = row["id"], row["group"], row["temperature"], runs, row["divergence"]
            found.append(Answers(*known, row.get("bound_token_s")))
    return sorted(found, key=lambda case: (case.temperature, GROUPS.index(case.group), case.id))


def errors(rows: Iterable[Row]) -> list[tuple[str, str, str]]:
    """Case, mode and message of every run that failed."""
    return [
        (f"{row['id']} at {row['temperature']:g}", mode, run["error"])
        for row in rows
        if row.get("kind") == "case"
        for mode, runs in row["runs"].items()
        for run in runs
        if "error" in run
    ]


def token_s(run: Row) -> float:
    """Seconds per token of a run."""
    return float(run["decode_s"]) / int(run["tokens"])


def calls_per_token(runs: Sequence[Row]) -> float | None:
    """Target calls over generated tokens, of all runs together; None without any."""
    tokens = sum(run["tokens"] for run in runs)
    return sum(run["target_calls"] for run in runs) / tokens if tokens else None


def all_runs(cases: Iterable[Answers], mode: str) -> list[Row]:
    """Every run of a mode."""
    return [run for case in cases for run in case.runs.get(mode) or []]
