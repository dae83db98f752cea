"""A command line, read word by word.

Commands that people know from llama.cpp take its options too. Most have the same name here;
`llama_options.toml` lists the others: with another name, without effect, replaced by something else, or not
supported. The `--spec-*` options that choose drafters become a policy.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

from outrider.core.errors import SettingError
from outrider.core.schema import Setting

HELP = ("-h", "--help", "--help-all")
LLAMA_COMMANDS = ("run", "chat", "serve")
"""Commands that take llama.cpp's options"""
_NUMBER = re.compile(r"-\d|-\.\d")
_ATTACHED = re.compile(r"(-[A-Za-z])(-?\d.*)")
"""A value right after a short name: -n64"""

DRAFTING = ("--spec-type", "--spec-default")
"""Options that choose who drafts"""
_DRAFT_MODELS = ("draft-simple", "draft-mtp", "draft-eagle3", "draft-dflash", "draft-dspark")
_LOOKUPS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
_DEFAULT_TYPE = "ngram-mod"
"""What --spec-default stands for."""
_MODEL_CAP = "--spec-draft-n-max"
_FIXED_LENGTHS = "draft_p_min"
"""The setting that fixes lengths, which llama.cpp has only for draft models"""


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


class Line:
    """The words after a command's name.

    Its own flags take precedence over llama.cpp's. A word with a single dash is never read as several short
    options. Raises SettingError for an option that is refused, unknown, or not given as it has to be.
    """

    def __init__(self, command: str, words: Sequence[str], settings: Mapping[str, Setting]) -> None:
        self.found: list[tuple[str, str | None]] = []
        """flags of the command, each with its value (None: a switch), and arguments, whose flag is empty"""
        self.notices: list[str] = []
        self.help = ""
        """which help is asked for"""
        self._program = f"outrider {command}"
        self._settings = settings
        self._flags = {name: setting for setting in settings.values() for name in setting.names}
        self._table = table() if command in LLAMA_COMMANDS else {}
        self._types: list[str] = []
        """llama.cpp's types of drafts"""
        self._words = iter(words)
        for word in self._words:
            self._read(word)
        if self._types:
            self._choose_policy()

    def values(self) -> dict[str, Any]:
        """The settings that are given."""
        given: dict[str, Any] = {}
        arguments = [setting for setting in self._settings.values() if setting.is_argument]
        for flag, value in self.found:
            if not flag and not arguments:
                raise SettingError(self._program, f"unexpected argument {value!r}", self._way_out)
            setting = self._flags[flag] if flag else arguments[0]
            if setting.is_list:
                given.setdefault(setting.name, []).append(value)
                continue
            if not flag:
                arguments.pop(0)
            given[setting.name] = not setting.is_off(flag) if value is None else value
        return given

    @property
    def _way_out(self) -> str:
        return f"{self._program} --help lists what there is."

    def _read(self, word: str) -> None:
        name, equals, attached = word.partition("=") if word.startswith("--") else (word, "", "")
        value = attached if equals else None
        short = _ATTACHED.fullmatch(word)
        if word == "--":
            self.found += [("", argument) for argument in self._words]
        elif not word.startswith("-") or word == "-" or _NUMBER.match(word):
            self.found.append(("", word))
        elif name in HELP:
            self.help = name
        elif name in self._flags:
            self._take(name, value)
        elif short and short[1] in self._flags:
            self._take(short[1], short[2])
        elif self._table and name in DRAFTING:
            self._read_drafting(name, value)
        else:
            self._read_other(name, value)

    def _take(self, name: str, value: str | None) -> None:
        way_out = "--help says how it is given."
        if self._flags[name].kind is bool:
            if value is not None:
                raise SettingError(name, "it does not take a value", way_out)
        elif (value := next(self._words, None) if value is None else value) is None:
            raise SettingError(name, "it requires an argument", way_out)
        self.found.append((name, value))

    def _read_drafting(self, name: str, value: str | None) -> None:
        known = ("none", *_DRAFT_MODELS, *_LOOKUPS)
        types = _DEFAULT_TYPE if name == "--spec-default" else value or next(self._words, "")
        for kind in types.split(","):
            if kind not in known:
                way_out = f"Choose from {', '.join(known)}."
                raise SettingError(f"{name} {kind}", "it is not supported", way_out)
            self._types.append(kind)

    def _read_other(self, name: str, value: str | None) -> None:
        fate, note = self._table.get(name, ("", ""))
        if fate == "other_name" and note in self._flags:
            self._take(note, value)
        elif fate.startswith("no_effect"):
            if fate == "no_effect_with_value" and value is None:
                next(self._words, None)
            self.notices.append(f"{name} has no effect here")
        elif fate in ("see", "not_supported"):
            raise SettingError(name, "it is not supported", f"See {note}." if note else "Leave it out.")
        else:
            alike = [flag for flag in self._flags if flag.startswith("--") == name.startswith("--")]
            near = get_close_matches(name, alike, 1)
            way_out = f"Did you mean {near[0]}?" if near else self._way_out
            raise SettingError(name, f"{self._program} has no such option", way_out)

    def _choose_policy(self) -> None:
        """The policy that the types of drafts amount to. Lengths given for a draft model apply to all
        drafters; without a draft model they have no effect."""
        if self._is_given("policy"):
            raise SettingError("--spec-type", "--policy says who drafts, too", "Give one of them.")
        models = any(name in _DRAFT_MODELS for name in self._types)
        lookups = any(name in _LOOKUPS for name in self._types)
        if models and self._is_given(_FIXED_LENGTHS):  # it implies a policy
            self.found += [] if lookups else [("--no-lookup", None)]
            return
        if not models:
            for_models = {_MODEL_CAP, *self._settings[_FIXED_LENGTHS].names}
            unused = [option for option in self.found if option[0] in for_models]
            why = "has no effect here: --spec-type names no draft model"
            self.notices += [f"{flag} {why}" for flag, _ in unused]
            self.found = [option for option in self.found if option not in unused]
            self.found.append(("--policy", "lookup" if lookups else "plain"))
        else:
            self.found.append(("--policy", "auto" if lookups else "model"))

    def _is_given(self, setting: str) -> bool:
        return any(flag in self._settings[setting].names for flag, _ in self.found)
