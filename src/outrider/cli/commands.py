"""What the words after `outrider` ask for. Settings and functions of commands are imported when called."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches

from pydantic import ValidationError

from outrider import __version__
from outrider.cli.help import COMMANDS, CommandSpec, help_of, help_of_program, load
from outrider.cli.line import HELP, Line
from outrider.cli.output import INTERRUPTED, USAGE_ERROR, write
from outrider.core.errors import SettingError
from outrider.core.schema import Group, setting_error, settings_of


def carry_out(words: Sequence[str]) -> int:
    """Do what the words ask for; returns the exit status. Raises SettingError for what cannot be read."""
    try:
        "".join(words).encode()
    except UnicodeEncodeError:
        raise SettingError("the command line", "it is not UTF-8", "Convert it to UTF-8 first.") from None
    name = _command(words)
    if name is None:
        return _without_command(words)
    spec = COMMANDS[name]
    group: type[Group] = load(spec.settings)
    settings = settings_of(group)
    line = Line(name, words[len(name.split()) :], settings)
    if line.help:
        write(help_of(name, everything=line.help == "--help-all") + "\n")
        return 0
    given = line.values()
    try:
        parsed = group.model_validate(given)
    except ValidationError as error:
        flags = {name: setting.flag for name, setting in settings.items()}
        raise setting_error(error, group, given, flags) from None
    for notice in line.notices:
        sys.stderr.write(f"note: {notice}\n")
    return _run(spec, parsed)


def _command(words: Sequence[str]) -> str | None:
    """The command that a line begins with; `bench report` and its like are commands of their own."""
    return next((name for name in (" ".join(words[:2]), *words[:1]) if name in COMMANDS), None)


def _without_command(words: Sequence[str]) -> int:
    word = words[0] if words else ""
    if word == "--complete":
        write("".join(f"{word}\n" for word in _completions(os.environ.get("COMP_LINE", ""))))
    elif word == "--version":
        write(f"outrider {__version__}\n")
    elif word in HELP:
        write(help_of_program() + "\n")
    elif not word:
        sys.stderr.write(help_of_program() + "\n")
        return USAGE_ERROR
    else:
        near = get_close_matches(word, COMMANDS, 1)
        way_out = f"Did you mean {near[0]}?" if near else "outrider --help lists what there is."
        kind = "option" if word.startswith("-") else "command"
        raise SettingError(word, f"outrider has no such {kind}", way_out)
    return 0


def _completions(line: str) -> list[str]:
    """What the last word of a line may be."""
    *before, word = line.split(" ")[1:] or [""]
    name = _command(before)
    names = [command.split()[0] for command in COMMANDS]
    if name is not None:
        settings = settings_of(load(COMMANDS[name].settings)).values()
        names = [flag for setting in settings for flag in setting.names]
    return [known for known in dict.fromkeys(names) if known.startswith(word)]


def _run(spec: CommandSpec, settings: Group) -> int:
    try:
        function: Callable[[Group], int] = load(spec.function)
        if not gc.isenabled():  # since the program's start: what was imported stays
            gc.freeze()
            gc.enable()
        is_first = signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        if is_first:  # from here on there is something to end well
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return function(settings)
        finally:
            if is_first:  # another one while the program ends leaves no traceback
                signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        return INTERRUPTED
