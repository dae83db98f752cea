"""Bring the table of llama.cpp's options up to a version of its programs.

    llama-cli --help > cli.txt; llama-server --help > server.txt; llama-completion --help > completion.txt
    python scripts/llama_options.py --version b11434 cli.txt server.txt completion.txt

Rows of `src/outrider/cli/llama_options.tsv` keep what they say of an option; a new option gets the fate "?",
which the tests refuse, and options that are gone lose their rows.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

TABLE = Path(__file__).parents[1] / "src" / "outrider" / "cli" / "llama_options.tsv"
_COLUMN = 40
"""where descriptions begin"""
_NAMES = re.compile(r"(?:-[^\s,]+,?\s+|-[^\s,]+,?$)+")


def options(help_text: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """The names of each option and how its value is written, empty for a switch. The names that switch it off
    are an option of their own."""
    lines = help_text.splitlines()
    for number, line in enumerate(lines):
        if not line.startswith("-") or line.startswith("-----"):
            continue
        is_short = len(line) > _COLUMN and line[_COLUMN - 1] == " "
        head = (line[:_COLUMN] if is_short else line).rstrip() + " "
        found = _NAMES.match(head)
        assert found is not None, f"line {number + 1}: {line}"
        names = re.split(r",?\s+", found[0].strip())
        has_off = any(name.startswith("--no-") for name in names)
        off = [
            name for name in names if name.startswith("--no-" if name.startswith("--") else "-n") and has_off
        ]
        for part in ([name for name in names if name not in off], off):
            if part:
                yield tuple(part), head[found.end() :].strip()


def main() -> None:
    """Write the table again from help texts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("help", nargs="+", type=Path, help="what --help says, a file for each program")
    parser.add_argument("--version", required=True, help="of llama.cpp")
    arguments = parser.parse_args()
    known = {}
    if TABLE.exists():
        for line in TABLE.read_text(encoding="utf-8").splitlines()[2:]:
            names, _, fate, note = line.split("\t")
            known[names] = (fate, note)
    found: dict[str, str] = {}
    for path in arguments.help:
        for option, value in options(path.read_text(encoding="utf-8")):
            found.setdefault(" ".join(option), value)
    rows = [f"# llama.cpp {arguments.version}", "names\tvalue\tfate\tnote"]
    rows += ["\t".join((names, value, *known.get(names, ("?", "")))) for names, value in found.items()]
    TABLE.write_text("\n".join(rows) + "\n", encoding="utf-8")
    print(f"{len(found)} options, {sum(row.split(chr(9))[2] == '?' for row in rows[2:])} of them new")


if __name__ == "__main__":
    main()
