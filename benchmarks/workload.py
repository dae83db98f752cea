"""The prompts that a measurement runs over."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple


class Prompt(NamedTuple):
    """The first turn of a conversation, and what kind it is."""

    id: int
    category: str
    text: str


def load_prompts(sources: Sequence[str]) -> list[Prompt]:
    """First turns of JSON-lines files, of each every so manieth: `FILE.jsonl:5` takes a fifth."""
    found = []
    for source in sources:
        path, _, every = source.partition(":")
        for line in Path(path).read_text(encoding="utf-8").splitlines()[:: int(every or 1)]:
            row = json.loads(line)
            found.append(Prompt(row["id"], row["category"], row["turns"][0]))
    return found


def prompts(sources: list[str]) -> Iterator[str]:
    """Their texts alone."""
    return (prompt.text for prompt in load_prompts(sources))
