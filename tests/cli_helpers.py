"""Running the program as its users do: in a process of its own, or in this one where that is enough."""

import io
import json
import os
import pty
import re
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.main import main

ROOT = Path(__file__).parent.parent
COMMAND = (sys.executable, "-m", "outrider")
PATIENCE_S = 30

TEMPLATE = (
    "{% for m in messages %}<|begin|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)
"""A chat template over the control tokens of the tiny vocabulary."""


@dataclass(frozen=True, slots=True)
class Outcome:
    status: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """Standard error as one line: where it is folded depends on the figures in it."""
        return " ".join(self.err.split())

    @property
    def notes(self) -> str:
        """Standard error without lines of progress, which depend on the clock."""
        return re.sub(r"^.+: \d+%.*\n", "", self.err, flags=re.MULTILINE)


Call = Callable[..., Outcome]


def result(outcome: Outcome) -> dict[str, Any]:
    """The one line of JSON that a command printed."""
    assert outcome.status == 0, outcome.err
    assert outcome.out.count("\n") == 1 and outcome.out.endswith("\n")
    found: dict[str, Any] = json.loads(outcome.out)
    return found


def refused(outcome: Outcome) -> str:
    """The one message of a command line that was refused."""
    assert outcome.status == 2 and outcome.out == "", outcome
    assert outcome.notes.startswith("error: ") and outcome.notes.count("\n") == 1, outcome.err
    return outcome.notes.removeprefix("error: ").strip()


def environment(**changes: str) -> dict[str, str]:
    """A plain environment: no colours asked for, 80 columns, this checkout's sources."""
    names = ("FORCE_COLOR", "NO_COLOR", "GITHUB_ACTIONS", "HF_TOKEN", "PYTHONIOENCODING", "PYTHONUNBUFFERED")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return kept | {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "80", "TERM": "xterm"} | changes


def call(
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
    *arguments: str,
    stdin: str | bytes = "",
) -> Outcome:
    """Run `main` in this process, with pipes for its standard streams."""
    monkeypatch.setattr(sys, "argv", ["outrider", *arguments])
    data = stdin.encode() if isinstance(stdin, str) else stdin
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
    monkeypatch.setenv("COLUMNS", "80")
    capfdbinary.readouterr()
    with pytest.raises(SystemExit) as exit_:
        main()
    out, err = capfdbinary.readouterr()
    code = exit_.value.code
    return Outcome(code if isinstance(code, int) else 0, out.decode(), err.decode())


class Terminal:
    """The program in a terminal of its own: what is typed into it, and what it shows."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        self.shown = ""
        self._pid, self._fd = pty.fork()
        if self._pid == 0:  # the program
            os.execve(COMMAND[0], [*COMMAND, *arguments], dict(env))

    def wait_for(self, pattern: str) -> str:
        """Read until the pattern is shown after what was waited for before; returns all up to it."""
        while not (found := re.search(pattern, self.shown, re.DOTALL)):
            data = self._read()
            assert data, f"the program ended after: {self.shown}"
            self.shown += data.decode(errors="replace")
        seen, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return seen

    def _read(self) -> bytes:
        """What the program shows next; nothing when it has ended."""
        ready, _, _ = select.select([self._fd], [], [], PATIENCE_S)
        assert ready, f"nothing happens after: {self.shown}"
        try:
            return os.read(self._fd, 4096)
        except OSError:  # the program has closed the terminal
            return b""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def close(self) -> int:
        """Wait for the program's end; returns its exit status."""
        while data := self._read():
            self.shown += data.decode(errors="replace")
        status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        self._pid = 0
        os.close(self._fd)
        return status

    def kill(self) -> None:
        """End a program that a failed test left behind."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            os.close(self._fd)
