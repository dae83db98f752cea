"""What was measured, as tables: speed-ups, shares of the bound, regret, and the server beside it.

    python benchmarks/policy/report.py live.jsonl… [server.jsonl…]

For each file of live.py a section; rows of server.py with the same target model are compared with it.
README.md says what each figure means. Nothing is written but to standard output.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Row, argument_parser, geometric_mean, interval, read_rows, run_program, table
from policy.curves import from_row
from policy.summary import Measured, best_single, by_category, measured, plain_noise, server_times

SIZES = (2, 3, 4, 5, 6, 8, 12, 16, 32)
ESTIMATE_RATIO = 0.05
REGRET_RATIO = 0.08
SHOWN = 10
"""of the settings, the best"""


def main() -> None:
    parser = argument_parser(__doc__, out=False)
    parser.add_argument("files", nargs="+", type=Path)
    files = {path: read_rows(path) for path in parser.parse_args().files}
    live = {path: rows for path, rows in files.items() if any(r.get("kind") == "prompt" for r in rows)}
    servers = [rows for rows in files.values() if any(r.get("kind") == "answer" for r in rows)]
    if not live:
        sys.exit("no file holds prompts that live.py measured")
    for path, rows in live.items():
        matching = [other for other in servers if target_of(other[0]) == target_of(rows[0])]
        print("\n".join(section(path, rows, matching)))


def target_of(head: Row) -> object:
    """The hash of the target: its file is the first in the head."""
    return next(iter(head["models"].values()))


def section(path: Path, rows: list[Row], servers: list[list[Row]]) -> Iterator[str]:
    """Everything about one run of live.py."""
    head, answered = rows[0], [row for row in rows if row.get("kind") == "prompt"]
    prompts = [measured(row) for row in answered]
    wrong = f", given wrong costs ({head['told']})" if head["told"] else ""
    beside = f", {head['busy']} busy processes beside it" if head["busy"] else ""
    yield f"## {path.name}: {', '.join(head['models'])}\n"
    yield f"{head['cpu']}, {head['threads']} threads, {head['tokens']} tokens{wrong}{beside}. "
    yield f"{head['measured']}\n"
    yield from costs(rows, answered)
    yield from categories(prompts)
    yield from findings(prompts)
    yield from settings(prompts)
    for server in servers:
        yield from against_server(prompts, server)


def costs(rows: list[Row], answered: list[Row]) -> Iterator[str]:
    """V(n) in units of V(1) and the draft's step, as measured at the start and as the calls were."""
    pair = from_row([row for row in rows if row.get("kind") == "costs"][-1])
    one_s = pair.target.call_s(1, context=0)

    def real(model: str, n: int) -> str:
        """The median over the prompts that had such calls, in units of their calls over one token."""
        found = []
        for row in answered:
            seconds = {call["tokens"]: call["seconds"] for call in row["calls"][model]}
            units = {call["tokens"]: call["seconds"] for call in row["calls"]["target"]}
            if n in seconds and 1 in units:
                found.append(seconds[n] / units[1])
        return f"{median(found):.2f}" if found else "–"

    header = ["V(n) / V(1)", "V(1)", *map(str, SIZES)]
    before = [f"{pair.target.call_s(n, context=0) / one_s:.2f}" for n in SIZES]
    lines = [["measured before", f"{1000 * one_s:.1f} ms", *before]]
    singles = [c["seconds"] for row in answered for c in row["calls"]["target"] if c["tokens"] == 1]
    lines.append(["in the run", f"{1000 * median(singles):.1f} ms", *(real("target", n) for n in SIZES)])
    if pair.draft:
        d = [pair.draft.call_s(n, context=0) / one_s for n in (1, *SIZES)]
        lines.append(["draft, measured before", *(f"{ratio:.2f}" for ratio in d)])
        lines.append(["draft, in the run", *(real("draft", n) for n in (1, *SIZES))])
    yield from table(header, lines)


def categories(prompts: list[Measured]) -> Iterator[str]:
    def line(name: str, group: list[Measured]) -> list[str]:
        speedups = [prompt.speedup for prompt in group]
        low, high = interval(speedups)
        slow = " **below 0.98**" if geometric_mean(speedups) < 0.98 else ""
        return [
            name,
            str(len(group)),
            f"{geometric_mean(speedups):.3f}x{slow}",
            f"{low:.2f}–{high:.2f}",
            f"{min(speedups):.2f}x",
            f"{geometric_mean(p.bound_speedup for p in group):.2f}x",
            f"{geometric_mean(p.share for p in group):.1%}",
            f"{geometric_mean(p.speedup_share for p in group):.1%}",
            f"{geometric_mean(p.replayed_share for p in group):.1%}",
            f"{geometric_mean(1 + p.regret for p in group) - 1:+.1%}",
        ]

    header = ["category", "prompts", "speed-up", "95 %", "lowest", "bound", "of the bound"]
    header += ["as speed-ups", "in replay", "regret in replay"]
    yield from table(header, [line(name, group) for name, group in by_category(prompts).items()])


