"""A JSON schema as llguidance is to enforce it, or an error that names the place.

llguidance passes over keywords that it does not know and over formats outside strings. Whatever it would pass
over silently is an error here, or left out and named where the schema is taken leniently.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import combinations
from time import perf_counter
from typing import Any
from urllib.parse import quote, unquote, urldefrag, urljoin

from llguidance import LLMatcher, LLParserLimits

from outrider.constraints.tokenizer import is_too_large, reason
from outrider.core.errors import GrammarError
from outrider.core.params import JsonStyle

MAX_DEPTH = 100
"""Of lists and objects inside each other; llguidance reads 128."""
MAX_PROPERTIES = 2000
"""Of one object: the grammar grows with the square of it."""
_MAX_REPAIRS = 100
_MAX_REPAIRING_S = 5.0
"""Each repair compiles the schema many times over."""
_MAX_LOCATED_PARTS = 300
_EXACT_INTEGERS = 2**53
_CONTROL_CHARACTERS = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""JSON has no escape for them but \\u."""

# fmt: off
_ENFORCED = frozenset((
    "$ref", "additionalItems", "additionalProperties", "allOf", "anyOf", "const", "enum", "exclusiveMaximum",
    "exclusiveMinimum", "format", "items", "maxItems", "maxLength", "maxProperties", "maximum", "minItems",
    "minLength", "minProperties", "minimum", "multipleOf", "oneOf", "pattern", "patternProperties",
    "prefixItems", "properties", "required", "type",
))
_ANNOTATIONS = frozenset((
    "$anchor", "$comment", "$defs", "$id", "$schema", "$vocabulary", "contentEncoding", "contentMediaType",
    "contentSchema", "default", "definitions", "deprecated", "description", "discriminator", "example",
    "examples", "externalDocs", "id", "readOnly", "title", "writeOnly", "xml",
))
# fmt: on
"""Those of the standard and of OpenAPI. The standard lets `content…` be an annotation."""
_NEUTRAL = (
    ("uniqueItems", False),
    ("unevaluatedItems", True),
    ("unevaluatedProperties", True),
    ("not", False),
)
"""Keywords with values that allow everything."""
_FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
_SCHEMA_MAPS = ("properties", "patternProperties")
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS = ("items", "additionalItems", "additionalProperties")
_WITH_CONSTANTS = (
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("const", "enum"),
)

_CANNOT = "cannot be enforced"
_CAUSES = (
    ("in a registry", "$schema", "names a dialect that is not known"),
    (
        "oneOf constraints",
        "oneOf",
        "has alternatives that may overlap: that exactly one fits cannot be enforced",
    ),
    ("min/maxProperties", "minProperties", "cannot be enforced where keys are named but not required"),
    ("min/maxProperties", "maxProperties", "cannot be enforced where keys are named but not required"),
    ("not disjoint", "patternProperties", "has patterns that may overlap, which cannot be enforced"),
    ("sibling keys", "$ref", "leads back to itself beside other keywords, which cannot be enforced"),
    ("multipleOf", "multipleOf", _CANNOT),
    ("multiple of", "multipleOf", _CANNOT),
    ("regex", "pattern", _CANNOT),
    ("regex", "patternProperties", _CANNOT),
    ("integer range", "minimum", _CANNOT),
)
"""What llguidance says, which keyword it then means, and what is to be said about it."""

_SEPARATORS: dict[JsonStyle, tuple[str, str]] = {"spaced": (", ", ": "), "compact": (",", ":")}
"""between items, and after keys"""
_ESCAPES = 'nrbtf\\"'
"""Without \\u: with it, "\\u0061" would pass for a name that a schema with the name "a" does not know."""

Node = dict[str, Any]


def prepare(text: str, style: JsonStyle, *, lenient: bool) -> tuple[str, tuple[str, ...]]:
    """The schema in the form that follows `%json`, and notices of what was left out. Raises GrammarError."""
    root = _read(text)
    check = _SchemaCheck(root, lenient)
    until_s = perf_counter() + _MAX_REPAIRING_S
    for _ in range(_MAX_REPAIRS):
        if (problem := _problem(root)) is None:
            break
        if perf_counter() > until_s:
            raise _broken(f"too much of it cannot be enforced ({reason(problem)})", "Simplify it.")
        _repair(check, problem)
    between, after_key = _SEPARATORS[style]
    options = {
        "item_separator": between,
        "key_separator": after_key,
        "whitespace_flexible": False,
        "json_allowed_escapes": _ESCAPES,
    }
    return json.dumps({**root, "x-guidance": options}), tuple(check.notices)


