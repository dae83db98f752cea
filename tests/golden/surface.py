"""What users name: commands, options, variables, settings of files, endpoints."""

from collections.abc import Iterator
from typing import Any

from golden.api import serve
from outrider.cli.help import COMMANDS, load
from outrider.core.schema import Setting, settings_of
from outrider.lab.bench.plan import SweepPlan
from outrider.server.settings import TABLES

__all__ = ["commands", "endpoints", "settings"]


def commands() -> Any:
    """Every command with its options: all their names, and the default of each."""
    return {
        name: {made.flag: _option(made) for made in settings_of(load(spec.settings)).values()}
        for name, spec in COMMANDS.items()
    }


def _option(made: Setting) -> str:
    parts = [*sorted({*made.names} - {made.flag}), f"default {_plain(made.default)}"]
    return ", ".join(parts + ["repeats"] * made.is_list + ["required"] * made.is_required)


def _plain(value: Any) -> str:
    known = value is None or isinstance(value, bool | int | float | str | list | tuple)
    return str(value) if known else f"<{type(value).__name__}>"


def settings() -> Any:
    """Keys and defaults of the server's settings (TOML table, variable) and of the bench's plan."""
    tables = {
        table: {
            name: _plain(field.get_default(call_default_factory=True))
            for name, field in group.model_fields.items()
        }
        for table, group in TABLES.items()
    }
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
