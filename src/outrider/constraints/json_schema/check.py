"""What of a schema can be enforced: every part that counts is looked at before it is compiled.

llguidance passes over keywords that it does not know and over formats outside strings; whatever would
be passed over silently is an error here, or left out and named where the schema is taken leniently.
"""

from __future__ import annotations

import math
import re
from typing import Any

from outrider.constraints.json_schema.document import Node, broken, children, target, walk
from outrider.constraints.json_schema.keywords import (
    ANNOTATIONS,
    BOUNDS,
    ENFORCED,
    FORMATS,
    NEUTRAL,
    NUMBERS,
    SCHEMA_LISTS,
    SCHEMA_MAPS,
    STANDARD,
    TYPES,
)
from outrider.constraints.json_schema.overlap import excludes

MAX_PROPERTIES = 2000
"""Of one object: the grammar grows with the square of it."""

_EXACT_INTEGERS = 2**53
_LARGEST_SHOWN = 10**300
_CONTROL_CHARACTERS = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""JSON has no escape for them but \\u."""
_UNCOUNTED = "asks for more than the required keys, which cannot be counted"


class SchemaCheck:
    """Looks through all parts of a schema that the output depends on, and changes them in place: what
    enforces nothing is taken out, and `oneOf` becomes `anyOf` where no value fits two of it.

    `parts` are those looked at, by their JSON pointers, outer ones first; `notices` name what was left
    out. Raises GrammarError for what cannot be enforced (unless `lenient`) and for what is no schema.
    """

    def __init__(self, root: Node, lenient: bool) -> None:
        self.root = root
        self.parts: dict[str, Node] = {}
        self.notices: list[str] = []
        self._lenient = lenient
        self._seen: set[int] = set()
        self._visit("#", root)
        for node in self.parts.values():
            alternatives = node.get("oneOf")
            if isinstance(alternatives, list) and "anyOf" not in node and excludes(root, alternatives):
                items = [("anyOf" if key == "oneOf" else key, value) for key, value in node.items()]
                node.clear()
                node.update(items)

    def leave_out(self, pointer: str, keyword: str, why: str) -> None:
        """Go on without a keyword, or raise GrammarError."""
        if not self._lenient:
            way_out = "Leave it out, or go on without it (--lenient-schema)."
            raise broken(f"{pointer}/{keyword} {why}", way_out)
        del self.parts[pointer][keyword]
        self.notices.append(f"schema: {pointer}/{keyword} {why}, and is left out")

    def _visit(self, pointer: str, node: Any) -> None:
        if isinstance(node, bool) or id(node) in self._seen:
            return
        if not isinstance(node, dict):
            raise broken(f"{pointer} has to be a schema: an object, true or false")
        self._seen.add(id(node))
        self.parts[pointer] = node
        self._check_keywords(pointer, node)
        self._check_values(pointer, node)
        for place, child in children(node):
            self._visit(f"{pointer}/{place}", child)
        if "$ref" in node:
            self._visit(*target(self.root, pointer, node["$ref"]))

    def _check_keywords(self, pointer: str, node: Node) -> None:
        for keyword in list(node):
            if (keyword, node[keyword]) in NEUTRAL or keyword.startswith("x-"):
                del node[keyword]
            elif keyword in STANDARD:
                self.leave_out(pointer, keyword, "cannot be enforced")
            elif keyword not in ENFORCED and keyword not in ANNOTATIONS:
                self.leave_out(pointer, keyword, "is no known keyword, so that nothing would enforce it")
        inner_id = node.get("$id", node.get("id"))
        if pointer != "#" and isinstance(inner_id, str) and not inner_id.startswith("#"):
            raise broken(f"{pointer}/$id starts a document inside this one, which is not supported")
        name = node.get("format")
        if name is not None and not (isinstance(name, str) and name in FORMATS):
            self.leave_out(pointer, "format", f"is {name!r}, which cannot be enforced")

    def _check_values(self, pointer: str, node: Node) -> None:
        _check_shapes(pointer, node)
        for keyword in (*NUMBERS, "const", "enum"):
            for place, value in walk(node.get(keyword), f"{pointer}/{keyword}"):
                _check_constant(place, value)
        for low, high in BOUNDS:
            least, most = node.get(low), node.get(high)
            if isinstance(least, int | float) and isinstance(most, int | float) and least > most:
                raise broken(f"{pointer}/{low} is {least}, more than {high}, {most}: nothing fits")
        # Keys that the schema does not name may come twice, and count once.
        least = node.get("minProperties", 0)
        if isinstance(least, int) and least > max(1, len(node.get("required", ()))):
            self.leave_out(pointer, "minProperties", _UNCOUNTED)


def _check_shapes(pointer: str, node: Node) -> None:
    named = node.get("type", [])
    for name in named if isinstance(named, list) else [named]:
        if not isinstance(name, str) or name not in TYPES:
            raise broken(f"{pointer}/type is {name!r}, and no type of JSON")
    required = node.get("required", [])
    if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
        raise broken(f"{pointer}/required has to be a list of keys")
    for keyword in ("enum", *SCHEMA_LISTS):
        if not isinstance(node.get(keyword, []), list):
            raise broken(f"{pointer}/{keyword} has to be a list")
    if node.get("enum") == []:
        raise broken(f"{pointer}/enum is empty: nothing fits")
    for keyword in SCHEMA_MAPS:
        if not isinstance(node.get(keyword, {}), dict):
            raise broken(f"{pointer}/{keyword} has to be an object")
        if (count := len(node.get(keyword, ()))) > MAX_PROPERTIES:
            why = f"{pointer}/{keyword} names {count:,} properties, {MAX_PROPERTIES:,} are the most"
            raise broken(why, "Leave out what the output does not need.")


def _check_constant(place: str, value: object) -> None:
    if isinstance(value, str) and (found := _CONTROL_CHARACTERS.search(value)):
        why = f"holds the control character U+{ord(found[0]):04X}, which is never written"
        raise broken(f"{place} {why}", "Leave it out.")
    if isinstance(value, int | float) and (
        (isinstance(value, float) and not math.isfinite(value))
        or (abs(value) > _EXACT_INTEGERS and value == int(value))
    ):
        is_shown = isinstance(value, float) or abs(value) < _LARGEST_SHOWN
        shown = f"{value:.17g}" if is_shown else "too large"
        why = f"is {shown}, and numbers beyond 2^53 cannot be held exactly"
        raise broken(f"{place} {why}", "Choose a smaller one, or leave it out.")
