"""What can go wrong with any command is one message, without a traceback. No model is needed."""

from __future__ import annotations

import os
import sys

import pytest

from outrider.cli.commands import COMMANDS
from outrider.cli.main import main
from outrider.cli.output import PIPE_CLOSED, USAGE_ERROR

HELP = [(*name.split(), "--help") for name in COMMANDS]


def status_with(output: int, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit status where standard output is this file."""
    with os.fdopen(output, "w") as stream:
        monkeypatch.setattr(sys, "argv", ["outrider", *arguments])
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as ended:
            main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(
    "arguments", [*HELP, (), ("--version",), ("setup",), ("plan", "--list")], ids=" ".join
)
def test_a_full_disk_is_named(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status = status_with(os.open("/dev/full", os.O_WRONLY), arguments, monkeypatch)
    assert status == USAGE_ERROR
    assert capsys.readouterr().err == (
        "error: standard output: no space left on device. Free some space, or send it elsewhere.\n"
    )


@pytest.mark.parametrize("arguments", [*HELP, ("plan", "--list")], ids=" ".join)
def test_a_reader_that_left_is_no_error(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    assert status_with(writing, arguments, monkeypatch) == PIPE_CLOSED
    assert capsys.readouterr().err == ""
