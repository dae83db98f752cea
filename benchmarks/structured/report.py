"""What was measured, as tables: target calls per token, speed-ups, validity, equality.

    python benchmarks/structured/report.py qwen.jsonl…

README.md says what each figure means. Nothing is written but to standard output.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Row, argument_parser, geometric_mean, interval, read_rows, run_program, table
from structured.bench import OFF
from structured.cases import GROUPS
from structured.summary import Answers, all_runs, calls_per_token, errors, read_answers

MAX_CALLS = {"tool": 0.40, "record": 0.40, "nested-person": 0.70}
"""Target calls per token with forcing alone that are to be reached, by group or case."""
MIN_RATIO = 1.3
"""Calls of plain constrained decoding over those of forcing alone, over all cases."""
MIN_SPEEDUP = 0.98


def main() -> None:
    parser = argument_parser(__doc__, out=False)
    parser.add_argument("files", nargs="+", type=Path)
    for path in parser.parse_args().files:
        rows = read_rows(path)
        if not any(row.get("kind") == "case" for row in rows):
            sys.exit(f"{path} holds no cases that live.py measured")
        print("\n".join(section(path, rows)))


def section(path: Path, rows: list[Row]) -> Iterator[str]:
    """Everything about one run of live.py."""
    head, answers = rows[0], read_answers(rows)
    yield f"## {path.name}: {', '.join(head['models'])}\n"
    yield f"{head['cpu']}, {head['threads']} threads, at most {head['tokens']} tokens, white space "
    yield f"{head['style']}, {head['repetitions']} repetitions. {head['measured']}\n"
    for temperature in dict.fromkeys(case.temperature for case in answers):
        cases = [case for case in answers if case.temperature == temperature]
        yield f"### Temperature {temperature:g}, {len(cases)} cases\n"
        modes = [mode for mode in head["modes"] if mode != OFF.name]
        yield from groups(cases, modes)
        yield from claims(cases)
        yield from validity(cases, errors(r for r in rows if r.get("temperature") == temperature))
        if temperature == 0:
            yield from equality(cases, modes)
        yield from costs(cases, modes)
        yield from each(cases, modes)


def groups(cases: Sequence[Answers], modes: Sequence[str]) -> Iterator[str]:
    """Calls per token, pooled, and speed-ups, geometric means, of each group and all together."""
    lines = []
    for group in (*GROUPS, "all"):
        members = [case for case in cases if group in (case.group, "all")]
        if not members:
            continue
        line = [group, str(len(members)), number(calls_per_token(all_runs(members, OFF.name)))]
        for mode in modes:
            line.append(number(calls_per_token(all_runs(members, mode))))
            ratios = [ratio for case in members if (ratio := case.speedup(mode))]
            low, high = interval(ratios) if ratios else (0, 0)
            line.append(f"{geometric_mean(ratios):.2f}x ({low:.2f}–{high:.2f})" if ratios else "-")
        shares = [share for case in members if (share := case.of_the_bound)]
        lines.append([*line, f"{geometric_mean(shares):.0%}" if shares else "-"])
    columns = [name for mode in modes for name in (f"{mode}: calls/token", "speed-up")]
    yield from table(["group", "cases", "off: calls/token", *columns, "auto of the bound"], lines)


def claims(cases: Sequence[Answers]) -> Iterator[str]:
    """The goals for forcing alone, and whether they are met."""
    for name, most in MAX_CALLS.items():
        found = [case for case in cases if name in (case.group, case.id)]
        calls = calls_per_token(all_runs(found, "forced"))
        if calls is not None:
            above = [f"{c.id} {own:.2f}" for c in found if (own := c.calls("forced")) and own > most]
            yield (
                f"- {name}: {calls:.2f} calls/token with forcing alone, goal {most:.2f}: {met(calls <= most)}"
                + (f"; above it: {', '.join(above)}" if above and len(found) > 1 else "")
            )
    plain, forced = (calls_per_token(all_runs(cases, mode)) for mode in (OFF.name, "forced"))
    if plain and forced:
        fewer = plain / forced
        yield f"- all: {fewer:.2f}x fewer calls than off, goal {MIN_RATIO}x: {met(fewer >= MIN_RATIO)}"
    slow = [
        f"{case.id} {mode} {ratio:.2f}x"
        for case in cases
        for mode in case.runs
        if (ratio := case.speedup(mode)) and ratio < MIN_SPEEDUP
    ]
    yield f"- slower than {MIN_SPEEDUP}x: {', '.join(slow) or 'none'}"


def validity(cases: Sequence[Answers], failed: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    """How many texts are what was asked for."""
    runs = [run for case in cases for each in case.runs.values() for run in each]
    whole = [run for run in runs if run["finish"] == "stop"]
    wrong = [(case.id, *found) for case in cases for found in case.wrong()]
    cut = len(runs) - len(whole)
    yield f"- valid: {len(whole) - len(wrong)} of {len(whole)} finished texts; {cut} were cut off"
    yield from (f"  - INVALID {case} {mode}: {complaint}" for case, mode, complaint in wrong)
    yield f"- errors: {len(failed)}"
    yield from (f"  - {case} {mode}: {message}" for case, mode, message in failed)


def equality(cases: Sequence[Answers], modes: Sequence[str]) -> Iterator[str]:
    """Whose greedy texts are plain constrained decoding's, token by token."""
    for mode in modes:
        asked = [case for case in cases if case.runs.get(mode) and case.runs.get(OFF.name)]
        parting = [case for case in asked if mode in case.divergence]
        where = ", ".join(f"{c.id} at {place(c.divergence[mode])}" for c in parting)
        yield f"- {mode}: same tokens as off in {len(asked) - len(parting)} of {len(asked)} cases" + (
            f"; apart: {where}" if parting else ""
        )


def place(divergence: Row) -> str:
    margin = divergence["margin"]
    return f"{divergence['position']} (margin {'none' if margin is None else format(margin, '.3f')})"


def costs(cases: Sequence[Answers], modes: Sequence[str]) -> Iterator[str]:
    """What masks and forced tokens took."""
    for mode in (OFF.name, *modes):
        runs = all_runs(cases, mode)
        if runs:
            spent, decode = (sum(run[name] for run in runs) for name in ("constraint_s", "decode_s"))
            position_us = spent / sum(run["evaluated"] for run in runs) * 1e6
            yield f"- {mode}: masks took {spent / decode:.2%} of decoding, {position_us:.0f} µs a position"
    yield ""


def each(cases: Iterable[Answers], modes: Sequence[str]) -> Iterator[str]:
    """Every case by itself: the run of median time in each mode."""
    lines = []
    for case in cases:
        plain = case.middle(OFF.name)
        line = [case.id, str(plain["tokens"]) if plain else "-"]
        for mode in modes:
            run = case.middle(mode)
            line += [number(case.calls(mode)), str(run["forced"]) if run else "-"]
            line.append(f"{ratio:.2f}x" if (ratio := case.speedup(mode)) else "-")
        lines.append(line)
    columns = [name for mode in modes for name in (f"{mode}: calls/token", "forced", "speed-up")]
    yield from table(["case", "tokens", *columns], lines)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def met(holds: bool) -> str:
    return "met" if holds else "NOT met"


if __name__ == "__main__":
    run_program(main)