def findings(prompts: list[Measured]) -> Iterator[str]:
    low, high = plain_noise(prompts)
    yield f"- plain decoding against itself: 90 % of pairs of repetitions within {low:.3f}x to {high:.3f}x"
    slow = sorted((p for p in prompts if p.speedup < 0.95), key=lambda p: p.speedup)
    listed = ", ".join(f"{p.id} {p.category} {p.speedup:.2f}x{'!' if p.lost else ''}" for p in slow)
    yield (
        f"- prompts below 0.95x: {len(slow)}, of them slower than every repetition of plain decoding (!): "
        f"{sum(p.lost for p in slow)}{': ' if slow else ''}{listed}"
    )
    regrets = sorted(prompts, key=lambda p: p.regret)
    within = np.mean([p.regret <= REGRET_RATIO for p in prompts])
    worst = ", ".join(f"{p.id} {p.category} {p.regret:+.1%}" for p in regrets[:-4:-1])
    yield (
        f"- regret against the best setting for each prompt, in replay: within {REGRET_RATIO:.0%} for "
        f"{within:.0%} of the prompts, median {median(p.regret for p in prompts):+.1%}; largest: {worst}"
    )
    ran = ", ".join(name for name in prompts[0].token_s if name != "auto")
    within = np.mean([p.real_regret <= REGRET_RATIO for p in prompts])
    yield f"- regret against the best of what ran ({ran}): within {REGRET_RATIO:.0%} for {within:.0%}"
    errors = [p.estimate_error for p in prompts if p.estimate_error is not None]
    if errors:
        good = np.mean([abs(error) <= ESTIMATE_RATIO for error in errors])
        yield (
            f"- its own estimate of the speed-up: within {ESTIMATE_RATIO:.0%} for {good:.0%} of the prompts, "
            f"median error {median(errors):+.1%}, of absolute errors {median(map(abs, errors)):.1%}; "
            f"measured within its interval for {sum(p.estimate_holds for p in prompts)} of {len(errors)}"
        )
    drift = geometric_mean(p.replayed_token_s["auto"] / p.token_s["auto"] for p in prompts)
    plain = geometric_mean(p.replayed_token_s["plain"] / p.token_s["plain"] for p in prompts)
    yield f"- replayed over real time: automatic {drift:.3f}, plain {plain:.3f}"
    yield f"- same text in every run: {sum(p.equal for p in prompts)} of {len(prompts)} prompts\n"


def settings(prompts: list[Measured]) -> Iterator[str]:
    """The automatic choice against each setting that somebody could have fixed for all prompts."""
    fixed = {name: [p.replayed_token_s[name] for p in prompts] for name in prompts[0].settings}
    ours = geometric_mean(p.replayed_token_s["auto"] for p in prompts)
    name, best = best_single(fixed)
    yield f"Best single setting in replay: {name}; automatic {best / ours:.3f}x of its speed."
    for chosen in prompts[0].token_s:
        if chosen not in ("plain", "auto"):
            ratios = [p.token_s[chosen] / p.token_s["auto"] for p in prompts]
            low, high = interval(ratios)
            yield f"Against {chosen}, as it ran: {geometric_mean(ratios):.3f}x ({low:.2f}–{high:.2f})."
    yield ""
    lines = []
    order = sorted(fixed, key=lambda name: geometric_mean(fixed[name]))
    shown = [choice for choice in prompts[0].replayed_token_s if choice not in fixed] + order[:SHOWN]
    for choice in dict.fromkeys((*shown, "plain")):
        speedups = [p.replayed_token_s["plain"] / p.replayed_token_s[choice] for p in prompts]
        shares = [p.bound_token_s / p.replayed_token_s[choice] for p in prompts]
        lines.append(
            [
                choice,
                f"{geometric_mean(speedups):.3f}x",
                f"{min(speedups):.2f}x",
                f"{geometric_mean(shares):.1%}",
            ]
        )
    yield from table(["replayed", "speed-up", "lowest", "of the bound"], lines)


def against_server(prompts: list[Measured], rows: list[Row]) -> Iterator[str]:
    """The automatic choice against every setting of llama-server."""
    times = server_times(row for row in rows if row.get("kind") == "answer")
    common = set.intersection(*(set(found) for found in times.values()))
    prompts = [p for p in prompts if p.id in common]
    if not prompts:
        yield "llama-server was asked none of these prompts in every setting.\n"
        return
    groups = by_category(prompts)
    yield f"### Against {rows[0].get('server', 'llama-server').splitlines()[0]}, {len(prompts)} prompts\n"
    lines, single = [], best_single({s: [t[p.id] for p in prompts] for s, t in times.items()})[0]
    for name, group in groups.items():
        each = {s: [t[p.id] for p in group] for s, t in times.items()}
        ours = geometric_mean(p.token_s["auto"] for p in group)
        best, best_s = best_single(each)
        line = [name, f"{geometric_mean(each[single]) / ours:.3f}x", best, f"{best_s / ours:.3f}x"]
        lines.append(line + [f"{geometric_mean(seconds) / ours:.2f}x" for seconds in each.values()])
    yield from table(
        ["category", f"over {single}, its best single setting", "its best here", "over that", *times], lines
    )
    ratios = [times[single][p.id] / p.token_s["auto"] for p in prompts]
    low, high = interval(ratios)
    yield f"Over {single}: {geometric_mean(ratios):.3f}x ({low:.2f}–{high:.2f})."
    if "plain" in times:
        plain = geometric_mean(times["plain"][p.id] / p.token_s["plain"] for p in prompts)
        yield f"Plain decoding here over the server's: {plain:.3f}x.\n"


if __name__ == "__main__":
    run_program(main)