def _broken(why: str, way_out: str = "Correct it.") -> GrammarError:
    return GrammarError("schema", why, way_out)


def _read(text: str) -> Node:
    try:
        root = json.loads(text, parse_constant=_refuse_constant)
        json.dumps(root, ensure_ascii=False).encode()
        if any(pointer.count("/") > MAX_DEPTH for pointer, _ in _walk(root)):
            raise RecursionError
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise _broken(f"it is not JSON ({error.msg}: {where})") from error
    except UnicodeEncodeError as error:
        raise _broken("it holds half of a surrogate pair", "Give valid Unicode.") from error
    except RecursionError:
        way_out = "Name the inner parts under $defs, and refer to them with $ref."
        raise _broken(f"it nests more than {MAX_DEPTH} levels deep", way_out) from None
    except ValueError:  # Python reads no whole number of more than some thousand digits
        raise _broken("a number in it has too many digits", "Shorten it.") from None
    if root is False:
        raise _broken("it is false, so that nothing fits")
    if root is not True and not isinstance(root, dict):
        why = "it is not a schema, which is an object (or true or false)"
        raise _broken(why, 'Give something like {"type": "object"}.')
    return {} if root is True else root


def _refuse_constant(name: str) -> None:
    raise _broken(f"it is not JSON ({name} is not a JSON number)")


# The parts of a schema


def _walk(value: object, pointer: str = "#") -> Iterator[tuple[str, Any]]:
    """A value and all that is in it, with their JSON pointers."""
    yield pointer, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield from _walk(child, f"{pointer}/{_escaped(str(key))}")


def _children(node: Node) -> Iterator[tuple[str, Any]]:
    """The schemas right inside a schema, with their places in it."""
    for keyword in _SCHEMA_MAPS:
        if isinstance(node.get(keyword), dict):
            yield from ((f"{keyword}/{_escaped(key)}", child) for key, child in node[keyword].items())
    for keyword in (*_SCHEMA_LISTS, *_SCHEMAS):
        value = node.get(keyword)
        if isinstance(value, list):
            yield from ((f"{keyword}/{i}", child) for i, child in enumerate(value))
        elif keyword in node and keyword in _SCHEMAS:
            yield keyword, value


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


_MAX_REFERENCES = 20
_MAX_NESTED = 16
ANYTHING = frozenset(("string", "number", "boolean", "null", "array", "object"))
"""Every type of JSON; integers are numbers."""


def json_type(value: object) -> str:
    """The JSON type of plain data."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, str | list):
        return "string" if isinstance(value, str) else "array"
    return "object" if isinstance(value, Mapping) else "number"


class Document:
    """A schema, what the references in it point to, and what its parts allow, as far as they say so."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.places = dict(_walk(root))
        self._url = root["$id"] if isinstance(root.get("$id"), str) else ""
        self._anchors: dict[str, str] = {}
        for pointer, value in self.places.items():
            if isinstance(value, dict):
                names = (f"#{value.get('$anchor')}", value.get("$id"), value.get("id"))
                self._anchors.update((name, pointer) for name in names if isinstance(name, str))

    def target(self, node: Node) -> tuple[str, Any] | None:
        """Where the `$ref` of a part points to, and what is there. None for nowhere and for other documents:
        llguidance, which fetches nothing, refuses these."""
        try:
            document, fragment = urldefrag(urljoin(self._url, str(node["$ref"])))
        except ValueError:
            return None
        if document != urldefrag(self._url)[0]:
            return None
        pointer = f"#{unquote(fragment)}"
        pointer = self._anchors.get(pointer, pointer)
        return (pointer, self.places[pointer]) if pointer in self.places else None

    def resolved(self, schema: Any) -> Any:
        """The schema that its references lead to; None where they lead nowhere."""
        for _ in range(_MAX_REFERENCES):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            schema = (self.target(schema) or ("", None))[1]
        return schema

    def types(self, schema: Any, depth: int = 0) -> Set[str]:
        """The JSON types of the values that a schema allows."""
        found = self.resolved(schema)
        if not isinstance(found, dict):
            return ANYTHING
        types: Set[str] = ANYTHING
        for keyword in ("anyOf", "oneOf"):
            if isinstance(parts := found.get(keyword), list) and depth < _MAX_NESTED:
                types &= frozenset().union(*(self.types(part, depth + 1) for part in parts))
        if (named := found.get("type")) is not None:
            names = named if isinstance(named, list) else [named]
            types &= {"number" if name == "integer" else str(name) for name in names}
        if "const" in found:
            types &= {json_type(found["const"])}
        if isinstance(found.get("enum"), list):
            types &= set(map(json_type, found["enum"]))
        return types

    def values(self, schema: Any, depth: int = 0) -> tuple[Any, ...] | None:
        """The values that a schema lists; None where there are others."""
        found = self.resolved(schema)
        if not isinstance(found, dict):
            return None
        if "const" in found:
            return (found["const"],)
        if isinstance(found.get("enum"), list):
            return tuple(found["enum"])
        parts = found.get("anyOf", found.get("oneOf"))
        if isinstance(parts, list) and depth < _MAX_NESTED:
            listed = [self.values(part, depth + 1) for part in parts]
            return None if None in listed else tuple(value for part in listed for value in part or ())
        return (None,) if found.get("type") == "null" else None


