"""The prompts that a measurement runs over."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path


def prompts(sources: list[str]) -> Iterator[str]:
    """First turns of JSON-lines files, of each every so manieth: `FILE.jsonl:5` takes a fifth."""
    for source in sources:
        path, _, every = source.partition(":")
        for line in Path(path).read_text(encoding="utf-8").splitlines()[:: int(every or 1)]:
            yield json.loads(line)["turns"][0]
