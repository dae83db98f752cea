"""Command lines made for llama.cpp: every option of its programs has one of five fates here.

`llama_options.tsv` holds what `--help` lists in one version (`scripts/llama_options.py`), with a fate for
each:

- same: it does here what it does there; the note is its name here, where it has another.
- drafting: with others it says who drafts and how far; `llama_drafting` makes a policy of them.
- ignored: it is accepted and changes nothing; the note says why, in a line.
- instead: it is refused; the note says what to use.
- no: it is refused as not supported; the note says what to know.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from itertools import islice

from outrider.cli.llama_drafting import Words, drafting_options
from outrider.core.errors import SettingError
from outrider.core.schema import Setting

COMMANDS = ("run", "chat", "serve")
"""those that take llama.cpp's options"""

_HELP = ("-h", "--help")
_NUMBER = re.compile(r"-\d|-\.\d")
_ATTACHED = re.compile(r"(-[A-Za-z])(-?\d.*)")
"""a value that is written right after a short name: -n64"""


@dataclass(frozen=True, slots=True)
class LlamaOption:
    """An option of llama.cpp: its names, how many values it takes, its fate here and a note on that."""

    names: tuple[str, ...]
    num_values: int
    fate: str
    note: str


@cache
def llama_options() -> Mapping[str, LlamaOption]:
    """The table, by every name of each option."""
    found: dict[str, LlamaOption] = {}
    for line in (files(__package__) / "llama_options.tsv").read_text(encoding="utf-8").splitlines()[2:]:
        names, value, fate, note = line.split("\t")
        option = LlamaOption(tuple(names.split()), len(value.split()) if value else 0, fate, note)
        found |= dict.fromkeys(option.names, option)
    return found


def translate(
    command: str, arguments: Sequence[str], settings: Mapping[str, Setting]
) -> tuple[list[str], list[str]]:
    """The arguments of a command with its own flags alone, and a notice for each that changes nothing.

    Args:
        command: Its name.
        arguments: What follows it on the command line.
        settings: Those of the command; a flag of theirs means what the command says, whatever llama.cpp says.

    Raises:
        SettingError: For an option that is refused, and for an unknown one with a single dash: it
            is never read as several short ones.
    """
    flags = _flags(settings)
    found: Words = []
    drafting: list[tuple[str, str]] = []
    notices: list[str] = []
    words = iter(arguments)
    for word in words:
        name, equals, attached = word.partition("=") if word.startswith("--") else (word, "", "")
        if word == "--":
            found.append((word, list(words)))
        elif not word.startswith("-") or word == "-" or _NUMBER.match(word):
            found.append((word, []))
        elif name in flags:
            found.append((word, list(islice(words, flags[name] and not equals))))
        elif (short := _ATTACHED.fullmatch(word)) and flags.get(short[1]):
            found.append((short[1], [short[2]]))
        elif (option := llama_options().get(name)) is None:
            _check_known(command, word, flags)
            found.append((word, []))
        else:
            values = [attached] if equals else list(islice(words, option.num_values))
            if option.fate == "same":
                found.append((_flag(command, name, option, flags), values))
            elif option.fate == "ignored":
                notices.append(f"{name} changes nothing here: {option.note}.")
            elif option.fate == "drafting":
                drafting.append((name, " ".join(values)))
            else:
                raise _refusal(name, option)
    found, about_drafting = drafting_options(drafting, found, settings)
    return [part for word, values in found for part in (word, *values)], notices + about_drafting


def _flags(settings: Mapping[str, Setting]) -> dict[str, bool]:
    """The flags of a command: whether each takes a value."""
    takes_value = dict.fromkeys(_HELP, False)
    for setting in settings.values():
        names = (name for flags in setting.flags for name in flags.split("/"))
        takes_value |= dict.fromkeys(names, setting.kind is not bool)
    return takes_value


def _flag(command: str, name: str, option: LlamaOption, flags: Mapping[str, bool]) -> str:
    """What the command calls an option."""
    ours = next((known for known in (option.note, *option.names) if known in flags), None)
    if ours is None:
        others = "requests and outrider run take it" if command == "serve" else "outrider serve takes it"
        raise SettingError(name, f"outrider {command} has no such option; {others}", "Leave it out.")
    return ours


def _refusal(name: str, option: LlamaOption) -> SettingError:
    if option.fate == "instead":
        return SettingError(name, "it is another option here", option.note)
    return SettingError(name, f"not supported here; {option.note}", "Leave it out.")


def _check_known(command: str, word: str, flags: Mapping[str, bool]) -> None:
    if word.startswith("--"):
        return  # said by the parser, with the nearest name
    near = get_close_matches(word, [flag for flag in flags if not flag.startswith("--")], 1)
    way_out = f"Did you mean {near[0]}?" if near else f"outrider {command} --help lists what there is."
    raise SettingError(word, f"outrider {command} has no such option", way_out)