class _SchemaCheck:
    """Looks through all parts of a schema that the output depends on, and changes them in place: what
    enforces nothing is taken out, and `oneOf` becomes `anyOf` where no value fits two of it. `parts` are by
    their JSON pointers, outer ones first; `notices` name what was left out. Raises GrammarError."""

    def __init__(self, root: Node, lenient: bool) -> None:
        self.document = Document(root)
        self.parts: dict[str, Node] = {}
        self.notices: list[str] = []
        self._lenient = lenient
        self._seen: set[int] = set()
        self._visit("#", root)
        for node in self.parts.values():
            if "anyOf" not in node and _exclude_each_other(self.document, node.get("oneOf")):
                node["anyOf"] = node.pop("oneOf")

    def leave_out(self, pointer: str, keyword: str, why: str) -> None:
        """Go on without a keyword, or raise GrammarError."""
        if not self._lenient:
            way_out = "Leave it out, or go on without it (--lenient-schema)."
            raise _broken(f"{pointer}/{keyword} {why}", way_out)
        del self.parts[pointer][keyword]
        self.notices.append(f"schema: {pointer}/{keyword} {why}, and is left out")

    def _visit(self, pointer: str, node: Any) -> None:
        if isinstance(node, bool) or id(node) in self._seen:
            return
        if not isinstance(node, dict):
            raise _broken(f"{pointer} has to be a schema: an object, true or false")
        self._seen.add(id(node))
        self.parts[pointer] = node
        self._check_keywords(pointer, node)
        self._check_values(pointer, node)
        for place, child in _children(node):
            self._visit(f"{pointer}/{place}", child)
        if "$ref" in node:
            if (target := self.document.target(node)) is None:
                why = f"{pointer}/$ref points to {node['$ref']!r}, which is not in this schema"
                raise _broken(why, "Copy what it needs to #/$defs: nothing is fetched.")
            self._visit(*target)

    def _check_keywords(self, pointer: str, node: Node) -> None:
        for keyword in list(node):
            if (keyword, node[keyword]) in _NEUTRAL or keyword.startswith("x-"):
                del node[keyword]
            elif keyword not in _ENFORCED and keyword not in _ANNOTATIONS:
                self.leave_out(pointer, keyword, _CANNOT)
        inner_id = node.get("$id", node.get("id"))
        if pointer != "#" and isinstance(inner_id, str) and not inner_id.startswith("#"):
            raise _broken(f"{pointer}/$id starts a document inside this one, which is not supported")
        if "format" in node and node["format"] not in _FORMATS:
            self.leave_out(pointer, "format", f"is {node['format']!r}, which cannot be enforced")

    def _check_values(self, pointer: str, node: Node) -> None:
        for keyword in _WITH_CONSTANTS:
            for place, value in _walk(node.get(keyword), f"{pointer}/{keyword}"):
                _check_constant(place, value)
        for keyword in _SCHEMA_MAPS:
            if isinstance(node.get(keyword), dict) and (count := len(node[keyword])) > MAX_PROPERTIES:
                why = f"{pointer}/{keyword} names {count:,} properties, {MAX_PROPERTIES:,} are the most"
                raise _broken(why, "Leave out what the output does not need.")
        # Keys that the schema does not name may come twice, and count once.
        least, required = node.get("minProperties"), node.get("required", [])
        if isinstance(least, int) and isinstance(required, list) and least > max(1, len(required)):
            why = "asks for more than the required keys, which cannot be counted"
            self.leave_out(pointer, "minProperties", why)


def _check_constant(place: str, value: object) -> None:
    if isinstance(value, str) and (found := _CONTROL_CHARACTERS.search(value)):
        why = f"holds the control character U+{ord(found[0]):04X}, which is never written"
        raise _broken(f"{place} {why}", "Leave it out.")
    is_exact = not isinstance(value, int | float) or abs(value) <= _EXACT_INTEGERS or value % 1 != 0
    if not is_exact or (isinstance(value, float) and not math.isfinite(value)):
        raise _broken(
            f"{place} is beyond 2^53, where numbers cannot be held exactly", "Choose a smaller one."
        )


