"""Every command line of the README and of docs/: the program takes it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest

from outrider.cli import commands
from outrider.cli.commands import app
from outrider.cli.help import CommandSpec
from outrider.core.schema import Group

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_INLINE = re.compile(r"`outrider ([a-z][^`]* [^`]*)`")
_PATTERN = re.compile(r"\[-|\|[A-Z]|…(?!\")|^bench [a-z]+$|^run --json$")
"""How a command is called, not a line to be typed."""
_LINE = re.compile(r"^(?:    |\$ |)(?:\.venv/bin/)?outrider (.+)$")


def documented() -> Iterator[tuple[str, str]]:
    """Page and command line of each; lines that a backslash continues are one."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        in_block = False
        for line in text.splitlines():
            if line.startswith("```"):
                in_block = not in_block
            elif (in_block or line.startswith("    ")) and (found := _LINE.match(line)):
                yield page.name, found[1]
            else:
                yield from ((page.name, code) for code in _INLINE.findall(line))


COMMANDS = sorted({(page, line) for page, line in documented() if not _PATTERN.search(line)})


def words_of(line: str) -> list[str]:
    """The arguments of a line, up to a comment, a pipe or a redirection."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    return list(takewhile(lambda word: not set(word) <= set("|&;<>"), lexer))


def test_an_example_that_generates_ends_and_gives_the_same_text_again() -> None:
    for page, line in COMMANDS:
        words = words_of(line)
        if words[0] == "run":
            assert "-n" in words, (page, line)
            assert "--temp" in words or "--seed" in words, (page, line)


def test_the_program_takes_every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    carried_out: list[Group] = []

    def carry_out(_: CommandSpec, settings: Group) -> int:
        carried_out.append(settings)
        return 0

    monkeypatch.setattr(commands, "_carry_out", carry_out)
    for page, line in COMMANDS:
        words = words_of(line)
        carried_out.clear()
        with pytest.raises(SystemExit) as ended:
            app(words, prog_name="outrider")
        assert ended.value.code == 0, (page, line)
        assert carried_out or set(words) & {"--help", "-h", "--version"}
    named = {line.split()[0] for _, line in COMMANDS}
    assert len(COMMANDS) > 35 and named >= {"run", "serve", "check", "bench", "verify"}
