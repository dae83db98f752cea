"""One schema of settings for the command line, the environment, TOML and help.

A group is a Pydantic model; `setting` adds flags and help to a field. A command's settings are a class that
inherits groups. One name serves all sources: `max_running` is `--max-running`, OUTRIDER_MAX_RUNNING and the
TOML key `max_running`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_origin

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from outrider.core.errors import SettingError
from outrider.core.invalid import invalid

_OWN = "a command's own"
_PANELS = (
    *("Models", "Prompt and text", "Sampling", "Structured output", "Speculation"),
    *(_OWN, "Output", "Machine", "Where it is computed", "Longer contexts"),
)
"""In the order of the help."""

_METAVARS = {bool: None, int: "N", float: "S", str: "TEXT", Path: "FILE"}


def setting(default: Any, help: str, names: str = "", *, panel: str | None = None) -> Any:
    """A setting of a group.

    Args:
        default: `...` if it must be given.
        help: One line or two for `--help`.
        names: Its flags (the field's name makes the long one if none is given) and the value's placeholder in
            the help, if not by type: "-m --model MODEL".
        panel: The help's section; None: the group's.
    """
    shown: Any = {"names": names.split(), "panel": panel, "argument": False}
    return Field(default, description=help, json_schema_extra=shown)


def argument(default: Any, help: str, placeholder: str = "") -> Any:
    """A positional setting; as `setting`."""
    shown: Any = {"names": placeholder.split(), "panel": None, "argument": True}
    return Field(default, description=help, json_schema_extra=shown)


class Group(BaseModel):
    """Settings that belong together, in one `panel` of the help. Errors never repeat a value, which may be a
    secret."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, validate_default=True, defer_build=True
    )
    panel: ClassVar[str]

    def __init_subclass__(cls, *, panel: str = "Output", **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.panel = panel


def values_for(kind: type[Any], settings: BaseModel, **renamed: str) -> dict[str, Any]:
    """The settings that are fields of a dataclass, under their own names or as `renamed` there."""
    names = {field.name: renamed.get(field.name, field.name) for field in fields(kind)}
    return {name: getattr(settings, own) for name, own in names.items() if hasattr(settings, own)}


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting for all sources. `kind` is the type of a single value; `names` are all its flags, including
    those that switch it off."""

    name: str
    kind: type
    default: Any
    is_required: bool
    is_list: bool
    is_argument: bool
    names: tuple[str, ...]
    panel: str
    metavar: str | None
    help: str

    def is_off(self, flag: str) -> bool:
        """Whether a flag switches it off."""
        return self.kind is bool and self.default is not False and flag.startswith("--no-")

    @property
    def flag(self) -> str:
        """Its first long name, which messages use."""
        return next((name for name in self.names if name.startswith("--")), self.metavar or "")


@cache
def settings_of(group: type[Group]) -> dict[str, Setting]:
    """A group's settings by name, in the order of the panels."""
    settings = [_setting(group, name) for name in _names(group)]
    settings.sort(key=lambda setting: _PANELS.index(setting.panel if setting.panel in _PANELS else _OWN))
    return {setting.name: setting for setting in settings}


def _names(group: type[Group]) -> dict[str, None]:
    found: dict[str, None] = {}
    for base in group.__bases__:
        if issubclass(base, Group):
            found |= _names(base)
    return found | dict.fromkeys(group.model_fields)


def _setting(group: type[Group], name: str) -> Setting:
    field = group.model_fields[name]
    shown: Any = field.json_schema_extra
    words, atoms = list(shown["names"]), _atoms(field.annotation)
    placeholder = words.pop() if words and not words[-1].startswith("-") else None
    kind = next((known for known in _METAVARS if known in atoms), str)
    home = next(
        base for base in reversed(group.__mro__) if issubclass(base, Group) and name in base.model_fields
    )
    return Setting(
        name=name,
        kind=kind,
        default=None if field.is_required() or field.default == [] else field.default,
        is_required=field.is_required(),
        is_list=get_origin(field.annotation) is list,
        is_argument=shown["argument"],
        names=() if shown["argument"] else _flags(name, kind, field.default, words),
        panel=shown["panel"] or home.panel,
        metavar=placeholder or _METAVARS[kind],
        help=field.description or "",
    )


def _atoms(kind: Any) -> set[Any]:
    return {kind}.union(*map(_atoms, getattr(kind, "__args__", ())))


def _flags(name: str, kind: type, default: Any, flags: list[str]) -> tuple[str, ...]:
    if any(flag.startswith("--") for flag in flags):
        return tuple(flags)
    word = name.replace("_", "-")
    # A switch that is off by default needs no name to switch it off.
    off = (f"--no-{word}",) if kind is bool and default is not False else ()
    return (f"--{word}", *off, *flags)


def setting_error(
    error: ValidationError, group: type[Group], values: Mapping[str, Any], origins: Mapping[str, str]
) -> SettingError:
    """Pydantic's first error, at the place where the value was given (`origins`), without secrets."""
    first = invalid(error)
    name = str(first.place[0])
    field, value = group.model_fields[name], values.get(name)
    is_hidden = value in (None, "") or isinstance(value, list | dict) or SecretStr in _atoms(field.annotation)
    shown = "" if is_hidden else f"{value} cannot be used: "
    return SettingError(origins.get(name, name), f"{shown}{first.reason}", field.description or "")


Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
NonEmpty = Annotated[str, Field(min_length=1)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Layers = Annotated[str, Field(coerce_numbers_to_str=True)]
