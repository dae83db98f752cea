"""What rows of load.py come to: medians over rounds, ratios with intervals, quantiles of latencies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness import Row

RESAMPLES = 2000
Cells = Mapping[int, Row]
"""The rows of one server under one load, by round."""


class Ratio(NamedTuple):
    """Of total tokens/s, with where 95 % of the resampled ones lie."""

    value: float
    low: float
    high: float


class Latencies(NamedTuple):
    """Quantiles over the requests of all rounds, in seconds.

    `gap` is between tokens, those that came together at 0; `pause` is between bursts, what a reader
    waits for.
    """

    ttft_p50_s: float
    ttft_p95_s: float
    gap_p95_s: float
    pause_p50_s: float
    pause_p95_s: float


def by_load(rows: Iterable[Row]) -> dict[tuple[str, int], dict[str, dict[int, Row]]]:
    """Rows by load and number of clients, by server, by round; loads in the order of the file."""
    found: dict[tuple[str, int], dict[str, dict[int, Row]]] = {}
    for row in rows:
        servers = found.setdefault((row["load"], row["clients"]), {})
        servers.setdefault(row["contestant"], {})[row["round"]] = row
    return found


def answered(row: Row) -> list[Row]:
    """The requests of a row that went well."""
    return [request for request in row["requests"] if "error" not in request]


def errors(cells: Cells) -> list[str]:
    """What went wrong, in all rounds."""
    return [r["error"] for row in cells.values() for r in row["requests"] if "error" in r]


def tokens_per_s(row: Row) -> float:
    """Tokens of all requests over the time that the load took."""
    return float(sum(request["tokens"] for request in answered(row)) / row["wall_s"])


def median_speed(cells: Cells) -> float:
    """The median of the rounds' total tokens/s."""
    return median(map(tokens_per_s, cells.values()))


def accepted_share(cells: Cells) -> float:
    """Of the tokens, those that a draft had right; 0 where the server does not say."""
    requests = [request for row in cells.values() for request in answered(row)]
    return float(sum(r.get("accepted", 0) for r in requests) / max(sum(r["tokens"] for r in requests), 1))


def ratio(ours: Cells, theirs: Cells, seed: int = 0) -> Ratio:
    """The geometric mean over the rounds that both have, of our total tokens/s over theirs.

    The interval draws rounds again, and in each the questions that both answered: how a sample changes a
    round's ratio is taken from tokens over the time that requests took, which is the total's ratio
    as long as all clients are at work.
    """
    rounds = sorted(ours.keys() & theirs.keys())
    whole = np.array([np.log(tokens_per_s(ours[r]) / tokens_per_s(theirs[r])) for r in rounds])
    pairs = [_paired(ours[r], theirs[r]) for r in rounds]
    draw = np.random.default_rng(seed)
    drawn = []
    for _ in range(RESAMPLES):
        chosen = draw.integers(0, len(rounds), len(rounds))
        drawn.append(np.mean([whole[i] + _change(pairs[i], draw) for i in chosen]))
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Ratio(*(float(np.exp(log)) for log in (whole.mean(), low, high)))


def _paired(ours: Row, theirs: Row) -> npt.NDArray[np.float64]:
    """Our tokens and seconds, and theirs, of each question that both answered: shape (questions, 4)."""
    other = {request["id"]: request for request in answered(theirs)}
    both = [(r, other[r["id"]]) for r in answered(ours) if r["id"] in other]
    return np.array([(a["tokens"], a["e2e_s"], b["tokens"], b["e2e_s"]) for a, b in both], dtype=np.float64)


def _change(pairs: npt.NDArray[np.float64], draw: np.random.Generator) -> float:
    """By how much the log of the ratio changes when the questions are drawn again."""
    again = pairs[draw.integers(0, len(pairs), len(pairs))]
    return _log_ratio(again) - _log_ratio(pairs)


def _log_ratio(pairs: npt.NDArray[np.float64]) -> float:
    tokens, seconds, their_tokens, their_seconds = pairs.sum(axis=0)
    return float(np.log(tokens / seconds * their_seconds / their_tokens))


def latencies(cells: Cells) -> Latencies:
    """Of all requests that went well."""
    requests = [request for row in cells.values() for request in answered(row)]
    ttft = [request["ttft_s"] for request in requests]
    gaps = [gap for request in requests for gap in token_gaps(request)]
    pauses = [gap for request in requests for gap in request["gaps_s"]]
    return Latencies(*_quantiles(ttft, 0.5, 0.95), *_quantiles(gaps, 0.95), *_quantiles(pauses, 0.5, 0.95))


def token_gaps(request: Row) -> list[float]:
    """Between one token and the next: the pauses, and nothing between those that came together."""
    together = int(request["tokens"]) - 1 - len(request["gaps_s"])
    return [*request["gaps_s"], *[0.0] * max(together, 0)]


def _quantiles(values: Sequence[float], *quantiles: float) -> list[float]:
    return [float(q) for q in np.quantile(values or [float("nan")], quantiles)]


def best(servers: Mapping[str, Cells], ours: str) -> str | None:
    """Of the others, the one with the most total tokens/s under this load; None for none."""
    others = {name: median_speed(cells) for name, cells in servers.items() if name != ours}
    return max(others, key=others.__getitem__) if others else None
