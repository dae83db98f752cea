"""The tables of README.md: report.py ROWS.jsonl LEARNED.json

LEARNED.json is what the proposer wrote of its costs (`learned`); tokens per call are predicted from it by
replaying the plain answers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Row, Spread, read_rows, run_program, table
from outrider.costs import CallCosts
from outrider.lab.replay import Recording, replay
from outrider.policy import AutoPolicy

KINDS = ("edits", "json", "summaries", "code", "chat")
MAX_DRAFT = 16


def calls_of(row: Row) -> tuple[float, float]:
    """Tokens after the first and the target's calls for them: the first came of the prompt's call."""
    return row["num_tokens"] - 1, row["num_tokens"] - 1 if row["way"].startswith("plain") else row[
        "calls"
    ] - 1


def per_call(rows: Sequence[Row]) -> float:
    pairs = [calls_of(row) for row in rows]
    return sum(tokens for tokens, _ in pairs) / max(sum(calls for _, calls in pairs), 1)


def predicted(rows: Sequence[Row], costs: CallCosts) -> dict[str, float]:
    """Tokens per call by kind of text, the policy learning from one text to the next as it does there."""
    policy, found = AutoPolicy(models=False, draft_max=MAX_DRAFT), dict[str, list[int]]()
    for row in rows:
        if len(row["tokens"]) < 2:
            continue
        prompt = (*row["prompt"], row["tokens"][0])
        recording = Recording(row["id"], row["workload"], prompt, tuple(row["tokens"][1:]), "stop", {})
        records = replay(recording, policy, costs, max_draft=MAX_DRAFT).records
        total = found.setdefault(row["workload"], [0, 0])
        total[0] += len(row["tokens"]) - 1
        total[1] += len(records)
    found["all"] = [sum(total[i] for total in found.values()) for i in (0, 1)]
    return {kind: tokens / calls for kind, (tokens, calls) in found.items()}


def one_by_one(rows: Sequence[Row]) -> Iterator[str]:
    ways = list(dict.fromkeys(row["way"] for row in rows))
    turns = {(row["round"], row["way"]) for row in rows}
    rounds = [number for number in range(9) if all((number, way) in turns for way in ways)]
    lines = []
    for kind in (*KINDS, "all"):
        mine = [row for row in rows if kind in (row["workload"], "all")]
        line = [kind]
        for way in ("plain-sync", "ngram", "outrider"):
            ratios = []
            for number in rounds:
                turn = [row for row in mine if row["round"] == number]
                times = {w: sum(row["seconds"] for row in turn if row["way"] == w) for w in ways}
                tokens = {w: sum(row["num_tokens"] for row in turn if row["way"] == w) for w in ways}
                ratios.append(times["plain"] / tokens["plain"] * tokens[way] / times[way])
            line.append(Spread.of(ratios).text(".2f"))
        lines.append(line)
    header = ["speed against plain", "plain, no async", "ngram", "outrider"]
    yield from table(header, lines)


def counts(rows: Sequence[Row], costs: CallCosts) -> Iterator[str]:
    plain = [row for row in rows if row["way"] == "plain" and "prompt" in row]
    expected, lines = predicted(plain, costs), []
    for kind in (*KINDS, "all"):
        line = [kind]
        for way in ("ngram", "outrider"):
            mine = [row for row in rows if row["way"] == way and kind in (row["workload"], "all")]
            drafted, accepted = (sum(row[key] for row in mine) for key in ("drafted", "accepted"))
            line += [f"{per_call(mine):.2f}", f"{accepted / max(drafted, 1):.0%} of {drafted:.0f}"]
        line.append(f"{expected[kind]:.2f}")
        lines.append(line)
    header = ["tokens per call", "ngram", "accepted", "outrider", "accepted", "outrider, predicted"]
    yield from table(header, lines)


def several(rows: Sequence[Row]) -> Iterator[str]:
    ways, lines = list(dict.fromkeys(row["way"] for row in rows)), []
    for size in sorted({row["size"] for row in rows}):
        rates = {
            way: Spread.of(
                row["num_tokens"] / row["seconds"]
                for row in rows
                if row["way"] == way and row["size"] == size
            ).text(".0f")
            for way in ways
        }
        lines.append([str(size), *(rates[way] for way in sorted(rates))])
    yield from table(["requests at once: tokens/s", *sorted(ways)], lines)


def main() -> None:
    rows = read_rows(Path(sys.argv[1]))
    costs = CallCosts.from_json(json.loads(Path(sys.argv[2]).read_text())["costs"])
    answers = [row for row in rows if row["kind"] == "answer"]
    parts = [one_by_one(answers), counts(answers, costs)]
    if shared := [row for row in rows if row["kind"] == "at once"]:
        parts.append(several(shared))
    for part in parts:
        print("\n".join(part))
    first = [row for row in answers if row["round"] == 0]
    for way in ("plain-sync", "ngram", "outrider"):
        texts = {row["id"]: row["tokens"] for row in first if row["way"] == "plain"}
        equal = sum(row["tokens"] == texts[row["id"]] for row in first if row["way"] == way)
        margins = [r["margin_nats"] for r in rows if r["kind"] == "departure" and r["way"] == way]
        print(f"{way}: {equal} of {len(texts)} texts equal; margins at departures: {margins}")
    ratios = " ".join(
        f"{n}:{costs.call_s(n, context=512) / costs.call_s(1, context=512):.2f}" for n in (2, 4, 8, 16)
    )
    print(f"a call over n tokens against one of {costs.call_s(1, context=512) * 1e3:.1f} ms: {ratios}")


if __name__ == "__main__":
    run_program(main)
