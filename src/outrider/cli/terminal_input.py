"""A line editor for messages: history, pasted text of any size, several lines."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.output import create_output

BLOCK = '"""'
"""starts and ends a message of several lines"""


class TerminalInput:
    r"""Reads messages from the terminal and keeps them in `history`, which only its owner can read.

    Enter sends; Alt-Enter starts a new line, and so does Enter after an opening \"\"\". Ctrl-C
    clears the line.
    """

    def __init__(self, history: Path | None) -> None:
        # What is typed is not part of an answer that is written to a file.
        output = create_output(stdout=sys.stdout if sys.stdout.isatty() else sys.stderr)
        self._session: PromptSession[str] = PromptSession(
            multiline=Condition(self._is_open),
            key_bindings=_keys(),
            history=_opened(history),
            output=output,
            enable_suspend=True,
        )

    def _is_open(self) -> bool:
        text = self._session.default_buffer.text.strip()
        is_closed = text.endswith(BLOCK) and len(text) >= 2 * len(BLOCK)
        return text.startswith(BLOCK) and not is_closed

    def read(self, question: str) -> str:
        """The next message. Raises EOFError at Ctrl-D, KeyboardInterrupt at Ctrl-C on an empty line."""
        text = self._session.prompt(question)
        if text.strip().startswith(BLOCK):
            text = text.strip().removeprefix(BLOCK).removesuffix(BLOCK).strip("\n")
        return text


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def _(event: Any) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    return keys


def _opened(path: Path | None) -> History:
    """The history in a file; if that cannot be written, one of this conversation only."""
    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)
