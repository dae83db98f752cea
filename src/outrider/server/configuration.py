"""Where settings come from: command line before environment before TOML file before defaults.

Every source uses the same names (`outrider.server.settings`). What is unknown or out of range is an
error that names the source; variables that merely begin like ours are only mentioned.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import SecretStr, ValidationError

from outrider.core.errors import SettingError
from outrider.core.schema import setting_error
from outrider.server.settings import TABLES, ServeSettings, table_of

PREFIX = "OUTRIDER_"
CONFIG_VARIABLE = f"{PREFIX}CONFIG"
_OTHERS = frozenset({CONFIG_VARIABLE, f"{PREFIX}CACHE"})
"""Variables of ours that are no settings of the server."""

_ALIKE = 0.8
"""Names at least so similar to a setting's are taken for slips."""

_FIELDS = ServeSettings.model_fields


@dataclass(frozen=True, slots=True)
class Configuration:
    """The settings in force; `origins` says where each that is no default comes from."""

    settings: ServeSettings
    origins: Mapping[str, str]
    notices: tuple[str, ...] = ()


def read_configuration(
    flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None = None
) -> Configuration:
    """The settings in force; `flags` are those that the command line gave, by name.

    Without `file` the variable OUTRIDER_CONFIG may name one. Raises SettingError.
    """
    notices: list[str] = []
    path = file or (Path(environment[CONFIG_VARIABLE]) if environment.get(CONFIG_VARIABLE) else None)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    sources = [
        *(_file_values(path) if path else ()),
        *_environment_values(environment, notices),
        *((name, value, _flag(name)) for name, value in flags.items()),
    ]
    for name, value, origin in sources:
        _check_kind(name, value, origin)
        values[name], origins[name] = value, origin
    try:
        settings = ServeSettings.model_validate(values)
    except ValidationError as error:
        raise setting_error(error, ServeSettings, values, origins) from None
    return Configuration(settings, origins, tuple(notices))


def as_toml(configuration: Configuration) -> str:
    """The settings in force as a file that can be read back; secrets are left out, and said to be."""
    lines = []
    for table, fields in TABLES.items():
        lines += ["", f"[{table}]"]
        for name in fields.model_fields:
            value = getattr(configuration.settings, name)
            origin = configuration.origins.get(name, "default")
            if value is None or value == []:
                lines.append(f"# {name}: not set")
            elif _is_secret(value):
                lines.append(f"# {name}: set, not shown  # {_one_line(origin)}")
            else:
                lines.append(f"{name} = {_toml(value)}  # {_one_line(origin)}")
    return "\n".join(lines[1:]) + "\n"


def _file_values(path: Path) -> Iterator[tuple[str, Any, str]]:
    """Name, value and origin of each setting of a file."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = (error.strerror or "it cannot be read").lower()
        raise SettingError(str(path), reason, "Name a TOML file (--config).") from None
    except UnicodeDecodeError:
        raise SettingError(str(path), "it is no UTF-8 text", "Name a TOML file (--config).") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingError(str(path), f"it is no TOML: {error}", "Correct it there.") from None
    for key, value in content.items():
        if isinstance(value, dict) and key in TABLES:
            for name, inner in value.items():
                yield _named_in_file(path, name, key), inner, f"{path}: {name}"
        else:
            yield _named_in_file(path, key, None), value, f"{path}: {key}"


def _named_in_file(path: Path, name: str, table: str | None) -> str:
    """The name, which must be a setting's and stand in its own table or in front of all."""
    home = table_of(name)
    where = f"{path}: {name}"
    if home is None:
        raise SettingError(where, "there is no such setting", _suggestion(name, lambda known: known))
    if table is not None and home != table:
        raise SettingError(where, f"it is no setting of [{table}]", f"Move it to [{home}].")
    return name


def _environment_values(environment: Mapping[str, str], notices: list[str]) -> Iterator[tuple[str, Any, str]]:
    """Name, value and origin of each setting that a variable gives. An empty variable gives nothing."""
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable in _OTHERS or not text:
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name in _FIELDS and variable == _variable(name):
            yield name, _items(text, variable) if _is_list(name) else text, variable
        elif get_close_matches(name, _FIELDS, 1, _ALIKE):
            raise SettingError(variable, "there is no such setting", _suggestion(name, _variable))
        else:
            notices.append(f"{variable} is no setting of the server: it is not used")


def _items(text: str, variable: str) -> list[Any]:
    """Several values in one variable: separated by commas, or an array as in TOML."""
    if not text.lstrip().startswith("["):
        return [item.strip() for item in text.split(",") if item.strip()]
    try:
        items = tomllib.loads(f"items = {text}")["items"]
    except tomllib.TOMLDecodeError:
        items = None
    if not isinstance(items, list):
        raise SettingError(variable, "it is no array", 'Write ["a", "b"], or a,b.')
    return items


def _check_kind(name: str, value: Any, origin: str) -> None:
    """Raise SettingError for a yes or no where a number or text belongs: it would pass for 1 or 0."""
    annotation = _FIELDS[name].annotation
    if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
        raise SettingError(origin, "it is no switch", _help(name))


def _suggestion(name: str, spelled: Any) -> str:
    found = get_close_matches(name, _FIELDS, 1, 0.6)
    return f"Did you mean {spelled(found[0])}?" if found else "`outrider serve --print-config` shows all."


def _help(name: str) -> str:
    return _FIELDS[name].description or ""


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _is_list(name: str) -> bool:
    return get_origin(_FIELDS[name].annotation) is list


def _is_secret(value: Any) -> bool:
    return isinstance(value, SecretStr) or (isinstance(value, list) and isinstance(value[0], SecretStr))


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)


def _toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str | Path):
        # JSON's escapes are TOML's but for DEL, which TOML wants escaped too.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)
