"""Tables of what load.py wrote.

python benchmarks/serve/report.py load.jsonl [--ours outrider]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Row, argument_parser, read_rows, run_program, table
from serve.summary import (
    Cells,
    accepted_share,
    best,
    by_load,
    errors,
    latencies,
    median_speed,
    ratio,
)

Loads = Mapping[tuple[str, int], Mapping[str, Cells]]


def main() -> None:
    parser = argument_parser(__doc__, out=False)
    parser.add_argument("results", type=Path)
    parser.add_argument("--ours", default="outrider", help="the server that the others are compared with")
    arguments = parser.parse_args()
    head, *rows = read_rows(arguments.results)
    if not rows:
        sys.exit(f"{arguments.results} has no results yet")
    print("\n".join(report(head, rows, arguments.ours)))


def report(head: Row, rows: list[Row], ours: str) -> Iterator[str]:
    """All lines."""
    loads: Loads = by_load(rows)
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    rounds = 1 + max(row["round"] for row in rows)
    yield f"{head['cpu']}, {head['threads']} threads, {head['slots']} slots, {', '.join(head['models'])}, "
    yield f"at most {head['tokens']} tokens an answer, {rounds} rounds, commit {head['commit']}"
    yield ""
    yield "Total tokens/s, medians of the rounds"
    yield ""
    header = ["load", *names, f"{ours} over the best other", "95 %"]
    yield from table(header, (_speeds(load, servers, names, ours) for load, servers in loads.items()))
    yield "Latencies in milliseconds, and the share of tokens that drafts had right"
    yield ""
    yield from table(
        ["load, server", "first token p50", "p95", "between tokens p95", "pause p50", "p95", "from drafts"],
        (_latencies(load, name, cells) for load, servers in loads.items() for name, cells in servers.items()),
    )
    yield from _errors(loads)


def _name(load: tuple[str, int]) -> str:
    return f"{load[0]}, {load[1]} client{'s' if load[1] > 1 else ''}"


def _speeds(load: tuple[str, int], servers: Mapping[str, Cells], names: list[str], ours: str) -> list[str]:
    speeds = [f"{median_speed(servers[name]):.1f}" if name in servers else "" for name in names]
    other = best(servers, ours)
    if ours not in servers or other is None or not servers[ours].keys() & servers[other].keys():
        return [_name(load), *speeds, "", ""]
    found = ratio(servers[ours], servers[other])
    return [_name(load), *speeds, f"{found.value:.2f}x {other}", f"{found.low:.2f} to {found.high:.2f}"]


def _latencies(load: tuple[str, int], name: str, cells: Cells) -> list[str]:
    seconds = latencies(cells)
    return [f"{_name(load)}, {name}", *(f"{1000 * s:.0f}" for s in seconds), f"{accepted_share(cells):.0%}"]


def _errors(loads: Loads) -> Iterator[str]:
    for load, servers in loads.items():
        for name, cells in servers.items():
            if found := errors(cells):
                yield f"{_name(load)}, {name}: {len(found)} requests failed, as {found[0]}"


if __name__ == "__main__":
    run_program(main)
