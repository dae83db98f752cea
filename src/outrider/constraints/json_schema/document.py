"""A schema's text as a document: read with bounds, and the parts that references point to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from outrider.constraints.json_schema.keywords import SCHEMA_LISTS, SCHEMA_MAPS, SCHEMAS
from outrider.core.errors import GrammarError

MAX_CHARACTERS = 1_000_000
MAX_DEPTH = 100
"""Of lists and objects inside each other; llguidance reads 128."""

_MAX_DIGITS = 10

Node = dict[str, Any]


def broken(why: str, way_out: str = "Correct it.") -> GrammarError:
    """The error of a schema that cannot be used."""
    return GrammarError("schema", why, way_out)


def read(text: str) -> Node | bool:
    """The schema. Raises GrammarError for what is no JSON, no schema, or beyond the bounds."""
    if len(text) > MAX_CHARACTERS:
        why = f"it has {len(text):,} characters, {MAX_CHARACTERS:,} are the most"
        raise broken(why, "Leave out what the output does not need.")
    try:
        root = json.loads(text, parse_constant=_refuse_constant)
        json.dumps(root, ensure_ascii=False).encode()
        if any(pointer.count("/") > MAX_DEPTH for pointer, _ in walk(root)):
            raise RecursionError
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise broken(f"it is not JSON ({error.msg}: {where})") from error
    except UnicodeEncodeError as error:
        raise broken("it holds half of a surrogate pair", "Give valid Unicode.") from error
    except RecursionError:
        way_out = "Name the inner parts under $defs, and refer to them with $ref."
        raise broken(f"it nests more than {MAX_DEPTH} levels deep", way_out) from None
    except ValueError:  # Python reads no whole number of more than some thousand digits
        raise broken("a number in it has too many digits", "Shorten it.") from None
    if not isinstance(root, dict | bool):
        kinds = {str: "a string", list: "a list", int: "a number", float: "a number", type(None): "null"}
        why = f"it is {kinds[type(root)]}, and a schema is an object (or true or false)"
        raise broken(why, 'Give something like {"type": "object"}.')
    return root


def _refuse_constant(name: str) -> None:
    raise broken(f"it is not JSON ({name} is no number of JSON)")


def walk(value: object, pointer: str = "#") -> Iterator[tuple[str, Any]]:
    """A value and all that is in it, with their JSON pointers."""
    yield pointer, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield from walk(child, f"{pointer}/{escaped(str(key))}")


def children(node: Node) -> Iterator[tuple[str, Any]]:
    """The schemas right inside a schema, with their places in it."""
    for keyword in SCHEMA_MAPS:
        if isinstance(node.get(keyword), dict):
            yield from ((f"{keyword}/{escaped(key)}", child) for key, child in node[keyword].items())
    for keyword in (*SCHEMA_LISTS, *SCHEMAS):
        value = node.get(keyword)
        if isinstance(value, list) and keyword != "additionalProperties":
            yield from ((f"{keyword}/{i}", child) for i, child in enumerate(value))
        elif keyword in node:
            yield keyword, value


def escaped(key: str) -> str:
    """A key as part of a JSON pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")


def target(root: Node, pointer: str, reference: object) -> tuple[str, Any]:
    """Where a `$ref` at `pointer` points to, and what is there. Raises GrammarError for nowhere, and
    for other documents: none is ever fetched."""
    if not isinstance(reference, str):
        raise broken(f"{pointer}/$ref has to be a string")
    own = root["$id"] if isinstance(root.get("$id"), str) else ""
    try:
        document, fragment = urldefrag(urljoin(own, reference))
    except ValueError:
        why = f"{pointer}/$ref is {reference[:100]!r}, which is no reference"
        raise broken(why, "Correct it, or the $id of the schema.") from None
    if document != urldefrag(own)[0]:
        why = f"{pointer}/$ref points to another document ({reference}), and none is fetched"
        raise broken(why, "Copy what it needs to #/$defs.")
    fragment = unquote(fragment)
    found = _at(root, fragment) if fragment in ("",) or fragment.startswith("/") else _named(root, fragment)
    if found is None:
        why = f"{pointer}/$ref points to {reference}, which does not exist"
        raise broken(why, "Correct it, or put it there.")
    return found


def _at(root: Node, fragment: str) -> tuple[str, Any] | None:
    value: Any = root
    for part in fragment.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and len(key) < _MAX_DIGITS and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return f"#{fragment}", value


def _named(root: Node, name: str) -> tuple[str, Any] | None:
    for pointer, value in walk(root):
        if isinstance(value, dict) and (
            name == value.get("$anchor") or f"#{name}" in (value.get("$id"), value.get("id"))
        ):
            return pointer, value
    return None