# oneOf: a proof that no value fits two of the schemas, sought where it is usual: other types, other constants
# or objects with a key that one of them requires and whose values differ. What is not proved counts as an
# overlap. (llguidance looks for one too, but not through references, nor between numbers.)

_MAX_ALTERNATIVES = 300


def _exclude_each_other(document: Document, schemas: object) -> bool:
    if not isinstance(schemas, list) or len(schemas) > _MAX_ALTERNATIVES:
        return False
    return all(_apart(document, one, other, 0) for one, other in combinations(schemas, 2))


def _apart(document: Document, one: Any, other: Any, depth: int) -> bool:
    one, other = document.resolved(one), document.resolved(other)
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict) or depth > 3:
        return False
    values, others = (document.values(schema) for schema in (one, other))
    if values is not None and others is not None and not _as_texts(values) & _as_texts(others):
        return True
    common = document.types(one) & document.types(other)
    if common != {"object"}:
        return not common
    return any(
        _apart(document, a["properties"][key], b["properties"][key], depth + 1)
        for a, b in ((one, other), (other, one))
        for key in a.get("required", ())
        if key in a.get("properties", {}) and key in b.get("properties", {})
    )


def _as_texts(values: Iterable[Any]) -> set[str]:
    whole = (int(v) if isinstance(v, float) and v.is_integer() else v for v in values)
    return {json.dumps(value, sort_keys=True) for value in whole}


# What llguidance refuses, found and left out


def _problem(schema: Node) -> str | None:
    limits = LLParserLimits(verbose_errors=False)
    source = f"start: %json {json.dumps(schema)}"
    is_error, messages = LLMatcher.validate_grammar_with_warnings(source, None, limits=limits)
    return messages[0] if is_error else None


def _repair(check: _SchemaCheck, problem: str) -> None:
    pointer, problem = _locate(check, problem)
    part = check.parts[pointer]
    for sign, keyword, why in _CAUSES:
        if sign not in problem or keyword not in part or "Unsatisfiable" in problem:
            continue
        why = f"{why} ({reason(problem)})" if why == _CANNOT else why
        alternatives = part.get("oneOf") if keyword == "oneOf" and "anyOf" not in part else None
        check.leave_out(pointer, keyword, why)
        if alternatives is not None:
            part["anyOf"] = alternatives
            check.notices[-1] = f"schema: {pointer}/oneOf {why}, and is taken as anyOf"
        return
    if "Unsatisfiable" in problem or "empty" in problem:
        raise _broken(f"{pointer}: nothing fits ({reason(problem)})")
    raise _broken(f"{pointer}: {reason(problem)}")


def _locate(check: _SchemaCheck, problem: str) -> tuple[str, str]:
    if len(check.parts) <= _MAX_LOCATED_PARTS and not is_too_large(problem):
        inside = _as_definition(check)
        for pointer in reversed(check.parts):
            inner = _problem({**inside, "$ref": f"#/$defs/root{quote(pointer[1:])}"})
            if inner is not None:
                return pointer, inner
    return "#", problem


def _as_definition(check: _SchemaCheck) -> Node:
    """A document that holds the schema as a definition, so that any part of it can be referred to."""
    root = copy.deepcopy(check.parts["#"])
    root.pop("$id", None)
    for pointer, part in _walk(root):
        reference = part.get("$ref") if pointer in check.parts else None
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            part["$ref"] = f"#/$defs/root{reference[1:]}"
    document: Node = {"$defs": {"root": root}}
    return document | ({"$schema": root.pop("$schema")} if "$schema" in root else {})


_JOINING = frozenset(("anyOf", "oneOf", "$ref"))
_CLOSED_PARTS = frozenset(("additionalProperties", "anyOf", "items", "oneOf", "prefixItems"))
_CLOSED_MAPS = frozenset(("$defs", "definitions", "patternProperties", "properties"))


def closed(schema: Any) -> Any:
    """The schema with objects that allow no properties but their own, where it does not say otherwise: a
    model that may write others does not stop. Objects that are combined with others stay as they are."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict) or ("properties" in schema and not _JOINING.isdisjoint(schema)):
        return schema
    found = schema | {keyword: closed(schema[keyword]) for keyword in _CLOSED_PARTS & schema.keys()}
    for keyword in _CLOSED_MAPS & schema.keys():
        if isinstance(schema[keyword], dict):
            found[keyword] = {name: closed(part) for name, part in schema[keyword].items()}
    if "properties" in schema:
        found.setdefault("additionalProperties", False)
    return found
