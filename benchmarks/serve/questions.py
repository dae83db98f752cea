"""What is asked: conversations of six groups, dealt out so that no server process sees one twice."""

from __future__ import annotations

import json
import random
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from harness import read_rows

FOLDER = Path(__file__).parent
OWN = (
    FOLDER / "prompts.jsonl",
    FOLDER.parent / "policy" / "heldout_prompts.jsonl",
    FOLDER.parent / "engine" / "prompts.jsonl",
)
GROUPS = {"edit": "edit", "coding": "code", "summarization": "summary", "rag": "summary"}
"""Groups of the categories that prompts have; JSON comes with schemas from elsewhere, all else is chat."""
SCHEMAS = FOLDER.parent / "structured" / "cases.jsonl"
SCHEMA_GROUPS = ("tool", "record", "nested")
LONGEST_PROMPT = 6000
"""characters: a longer one would be most of a round's time"""
ALONE = (("edits", "edit"), ("json", "json"), ("tools", "tools"))
"""Loads of one group, and which"""
MIXED = {"chat": 6, "code": 3, "edit": 2, "json": 3, "summary": 2}


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation, and the JSON schema that its answer has to fulfil or the tools one of which it has to
    call, if any."""

    id: str
    group: str
    messages: tuple[Mapping[str, str], ...]
    schema: Any = None
    tools: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """So many clients that ask, one after the other, so many questions of each group in all."""

    name: str
    clients: int
    shares: Mapping[str, int]


def loads(clients: Sequence[int], requests: int, alone: int) -> list[Load]:
    """The mixed load for each number of clients, and edits, JSON and calls of tools for a single one."""
    scale = requests / sum(MIXED.values())
    shares = {group: max(1, round(number * scale)) for group, number in MIXED.items()}
    mixed = [Load("mixed", number, shares) for number in clients]
    return mixed + [Load(name, 1, {group: alone}) for name, group in ALONE]


def load_questions(more: Sequence[Path] = ()) -> list[Question]:
    """Our own, those of further files, and schemas with their tasks."""
    found = [
        question for path in (*OWN, *more) for row in read_rows(path) if (question := _question(path, row))
    ]
    cases = [row for row in read_rows(SCHEMAS) if row["kind"] in SCHEMA_GROUPS and "json_schema" in row]
    return found + [
        Question(case["id"], "json", ({"role": "user", "content": case["prompt"]},), case["json_schema"])
        for case in cases
    ]


def tool_questions() -> list[Question]:
    """Requests for which one of several tools has to be called."""
    data = json.loads((FOLDER / "tools.json").read_text())
    return [
        Question(
            f"tools-{row['id']}",
            "tools",
            ({"role": "user", "content": row["content"]},),
            tools=data["tools"][row["tools"]],
        )
        for row in data["questions"]
    ]


def _question(path: Path, row: dict[str, Any]) -> Question | None:
    """One row, as a conversation or as the first of its turns; None for one that is not used."""
    messages = row.get("messages") or [{"role": "user", "content": row["turns"][0]}]
    too_long = sum(len(message["content"]) for message in messages) > LONGEST_PROMPT
    if row["category"] == "json" or too_long:
        return None
    return Question(f"{path.stem}-{row['id']}", GROUPS.get(row["category"], "chat"), tuple(messages))


def deal(
    questions: Sequence[Question], loads: Sequence[Load], round_: int, seed: int
) -> list[list[Question]]:
    """For each load its questions of this round, none twice, in mixed order.

    Loads of the same name take turns with their hands from round to round, so that in the end each
    number of clients was asked the same. Ends the program where there are too few.
    """
    shuffle = random.Random(seed)
    pools: dict[str, list[Question]] = defaultdict(list)
    for question in questions:
        pools[question.group].append(question)
    for pool in pools.values():
        shuffle.shuffle(pool)
    hands: dict[str, list[list[Question]]] = defaultdict(list)
    for load in loads:
        hand = [_take(pools, group) for group, number in load.shares.items() for _ in range(number)]
        shuffle.shuffle(hand)
        hands[load.name].append(hand)
    turns = {name: count(round_) for name in hands}
    return [hands[load.name][next(turns[load.name]) % len(hands[load.name])] for load in loads]


def _take(pools: Mapping[str, list[Question]], group: str) -> Question:
    if not pools.get(group):
        sys.exit(f"there are too few questions of the group {group}: give --prompts FILE or fewer --requests")
    return pools[group].pop()
