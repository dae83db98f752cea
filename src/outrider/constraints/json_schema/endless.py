"""Parts of a schema that no finite text fits, because they require themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.constraints.json_schema.document import Node, target


def endless(root: Node, parts: Mapping[str, Node]) -> str | None:
    """The pointer of the outermost part that can never be complete; None if all can.

    The least fixed point of "some finite value fits": what is not in it needs itself.
    """
    finite: set[int] = set()
    growing = True
    while growing:
        new = {id(node) for node in parts.values() if id(node) not in finite and _ends(root, node, finite)}
        finite |= new
        growing = bool(new)
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
