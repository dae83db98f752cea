"""What users name: commands, options, variables, settings of files, endpoints, names of the package."""

import tomllib
from collections.abc import Iterator
from contextlib import suppress
from inspect import signature
from typing import Any

import typer

import outrider
from golden.api import serve
from outrider.cli.commands import app
from outrider.lab.bench.plan import SweepPlan
from outrider.server.settings import Configuration, ServeSettings, as_toml

__all__ = ["commands", "endpoints", "package", "settings"]


_SUBCOMMANDS = ("bench report", "bench export")


def commands() -> Any:
    """Every command with its options: all their names, and the default of each."""
    group: Any = typer.main.get_command(app)
    context = group.make_context("outrider", [], resilient_parsing=True)
    found = {"": _options(group)}
    for name in (*group.list_commands(context), *_SUBCOMMANDS):
        command, words = group, name.split()
        while words and hasattr(command, "resolve_command"):
            _, command, words = command.resolve_command(context, words)
        found[name] = _options(command)
    return found


def _options(command: Any) -> dict[str, str]:
    """By the longest name: the other names, those that switch it off, and the default."""
    return {max(param.opts, key=len): _option(param) for param in command.params}


def _option(param: Any) -> str:
    others = sorted({*param.opts, *param.secondary_opts} - {max(param.opts, key=len)})
    parts = [param.param_type_name, *others, f"default {_plain(param.default)}"]
    parts += ["repeats"] if getattr(param, "multiple", False) or param.nargs == -1 else []
    parts += ["required"] if param.required else []
    parts += [f"variable {param.envvar}"] if getattr(param, "envvar", None) else []
    return ", ".join(parts)


def _plain(value: Any) -> str:
    known = value is None or isinstance(value, bool | int | float | str | list | tuple)
    return str(value) if known else f"<{type(value).__name__}>"


def settings() -> Any:
    """Keys and defaults of the server's settings (TOML table, variable) and of the bench's plan."""
    shown = as_toml(Configuration(ServeSettings(), {}))
    tables = tomllib.loads("\n".join(line.removeprefix("# ").replace(": not set", ' = "not set"')
                                     for line in shown.splitlines()))  # fmt: skip
    variables = sorted(f"OUTRIDER_{name.upper()}" for table in tables.values() for name in table)
    plan = {name: _plain(field.default) for name, field in SweepPlan.model_fields.items()}
    others = ["OUTRIDER_CACHE", "OUTRIDER_CONFIG"]
    return {"server": tables, "variables": variables + others, "plan": plan}


def endpoints() -> Any:
    """Paths with their methods, and all fields that a request can have."""
    with serve() as client:
        document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    return {
        f"{method.upper()} {path}": {
            "request": _fields(_content(route.get("requestBody")), schemas),
            "statuses": " ".join(sorted(route["responses"])),
        }
        for path, methods in document["paths"].items()
        for method, route in methods.items()
    }


def _content(body: Any) -> Any:
    return ((body or {}).get("content") or {}).get("application/json", {}).get("schema", {})


def _fields(schema: Any, schemas: Any) -> list[str]:
    return sorted(set(_paths(schema, schemas, "", ())))


def _paths(schema: Any, schemas: Any, at: str, seen: tuple[str, ...]) -> Iterator[str]:
    """Every field of a JSON schema as a path; references are followed, each once on the way."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name not in seen:
            yield from _paths(schemas[name], schemas, at, (*seen, name))
    for kind in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(kind, ()):
            yield from _paths(part, schemas, at, seen)
    if isinstance(schema.get("items"), dict):
        yield from _paths(schema["items"], schemas, f"{at}[]", seen)
    for name, inner in schema.get("properties", {}).items():
        place = f"{at}.{name}".removeprefix(".")
        yield place
        yield from _paths(inner, schemas, place, seen)


def package() -> Any:
    """The public names of the package: their public members, and the parameters of what can be called."""
    return {name: _members(getattr(outrider, name)) for name in sorted(outrider.__all__)}


def _members(value: Any) -> dict[str, str]:
    found = {}
    if callable(value):
        found["()"] = _parameters(value)
    if isinstance(value, type) and not issubclass(value, BaseException):
        members = {name: getattr(value, name) for name in dir(value) if not name.startswith("_")}
        found |= {
            f".{name}": _parameters(member) if callable(member) else "value"
            for name, member in members.items()
        }
    return found


def _parameters(value: Any) -> str:
    with suppress(TypeError, ValueError):
        return f"({' '.join(signature(value).parameters)})"
    return "(…)"
