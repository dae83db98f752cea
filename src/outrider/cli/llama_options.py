"""Command lines written for llama.cpp.

Most options have the same name here. `llama_options.toml` lists the others: with another name, without
effect, replaced by something else, or not supported. The `--spec-*` options that choose drafters become a
policy.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from itertools import islice

from outrider.cli.help import HELP
from outrider.core.errors import SettingError
from outrider.core.schema import Setting

COMMANDS = ("run", "chat", "serve")
"""Commands that take llama.cpp's options"""
_NUMBER = re.compile(r"-\d|-\.\d")
_ATTACHED = re.compile(r"(-[A-Za-z])(-?\d.*)")
"""A value right after a short name: -n64"""

DRAFTING = ("--spec-type", "--spec-default")
"""Options that choose who drafts"""
_DRAFT_MODELS = ("draft-simple", "draft-mtp", "draft-eagle3", "draft-dflash", "draft-dspark")
_LOOKUPS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
_DEFAULT_TYPES = ("ngram-mod",)
"""What --spec-default stands for."""
_MODEL_CAP = "--spec-draft-n-max"
_FIXED_LENGTHS = ("draft_min", "draft_p_min")
"""Settings that llama.cpp has only for draft models"""


@cache
def table() -> Mapping[str, tuple[str, str]]:
    """By each name that only llama.cpp has: what becomes of it (a key of the file), and its name here or its
    replacement."""
    text = (files(__package__) / "llama_options.toml").read_text(encoding="utf-8")
    found: dict[str, tuple[str, str]] = {}
    for fate, content in tomllib.loads(text).items():
        groups = content if isinstance(content, dict) else {"": content}
        for note, names in groups.items():
            found |= dict.fromkeys(names.split(), (fate, note))
    return found


def translate(
    command: str, arguments: Sequence[str], settings: Mapping[str, Setting]
) -> tuple[list[str], list[str]]:
    """The arguments with only the command's own flags, which take precedence over llama.cpp's, and a notice
    for each option without effect.

    Raises SettingError for an option that is refused, and for an unknown one with a single dash, which is
    never read as several short ones. Unknown long ones are left to the parser, which suggests the nearest.
    """
    line = _Line(command, arguments, settings)
    for word in line.words:
        line.read(word)
    found = line.with_policy() if line.types else line.found
    if lengths := [word for word in line.fixed_lengths() if word in dict(found)]:
        fix = "fixes the lengths of drafts: leave it out, and Outrider chooses them"
        fix = fix if len(lengths) == 1 else "fix the lengths of drafts: leave them out, and Outrider chooses"
        line.notices.append(f"{' and '.join(lengths)} {fix}")
    return [part for word, values in found for part in (word, *values)], line.notices


class _Line:
    """A command line, read word by word."""

    def __init__(self, command: str, arguments: Sequence[str], settings: Mapping[str, Setting]) -> None:
        self.words = iter(arguments)
        self.found: list[tuple[str, list[str]]] = []
        """options with their values, in order"""
        self.types: list[str] = []
        """llama.cpp's types of drafts"""
        self.notices: list[str] = []
        self._command = command
        self._settings = settings
        self._flags = dict.fromkeys(HELP, False)
        """of the command, and whether they take a value"""
        for setting in settings.values():
            self._flags |= dict.fromkeys(setting.names, setting.kind is not bool)

    def read(self, word: str) -> None:
        name, equals, attached = word.partition("=") if word.startswith("--") else (word, "", "")
        if word == "--":
            self.found.append((word, list(self.words)))
        elif not word.startswith("-") or word == "-" or _NUMBER.match(word):
            self.found.append((word, []))
        elif name in self._flags:
            self.found.append((word, list(islice(self.words, self._flags[name] and not equals))))
        elif (short := _ATTACHED.fullmatch(word)) and self._flags.get(short[1]):
            self.found.append((short[1], [short[2]]))
        elif name in DRAFTING:
            self._read_drafting(
                name, attached if equals or name == "--spec-default" else next(self.words, "")
            )
        else:
            self._read_other(name, word, [attached] if equals else [])

    def _read_drafting(self, name: str, value: str) -> None:
        known = ("none", *_DRAFT_MODELS, *_LOOKUPS)
        for kind in _DEFAULT_TYPES if name == "--spec-default" else value.split(","):
            if kind not in known:
                way_out = f"Choose from {', '.join(known)}."
                raise SettingError(f"{name} {kind}", "it is not supported", way_out)
            self.types.append(kind)

    def _read_other(self, name: str, word: str, attached: list[str]) -> None:
        fate, note = table().get(name, ("", ""))
        if fate == "other_name" and note in self._flags:
            self.found.append((note, attached or list(islice(self.words, self._flags[note]))))
        elif fate.startswith("no_effect"):
            list(islice(self.words, fate == "no_effect_with_value" and not attached))
            self.notices.append(f"{name} has no effect here")
        elif fate in ("see", "not_supported"):
            raise SettingError(name, "it is not supported", f"See {note}." if note else "Leave it out.")
        elif name.startswith("--") and not fate:
            self.found.append((word, []))
        else:
            program = f"outrider {self._command}"
            near = get_close_matches(name, [flag for flag in self._flags if not flag.startswith("--")], 1)
            way_out = f"Did you mean {near[0]}?" if near else f"{program} --help lists what there is."
            raise SettingError(name, f"{program} has no such option", way_out)

    def with_policy(self) -> list[tuple[str, list[str]]]:
        """The options, with the policy that the types of drafts amount to. Lengths given for a draft model
        apply to all drafters; without a draft model they have no effect."""
        if self._is_given("policy"):
            raise SettingError("--spec-type", "--policy says who drafts, too", "Give one of them.")
        models = any(name in _DRAFT_MODELS for name in self.types)
        lookups = any(name in _LOOKUPS for name in self.types)
        if models and any(map(self._is_given, _FIXED_LENGTHS)):
            return [("--policy", ["fixed"]), *([] if lookups else [("--no-lookup", [])]), *self.found]
        if models:
            return [("--policy", ["auto" if lookups else "model"]), *self.found]
        lengths = {name for setting in _FIXED_LENGTHS for name in self._settings[setting].names}
        unused = [word for word, _ in self.found if word.partition("=")[0] in {_MODEL_CAP, *lengths}]
        self.notices += [f"{name} has no effect here: --spec-type names no draft model" for name in unused]
        kept = [option for option in self.found if option[0] not in unused]
        return [("--policy", ["lookup" if lookups else "plain"]), *kept]

    def fixed_lengths(self) -> Sequence[str]:
        """The options that fix lengths, where --policy says nothing about them."""
        names = {name for setting in _FIXED_LENGTHS for name in self._settings[setting].names}
        words = [word for word, _ in self.found if word.partition("=")[0] in names]
        return () if self._is_given("policy") else list(dict.fromkeys(words))

    def _is_given(self, setting: str) -> bool:
        return any(word.partition("=")[0] in self._settings[setting].names for word, _ in self.found)
