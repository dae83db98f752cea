"""Compare the table of llama.cpp's options with a version of its programs.

    llama-cli --help > cli.txt; llama-server --help > server.txt; llama-completion --help > completion.txt
    python scripts/llama_options.py cli.txt server.txt completion.txt

Prints the options that neither `src/outrider/cli/llama_options.toml` nor Outrider has, and those of the table
that are gone. A person decides what becomes of a new one.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from outrider.cli.help import COMMANDS, load
from outrider.cli.line import DRAFTING, HELP, LLAMA_COMMANDS, table
from outrider.core.schema import settings_of

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
    """Print what is new and what is gone."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("help", nargs="+", type=Path, help="what --help says, a file for each program")
    texts = [path.read_text(encoding="utf-8") for path in parser.parse_args().help]
    there = {name for text in texts for names, _ in options(text) for name in names}
    found = known()
    print("new:", *sorted(there - found), "\ngone:", *sorted(set(table()) - there))


def known() -> set[str]:
    """The names that are in the table, or flags of a command that takes llama.cpp's options."""
    groups = [load(COMMANDS[name].settings) for name in LLAMA_COMMANDS]
    ours = {name for group in groups for setting in settings_of(group).values() for name in setting.names}
    return {*ours, *table(), *DRAFTING, *HELP}


if __name__ == "__main__":
    main()
