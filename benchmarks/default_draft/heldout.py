"""The bundled prompts that no training reads, as a workload for `outrider bench` and `outrider check`.

    python benchmarks/default_draft/heldout.py --first 2400 --each 3 --out heldout.jsonl

Of the first `--first` bundled prompts, those that the hash holds out, `--each` of every category.
"""

from __future__ import annotations

import json
from collections import Counter

from harness import argument_parser, run_program
from outrider.lab.held_out import is_held_out
from outrider.lab.written_prompts import written_prompts


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--first", type=int, default=2400)
    parser.add_argument("--each", type=int, default=3)
    arguments = parser.parse_args()
    taken: Counter[str] = Counter()
    lines = []
    for written in written_prompts(arguments.first):
        if is_held_out(written.prompt) and taken[written.category] < arguments.each:
            taken[written.category] += 1
            row = {
                "id": written.prompt.id,
                "category": written.category,
                "messages": list(written.prompt.messages),
            }
            lines.append(json.dumps(row) + "\n")
    arguments.out.write_text("".join(lines), encoding="utf-8")
    print(f"{len(lines)} prompts of {len(taken)} categories")


if __name__ == "__main__":
    run_program(main)
