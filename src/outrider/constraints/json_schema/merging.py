"""How much a schema grows when its parts are merged.

Schemas side by side (`allOf`, or a `$ref` with other keywords) have to hold at once, so the compiler
merges them, each time again: parts that name the next one twice double with every level. A few hundred bytes
can so come to more than any memory holds, and the compiler has no limit of its own for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from outrider.constraints.json_schema.document import Node, broken, children, target, walk
from outrider.constraints.json_schema.keywords import SCHEMA_LISTS, SCHEMA_MAPS, SCHEMAS
from outrider.core.errors import GrammarError

_MAX_MERGED = 100_000
"""Parts, all repetitions counted: a fraction of a second, and some hundred megabytes."""

_APPLICATORS = frozenset((*SCHEMA_MAPS, *SCHEMA_LISTS, *SCHEMAS))


def check_merging(root: Node) -> None:
    """Raises GrammarError for a schema that would grow beyond bounds."""
    sizes: dict[int, int] = {}
    for _, node in walk(root):
        if isinstance(node, dict) and _merges(node) and _size(root, node, sizes) > _MAX_MERGED:
            why = f"its parts come to more than {_MAX_MERGED:,} when they are put together"
            way_out = "Say less of it with allOf, or with $ref beside other keywords."
            raise broken(why, way_out)


def _merges(node: Node) -> bool:
    alternatives = node.get("allOf")
    several = isinstance(alternatives, list) and len(alternatives) > 1
    sides = ("$ref" in node) + ("allOf" in node) + any(key in node for key in _APPLICATORS - {"allOf"})
    return several or sides > 1


def _size(root: Node, start: Node, known: dict[int, int]) -> int:
    """How many parts a part comes to with all that it refers to, up to a little beyond the bound; a way back
    to itself counts once. `known` are the sizes so far, by the parts' ids."""
    known.setdefault(id(start), 1)
    path = [(start, iter(_parts(root, start)))]
    while path:
        node, others = path[-1]
        child = next(others, None)
        if child is None:
            path.pop()
            total = 1 + sum(known[id(part)] for part in _parts(root, node))
            known[id(node)] = min(total, _MAX_MERGED + 1)
        elif id(child) not in known:
            known[id(child)] = 1
            path.append((child, iter(_parts(root, child))))
    return known[id(start)]


def _parts(root: Node, node: Node) -> list[Node]:
    """The schemas in a schema, and that which it refers to."""
    found = [child for _, child in children(node)]
    if "$ref" in node:
        with suppress(GrammarError):  # reported when it is compiled
            found.append(target(root, "#", node["$ref"])[1])
    return [part for part in found if isinstance(part, dict)]


# Parts of a schema that no finite text fits, because they require themselves.


def endless(root: Node, parts: Mapping[str, Node]) -> str | None:
    """The pointer of the outermost part that can never be complete; None if all can.

    The least fixed point of "some finite value fits": what is not in it needs itself.
    """
    finite: set[int] = set()
    while new := {
        id(part) for part in parts.values() if id(part) not in finite and _ends(root, part, finite)
    }:
        finite |= new
    return next((pointer for pointer, node in parts.items() if id(node) not in finite), None)


def _ends(root: Node, node: Node, finite: set[int]) -> bool:
    def ends(schema: Any) -> bool:
        return schema is not False and (schema is True or id(schema) in finite)

    if "const" in node or "enum" in node:
        return True
    if "$ref" in node and not ends(target(root, "#", node["$ref"])[1]):
        return False
    if not all(map(ends, node.get("allOf", ()))):
        return False
    if any(keyword in node and not any(map(ends, node[keyword])) for keyword in ("anyOf", "oneOf")):
        return False
    named = node.get("type", "null")
    return any(_type_ends(name, node, ends) for name in ([named] if isinstance(named, str) else named))


def _type_ends(name: str, node: Node, ends: Any) -> bool:
    if name == "object":
        properties, others = node.get("properties", {}), node.get("additionalProperties", True)
        return all(ends(properties.get(key, others)) for key in node.get("required", ()))
    if name == "array":
        items: Any = node.get("items", True)
        first: list[Any] = node.get("prefixItems", items if isinstance(items, list) else [])
        rest = node.get("additionalItems", True) if isinstance(items, list) else items
        needed: int = node.get("minItems", 0)
        return all(map(ends, first[:needed])) and (needed <= len(first) or ends(rest))
    return True
