"""The measuring set: the first prompts of each category, and the code edits and JSON extractions here.

    python benchmarks/policy/prompts.py SPEC_BENCH.jsonl… --out prompts.jsonl [--first 8]

A category with fewer prompts gives all that it has. `benchmarks/engine/prompts.jsonl` is always taken
from too (`--without-own` leaves it out). Files are JSON lines with `id`, `category` and `turns`; `--except`
names one with the ids that are not wanted (recordings, say).
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Row, argument_parser, read_rows, run_program
from outrider.core.errors import SettingError
from outrider.core.files import write_whole

OWN = Path(__file__).parents[1] / "engine" / "prompts.jsonl"


def select(prompts: Iterable[Row], first: int) -> Iterator[Row]:
    """The first so many of each category, in the order in which they come; no id twice."""
    taken: Counter[str] = Counter()
    seen = set()
    for prompt in prompts:
        if prompt["id"] not in seen and taken[prompt["category"]] < first:
            taken[prompt["category"]] += 1
            seen.add(prompt["id"])
            yield prompt


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--first", type=int, default=8, help="of each category")
    parser.add_argument("--without-own", action="store_true")
    parser.add_argument("--except", dest="unwanted", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    files = [*arguments.files, *([] if arguments.without_own else [OWN])]
    unwanted = {str(row.get("id")) for row in read_rows(arguments.unwanted)} if arguments.unwanted else set()
    prompts = []
    for file in files:
        for number, row in enumerate(read_rows(file), 1):
            if missing := {"id", "category", "turns"} - row.keys():
                sys.exit(f"{file}, line {number} is no prompt: it has no {', '.join(sorted(missing))}")
            if str(row["id"]) not in unwanted:
                prompts.append(row)
    chosen = list(select(prompts, arguments.first))
    try:
        write_whole(arguments.out, "".join(json.dumps(row) + "\n" for row in chosen), "prompts")
    except SettingError as error:
        sys.exit(str(error))
    for category, number in Counter(row["category"] for row in chosen).items():
        print(f"{category:<16} {number}")


if __name__ == "__main__":
    run_program(main)
