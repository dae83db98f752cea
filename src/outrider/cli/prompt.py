"""Where the prompt comes from: an argument, a file or standard input."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from outrider.core.errors import PromptError, SettingError
from outrider.core.files import decoded, read_text

_ESCAPES = re.compile(r"\\([ntr'\"\\]|x[0-9A-Fa-f]{2})")
_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "'": "'", '"': '"', "\\": "\\"}


def read_prompt(argument: str | None, option: str | None, file: Path | None, *, escape: bool) -> str:
    """The prompt from the one source given, by default standard input.

    Raises SettingError for several sources, PromptError if it is empty, unreadable or not UTF-8.
    """
    given = [
        name for name, value in (("PROMPT", argument), ("-p", option), ("-f", file)) if value is not None
    ]
    if len(given) > 1:
        raise SettingError(" and ".join(given), "each gives a prompt", "Give one of them.")
    if option is not None:
        text = unescape(option) if escape else option
    elif argument is not None:
        text = argument
    elif file is not None:
        text = read_file(file)
    elif sys.stdin.isatty():
        text = ""
    else:
        text = _without_break(decoded(sys.stdin.buffer.read(), "standard input", PromptError))
    if not text.strip():
        raise PromptError("prompt", "it is empty", "Give some text (-p, -f, or standard input).")
    return text


def unescape(text: str) -> str:
    r"""Read the escapes that llama.cpp reads in -p: \n \t \r \' \" \\ \xHH.

    >>> unescape(r"a\nb\\n")
    'a\nb\\n'
    """
    return _ESCAPES.sub(lambda match: _SIMPLE.get(match[1]) or chr(int(match[1][1:], 16)), text)


def read_line() -> str:
    """A line of standard input. Raises EOFError at its end, PromptError for what is not UTF-8."""
    try:
        line = input()
        line.encode()
        return line
    except UnicodeError as error:
        raise PromptError("standard input", "it is not UTF-8", "Convert it to UTF-8 first.") from error


def read_file(path: Path) -> str:
    """A file's text without the last line break, which llama.cpp drops too. Raises PromptError."""
    return _without_break(read_text(path, "Check the path and its permissions.", PromptError))


def _without_break(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")
