"""A plan from a TOML file and from flags, and what is wrong with it in one sentence."""

from __future__ import annotations

import glob
import os
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from outrider.bench.plan import ContestantSpec, Plan
from outrider.core.errors import SettingError
from outrider.lab.models import DEFAULT
from outrider.lab.workloads.spec import BUILT_IN, WorkloadSpec

_TABLES: dict[str, type[WorkloadSpec] | type[ContestantSpec]] = {
    "workloads": WorkloadSpec,
    "contestants": ContestantSpec,
}
_WAY_OUT = "`outrider bench init` writes a file that explains every setting."


def plan_text() -> str:
    """The file that `outrider bench init` writes: every setting explained, at its default."""
    return (files("outrider.bench") / "plan.toml").read_text(encoding="utf-8")


def read_plan(path: Path) -> Plan:
    """The plan of a TOML file; paths in it are relative to it. Without a name it is called as the file.

    Raises SettingError, which names the file and the field.
    """
    return make_plan(plan_values(path), f"{path}: ")


def plan_values(path: Path) -> dict[str, Any]:
    """What a TOML file says, not yet checked but for its form, with paths that hold from anywhere.

    Raises SettingError, which names the file.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = (error.strerror or "it cannot be read").lower()
        raise SettingError(str(path), reason, "Name a TOML file; `outrider bench init` writes one.") from None
    except UnicodeDecodeError:
        raise SettingError(str(path), "it is no UTF-8 text", "Name a TOML file.") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingError(str(path), f"it is no TOML: {error}", "Correct it there.") from None
    folder = path.absolute().parent
    for name in ("targets", "drafts"):
        if name in values:
            values[name] = _each(values[name], lambda reference: _model_from(folder, reference))
    if isinstance(values.get("costs"), str):
        values["costs"] = _from(folder, values["costs"])
    if isinstance(values.get("workloads"), list):
        values["workloads"] = [_workload_from(folder, spec) for spec in values["workloads"]]
    return {"name": path.stem} | values


def make_plan(values: Mapping[str, Any], source: str = "", names: Mapping[str, str] | None = None) -> Plan:
    """The plan of these values. A complaint calls a field by `source` and its name, or as `names` says.

    Raises SettingError: one sentence about the first thing that is wrong.
    """
    try:
        return Plan.model_validate(dict(values))
    except ValidationError as error:
        raise _complaint(error, source, names or {}) from None


def _complaint(error: ValidationError, source: str, names: Mapping[str, str]) -> SettingError:
    first = error.errors(include_url=False)[0]
    # Members of unions are named in it too: a field is what the file has.
    place = [part for part in first["loc"] if isinstance(part, int) or part.isidentifier()]
    field = str(place[0]) if place else ""
    shown = names.get(field) or source + _dotted(place)
    what = shown or source.removesuffix(": ") or "the plan"
    if first["type"] == "extra_forbidden":
        return SettingError(what, "there is no such setting", _suggestion(place))
    given = first.get("input")
    value = "" if first["type"] == "value_error" or isinstance(given, dict | list | tuple) else f"{given!r}: "
    message = first["msg"].removeprefix("Value error, ")
    return SettingError(what, value + message[:1].lower() + message[1:], _WAY_OUT)


def _dotted(place: list[int | str]) -> str:
    """A field's place as people count: workloads[2].prompts is the second workload's."""
    text = ""
    for part in place:
        text += f"[{part + 1}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def _suggestion(place: list[int | str]) -> str:
    fields = Plan.model_fields if len(place) == 1 else _TABLES[str(place[0])].model_fields
    found = get_close_matches(str(place[-1]), fields, 1, 0.6)
    return f"Did you mean {found[0]}?" if found else _WAY_OUT


def _each(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [change(part) if isinstance(part, str) else part for part in value]
    return value


def _from(folder: Path, text: str) -> str:
    """A path as it holds from anywhere; joining keeps what is absolute."""
    return str(folder / os.path.expanduser(text)) if text else text


def _model_from(folder: Path, reference: str) -> str:
    if reference == DEFAULT or reference.startswith("hf:"):
        return reference
    # The folder's own brackets are no pattern.
    is_pattern = glob.has_magic(reference) and not (folder / os.path.expanduser(reference)).exists()
    return _from(Path(glob.escape(str(folder))) if is_pattern else folder, reference)


def _workload_from(folder: Path, spec: Any) -> Any:
    if isinstance(spec, str) and spec not in BUILT_IN:
        return _from(folder, spec)
    if isinstance(spec, dict) and isinstance(spec.get("file"), str) and spec["file"] not in BUILT_IN:
        return spec | {"file": _from(folder, spec["file"])}
    return spec
