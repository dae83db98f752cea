"""Where settings come from: the command line, else the environment, else the TOML file, else defaults.
Several models have settings of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import SecretStr, ValidationError

from outrider.core.errors import SettingError
from outrider.core.files import read_toml, reason_of
from outrider.core.notices import collect_notices, notify
from outrider.core.schema import setting_error
from outrider.core.settings import Models, ServedSampling
from outrider.models.reference import is_companion, is_sidecar
from outrider.server.settings import (
    TABLES,
    Machine,
    ServedModels,
    ServeSettings,
    Speculation,
    table_of,
)

PREFIX = "OUTRIDER_"
CONFIG_VARIABLE = f"{PREFIX}CONFIG"
_OTHERS = frozenset({CONFIG_VARIABLE, f"{PREFIX}CACHE"})
"""Outrider's variables that are no settings of the server."""

_ALIKE = 0.8
"""Names at least this similar to a setting's are taken for slips."""

_FIELDS = ServeSettings.model_fields
_Given = tuple[Any, str]
"""a value, and where it comes from"""


@dataclass(frozen=True, slots=True)
class Configuration:
    """The settings in force; `origins` says where each that is not a default comes from. `models` has the
    settings of each of several models, by name."""

    settings: ServeSettings
    origins: Mapping[str, str]
    notices: tuple[str, ...] = ()
    models: Mapping[str, ServeSettings] = field(default_factory=dict)


def read_configuration(
    flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None = None
) -> Configuration:
    """The settings in force; `flags` are those that the command line gave, by name.

    Without `file` the variable OUTRIDER_CONFIG may name one. Raises SettingError.
    """
    path = file or (Path(environment[CONFIG_VARIABLE]) if environment.get(CONFIG_VARIABLE) else None)
    content = read_toml(path, "Name a TOML file (--config).") if path else {}
    found: dict[str, _Given] = {}
    with collect_notices() as notices:
        for name, value, origin in (
            *_file_values(path, content),
            *_environment_values(environment),
            *((name, value, f"--{name.replace('_', '-')}") for name, value in flags.items()),
        ):
            found[name] = value, origin
    settings = _validated(found)
    models = _several(settings, found, _model_tables(path, content))
    origins = {name: origin for name, (_, origin) in found.items()}
    return Configuration(settings, origins, tuple(notices), models)


def _validated(given: Mapping[str, _Given]) -> ServeSettings:
    for name, (value, origin) in given.items():
        annotation = _FIELDS[name].annotation
        # True or false where a number or text belongs would pass for 1 or 0.
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            raise SettingError(origin, "not true or false", _FIELDS[name].description or "")
    values = {name: value for name, (value, _) in given.items()}
    try:
        return ServeSettings.model_validate(values)
    except ValidationError as error:
        origins = {name: origin for name, (_, origin) in given.items()}
        raise setting_error(error, ServeSettings, values, origins) from None


def as_toml(configuration: Configuration) -> str:
    """The settings in force as a file that can be read back. Secrets are left out, with a comment."""
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
    for model, settings in configuration.models.items():
        lines += ["", f"[models.{json.dumps(model)}]"]
        for name in sorted(_OF_MODELS):
            value = getattr(settings, name)
            if value != getattr(configuration.settings, name) and not _is_secret(value):
                lines.append(f"{name} = {_toml(value)}")
    return "\n".join(lines[1:]) + "\n"


def _file_values(path: Path | None, content: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Name, value and origin of each setting of a file. It stands in its own table or before all tables."""
    for key, value in content.items():
        is_table = isinstance(value, dict) and key in TABLES
        for name, inner in value.items() if is_table else [(key, value)]:
            if is_table and key == "models" and isinstance(inner, dict):
                continue  # what a model has for itself
            home, where = table_of(name), f"{path}: {name}"
            if home is None:
                raise SettingError(where, "no such setting", _suggestion(name))
            if is_table and home != key:
                raise SettingError(where, f"not a setting of [{key}]", f"Move it to [{home}].")
            yield name, inner, where


# Several models: a table [models.NAME] for each, files of a folder, and the one that -m names.

_OF_MODELS = {
    name for group in (ServedModels, Speculation, ServedSampling, Machine) for name in group.model_fields
} | {"alias"}
"""settings that a model may have for itself"""
_NAMING = {*Models.model_fields, "alias", "chat_template_file", "costs"} - {"hf_token", "offline"}
"""of these, the ones that no other model inherits"""


def _model_tables(path: Path | None, content: Mapping[str, Any]) -> dict[str, dict[str, _Given]]:
    found: dict[str, dict[str, _Given]] = {}
    for model, values in content.get("models", {}).items():
        if isinstance(values, dict):
            places = {name: f"{path}: models.{model}.{name}" for name in values}
            for name in [name for name in values if name not in _OF_MODELS]:
                why = "not a setting of a model" if name in _FIELDS else "no such setting"
                raise SettingError(places[name], why, _suggestion(name))
            found[model] = {name: (value, places[name]) for name, value in values.items()}
    return found


def _several(
    settings: ServeSettings, values: Mapping[str, _Given], given: dict[str, dict[str, _Given]]
) -> dict[str, ServeSettings]:
    """The settings of each of several models: its own over the shared ones. Empty where there is one
    model."""
    if settings.models_dir is not None:
        for name, path in _files_in(settings.models_dir).items():
            given.setdefault(name, {"model": (str(path), str(path))})
    if given and (reference := settings.model or settings.hf_repo):
        first = settings.alias or Path(reference).stem
        own = {name: value for name, value in values.items() if name in _NAMING}
        given = {first: own, **{name: it for name, it in given.items() if name != first}}
    shared = {name: value for name, value in values.items() if name not in _NAMING}
    return {name: _validated(shared | own) for name, own in given.items()}


def _files_in(folder: Path) -> dict[str, Path]:
    """The GGUF files of a folder by name: the first part of a split one, and no companions (mmproj). Raises
    SettingError where there is none."""
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix == ".gguf")
    except OSError as error:
        raise SettingError(f"--models-dir {folder}", reason_of(error), "Name a folder.") from None
    found: dict[str, Path] = {}
    for path in files:
        part = _SPLIT.fullmatch(path.stem)
        if is_companion(path.name) or is_sidecar(path.name) or (part and part[2] != "00001"):
            continue
        found[part[1] if part else path.stem] = path
    if not found:
        raise SettingError(f"--models-dir {folder}", "there is no .gguf file in it", "Name another folder.")
    return found


_SPLIT = re.compile(r"(.+)-(\d{5})-of-\d{5}")


def _environment_values(environment: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
    """Name, value and origin of each setting that a variable gives. An empty variable gives nothing."""
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable in _OTHERS or not text:
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name in _FIELDS and variable == PREFIX + name.upper():
            is_list = get_origin(_FIELDS[name].annotation) is list
            items = [item.strip() for item in text.split(",") if item.strip()]
            yield name, items if is_list else text, variable
        elif close := get_close_matches(name, _FIELDS, 1, _ALIKE):
            raise SettingError(variable, "no such setting", f"Did you mean {PREFIX}{close[0].upper()}?")
        else:
            notify(f"{variable} is not a setting of the server and has no effect")


def _suggestion(name: str) -> str:
    found = get_close_matches(name, _FIELDS, 1, 0.6)
    return f"Did you mean {found[0]}?" if found else "`outrider serve --print-config` shows all."


def _is_secret(value: Any) -> bool:
    return isinstance(value, SecretStr) or (isinstance(value, list) and isinstance(value[0], SecretStr))


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str | Path):
        # JSON's escapes are TOML's but for DEL, which TOML wants escaped too.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)
