"""The tables of README.md: report.py ROWS.jsonl LEARNED.json

LEARNED.json is what the proposer wrote of its costs (`learned`). Tokens per call are predicted by replaying
the plain answers: Outrider's policy at these costs, and the rule of vLLM's n-gram lookup.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))


from harness import Row, Spread, read_rows, run_program, table
from outrider.core.sequences import common_prefix
from outrider.costs import CallCosts
from outrider.lab.recording import Recording
from outrider.lab.replay import hindsight_bound, replay
from outrider.policy import AutoPolicy
from vllm.bench import NGRAM

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


def recorded(row: Row) -> Recording:
    """What came after its first token, which the prompt's call gave."""
    prompt = (*row["prompt"], row["tokens"][0])
    return Recording(row["id"], row["workload"], prompt, tuple(row["tokens"][1:]), "stop", {})


def bound(rows: Sequence[Row], costs: CallCosts) -> float:
    """How much faster the whole plain requests could have been with the lookup's drafts, in hindsight."""
    plain_s: float = sum(row["seconds"] for row in rows)
    decode_s = sum((len(row["tokens"]) - 1) * costs.call_s(1, context=len(row["prompt"])) for row in rows)
    bound_s: float = plain_s - decode_s + sum(hindsight_bound(recorded(row), costs) for row in rows)
    return plain_s / bound_s


def predicted(rows: Sequence[Row], calls: Callable[[Recording], int]) -> dict[str, float]:
    """Tokens per call by kind of text, where an answer after its first token takes so many."""
    found = dict[str, list[int]]()
    for row in rows:
        recording = recorded(row)
        total = found.setdefault(row["workload"], [0, 0])
        total[0] += len(row["tokens"]) - 1
        total[1] += calls(recording)
    found["all"] = [sum(total[i] for total in found.values()) for i in (0, 1)]
    return {kind: tokens / calls for kind, (tokens, calls) in found.items()}


def outrider_calls(costs: CallCosts) -> Callable[[Recording], int]:
    """By its policy, which learns from one text to the next as it does there."""
    policy = AutoPolicy(models=False, draft_max=MAX_DRAFT)
    return lambda recording: len(replay(recording, policy, costs, max_draft=MAX_DRAFT).records)


def ngram_calls(recording: Recording) -> int:
    """By vLLM's rule: what follows the earliest of the longest matches with the end of the text."""
    text, answer, calls = list(recording.prompt), recording.tokens, 0
    while (done := len(text) - len(recording.prompt)) < len(answer):
        num_tokens = common_prefix(_ngram_draft(text), answer[done:]) + 1
        text += answer[done : done + num_tokens]
        calls += 1
    return calls


def _ngram_draft(text: list[int]) -> list[int]:
    for size in range(NGRAM["prompt_lookup_max"], NGRAM["prompt_lookup_min"] - 1, -1):
        for end in range(size, len(text)):
            if text[end - size : end] == text[-size:]:
                return text[end : end + NGRAM["num_speculative_tokens"]]
    return []


def one_by_one(rows: Sequence[Row], costs: CallCosts) -> Iterator[str]:
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
        first = [row for row in mine if row["way"] == "plain" and "prompt" in row]
        lines.append([*line, f"{bound(first, costs):.2f}"])
    header = ["speed against plain", "plain, no async", "ngram", "outrider", "hindsight bound"]
    yield from table(header, lines)


def counts(rows: Sequence[Row], costs: CallCosts) -> Iterator[str]:
    plain = [row for row in rows if row["way"] == "plain" and "prompt" in row]
    expected = {
        "ngram": predicted(plain, ngram_calls),
        "outrider": predicted(plain, outrider_calls(costs)),
    }
    lines = []
    for kind in (*KINDS, "all"):
        line = [kind]
        for way in ("ngram", "outrider"):
            mine = [row for row in rows if row["way"] == way and kind in (row["workload"], "all")]
            drafted, accepted = (sum(row[key] for row in mine) for key in ("drafted", "accepted"))
            line += [f"{per_call(mine):.2f}", f"{expected[way][kind]:.2f}"]
            line += [f"{accepted / max(drafted, 1):.0%} of {drafted:.0f}"]
        lines.append(line)
    header = ["tokens per call", "ngram", "predicted", "accepted", "outrider", "predicted", "accepted"]
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
    parts = [one_by_one(answers, costs), counts(answers, costs)]
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
