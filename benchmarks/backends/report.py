"""Tables of what live.py and policy/server.py wrote for the same prompts.

    python benchmarks/backends/report.py live.jsonl [NAME=SERVER.jsonl]…

All ratios are of seconds per generated token, medians of the repetitions; means over prompts are geometric.
The base is plain decoding in the first library of live.jsonl. `with the prompt` counts the reading of it, on
both sides. A server's best single setting is the one of the least mean over all prompts.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Row, read_rows
from policy.server import token_s as server_token_s
from policy.summary import token_s

Times = dict[str, float]
"""Seconds per token by prompt."""


def of_runs(rows: Sequence[Row], library: str, mode: str, what: Callable[[Row], float] = token_s) -> Times:
    """Medians over the repetitions, for each prompt that was answered in this way."""
    return {
        str(row["id"]): median(map(what, row["libraries"][library][mode]))
        for row in rows
        if mode in row["libraries"].get(library, {})
    }


def with_prompt(run: Row) -> float:
    return float((run["decode_s"] + run["prefill_s"]) / run["tokens"])


def bounds(rows: Sequence[Row], library: str) -> Times:
    found = {str(row["id"]): row["libraries"][library] for row in rows}
    return {i: one["bound_s"] / one["text_tokens"] for i, one in found.items() if "bound_s" in one}


def ratio(over: Times, of: Times, prompts: Iterable[str]) -> float:
    """The geometric mean of how much faster `of` is than `over`; NaN without a prompt."""
    logs = [math.log(over[prompt] / of[prompt]) for prompt in prompts if prompt in over and prompt in of]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def slowest(over: Times, of: Times) -> str:
    prompt = min(of, key=lambda i: over[i] / of[i])
    return f"{over[prompt] / of[prompt]:.2f}x ({prompt})"


def noise(rows: Sequence[Row], library: str) -> str:
    """Plain decoding's single runs against their prompt's median."""
    ratios = sorted(
        token_s(run) / median(map(token_s, row["libraries"][library]["plain"]))
        for row in rows
        for run in row["libraries"][library]["plain"]
    )
    return f"{ratios[len(ratios) // 20]:.2f} to {ratios[-1 - len(ratios) // 20]:.2f}"


def servers(named: Sequence[str]) -> dict[str, dict[str, Times]]:
    """For each server and setting the seconds per token by prompt."""
    found: dict[str, dict[str, Times]] = {}
    for given in named:
        name, _, file = given.partition("=")
        for row in read_rows(Path(file)):
            if row["kind"] == "answer":
                times = found.setdefault(name, {}).setdefault(row["setting"], {})
                times[str(row["id"])] = server_token_s(row)
    return found


def main() -> None:
    rows = [row for row in read_rows(Path(sys.argv[1])) if row["kind"] == "prompt"]
    names = list(rows[0]["libraries"])
    category = {str(row["id"]): row["category"] for row in rows}
    kinds = {kind: [i for i in category if category[i] == kind] for kind in sorted(set(category.values()))}
    kinds |= {"all": list(category)}
    base, base_whole = of_runs(rows, names[0], "plain"), of_runs(rows, names[0], "plain", with_prompt)
    peers = servers(sys.argv[2:])
    for name in names:
        plain, auto = of_runs(rows, name, "plain"), of_runs(rows, name, "auto")
        over = ratio(base, plain, base)
        print(f"\n{name}: plain decoding {over:.2f}x of {names[0]}'s; noise {noise(rows, name)}")
        if not auto:
            continue
        whole, bound = of_runs(rows, name, "auto", with_prompt), bounds(rows, name)
        print("| category | prompts | over the base | with the prompt | over its own plain | of the bound |")
        print("|---|---:|---:|---:|---:|---:|")
        for kind, ids in kinds.items():
            figures = (
                f"{ratio(base, auto, ids):.2f}x",
                f"{ratio(base_whole, whole, ids):.2f}x",
                f"{ratio(plain, auto, ids):.2f}x",
                f"{ratio(auto, bound, ids) ** -1:.0%}" if bound else "",
            )
            print(f"| {kind} | {len(ids)} | " + " | ".join(figures) + " |")
        print(f"slowest prompt over its own plain decoding: {slowest(plain, auto)}")
        for peer, settings in peers.items():
            against(auto, peer, settings, kinds)


def against(auto: Times, peer: str, settings: dict[str, Times], kinds: dict[str, list[str]]) -> None:
    """How much faster than each setting of a server, and than its best single one in each category."""
    prompts = set.intersection(set(auto), *map(set, settings.values()))
    over = {setting: ratio(times, auto, prompts) for setting, times in settings.items()}
    best = min(over, key=over.__getitem__)
    listed = ", ".join(f"{setting} {value:.2f}x" for setting, value in over.items())
    print(f"over {peer}, {len(prompts)} prompts: {listed}; best single setting: {best}")
    by_kind = {kind: ratio(settings[best], auto, prompts & set(ids)) for kind, ids in kinds.items()}
    print("  by category: " + ", ".join(f"{kind} {value:.2f}x" for kind, value in by_kind.items()))


if __name__ == "__main__":
    main()
