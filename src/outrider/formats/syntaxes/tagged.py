"""Calls whose parameters are tagged one by one, text as it is and everything else in JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from outrider.constraints.json_schema import ANYTHING, Document, json_type
from outrider.core.files import parse_json
from outrider.formats.conversation import Call, ToolSpec
from outrider.formats.grammar import Rules
from outrider.formats.reader import Reader
from outrider.formats.scan import BLANKS, Scan, blank, either, expect, text_up_to, until, value
from outrider.formats.syntaxes.base import CallSyntax, as_json

_MAX_NAME = 256
_MAX_UNNAMED = 16
"""Parameters that no schema names, of one call."""


@dataclass(frozen=True, kw_only=True)
class Tagged(CallSyntax):
    """A name, `after_name`, and for each parameter `key`, its name, `after_key`, `before_value`, its value
    and `after_value`. A value of type string is text as it is; other values are JSON. One that may be
    either is text, and JSON where it can be read so."""

    after_name: str = ""
    key: str = ""
    after_key: str = ""
    before_value: str = ""
    after_value: str = ""

    def _inside(self, call: Call, index: int) -> str:
        del index
        return f"{call.name}{self.after_name}" + "".join(
            f"{self.key}{name}{self.after_key}{self.before_value}{_as_text(given)}{self.after_value}"
            for name, given in call.arguments.items()
        )

    def _rule(self, rules: Rules, tool: ToolSpec) -> str:
        parameters, is_open = parameters_of(tool.parameters)
        parts = [as_json(tool.name), rules.marker(self.after_name)]
        for one in parameters:
            rule = rules.named(f"{self._head(rules, json.dumps(one.name))} {self._value(rules, tool, one)}")
            parts.append(rule if one.is_required else f"{rule}?")
        if is_open:
            anything = self._value(rules, tool, Parameter("", False, ANYTHING, None, {}))
            unnamed = rules.named(f"{self._head(rules, '/[a-zA-Z_][a-zA-Z0-9_]*/')} {anything}")
            parts.append(f"{unnamed}{{0,{_MAX_UNNAMED}}}")
        return " ".join([*parts, rules.marker(self.closer)])

    def _head(self, rules: Rules, name: str) -> str:
        return f"{rules.marker(self.key)} {name} {rules.marker(self.after_key + self.before_value)}"

    def _value(self, rules: Rules, tool: ToolSpec, one: Parameter) -> str:
        """A value and what follows it."""
        if "string" not in one.types:
            return f"{rules.value(tool, one.schema, one.name)} {rules.marker(self.after_value)}"
        if one.values:
            texts = [json.dumps(_as_text(value)) for value in one.values]
            return f"{rules.choice(texts)} {rules.marker(self.after_value)}"
        pattern, left_out = text_pattern(one.schema, one.types)
        rules.leave_out(tool, one.name, left_out)
        before, tag, after = self._end
        optional = "\\n?" if before else ""
        return f"{rules.text_up_to(f'/{pattern}{optional}/', tag)} {rules.marker(after)}"

    @property
    def _end(self) -> tuple[str, str, str]:
        """The white space before the tag that ends a value, the tag, and the white space after it."""
        tag = self.after_value.strip()
        before, _, after = self.after_value.partition(tag)
        return before, tag, after

    def _scan_call(self, reader: Reader) -> Scan[None]:
        name, read = yield from self._scan_name()
        reader.name(name)
        known = parameters_of(reader.tools[name].parameters)[0] if name in reader.tools else []
        types = {one.name: one.types for one in known}
        count = 0
        while not (yield from either([self.key, self.closer], read)):
            key, read = (yield from until(self.after_key.strip())).strip(), ""
            reader.arguments(f"{', ' if count else '{'}{as_json(key)}: ")
            yield from either([self.before_value])
            yield from self._scan_value(reader, types.get(key, ANYTHING))
            count += 1
        if count:
            reader.arguments("}")
        reader.close()

    def _scan_name(self) -> Scan[tuple[str, str]]:
        """The name, and what was read after it of the next marker."""
        if end := self.after_name.strip():
            return (yield from until(end)).strip(), ""
        name = ""
        while (character := (yield)) not in BLANKS + self.key[0] + self.closer[0]:
            name += character
            expect(len(name) <= _MAX_NAME)
        return name, character.strip()

    def _scan_value(self, reader: Reader, types: Set[str]) -> Scan[None]:
        before, tag, _ = self._end
        read = ""
        if self.before_value.endswith("\n") and (read := (yield)) == "\n":
            read = ""
        if types == {"string"}:
            reader.arguments('"')
            yield from text_up_to(before, tag, lambda text: reader.arguments(as_json(text)[1:-1]), read)
            reader.arguments('"')
            return
        if "string" not in types:
            read = read.strip() or (yield from blank())
            if read in '{["':
                yield from value(read, reader.arguments)
                yield from either([tag])
                return
        texts: list[str] = []
        yield from text_up_to(before, tag, texts.append, read)
        reader.arguments(_as_json("".join(texts), types))


def _as_text(given: Any) -> str:
    return given if isinstance(given, str) else as_json(given)


def _as_json(text: str, types: Set[str]) -> str:
    """A value that is JSON of one of the types as it is, and any other as a string."""
    try:
        is_json = json_type(parse_json(text)) in types - {"string"}
    except ValueError:
        is_json = False
    return text.strip() if is_json else as_json(text)


# The parameters of a tool one by one

_MAX_LENGTH = 1_000
"""Longer bounds of a text would make patterns too large."""
_NO_RESTRICTIONS = {"type", "anyOf", "oneOf", "$defs", "definitions"} | {
    *("title", "description", "default", "examples", "deprecated")
}


class Parameter(NamedTuple):
    """A parameter, the JSON types that its values may have, the values themselves where they are listed, and
    their schema with all definitions."""

    name: str
    is_required: bool
    types: Set[str]
    values: tuple[Any, ...] | None
    schema: Any


def parameters_of(schema: Mapping[str, Any]) -> tuple[list[Parameter], bool]:
    """The parameters that the schema of an object names, in its order, and whether there may be others: a
    schema without properties allows any, and so does one that says so."""
    document = Document(schema)
    found = document.resolved(schema)
    found = found if isinstance(found, Mapping) else {}
    properties = found.get("properties")
    if not isinstance(properties, Mapping) or not properties:
        return [], found.get("additionalProperties") is not False
    required = found.get("required")
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    parameters = []
    for name, one in properties.items():
        types, values = document.types(one) or ANYTHING, document.values(one)
        one = document.resolved(one) if types == {"string"} else one
        whole = {**one, **definitions} if isinstance(one, Mapping) else one
        is_required = isinstance(required, list) and name in required
        parameters.append(Parameter(name, is_required, types, values, whole))
    return parameters, found.get("additionalProperties") not in (None, False)


def text_pattern(schema: Any, types: Set[str]) -> tuple[str, tuple[str, ...]]:
    """A regular expression of the texts that a schema allows, of which a string is one of the `types`, and
    the keywords that it leaves out."""
    left_out = sorted(_restrictions(schema))
    if types != {"string"} or not isinstance(schema, Mapping):
        return "(?s:.*)", tuple(left_out)
    bounds = {"minLength": schema.get("minLength", 0), "maxLength": schema.get("maxLength", "")}
    if all(
        bound == "" or (isinstance(bound, int) and 0 <= bound <= _MAX_LENGTH) for bound in bounds.values()
    ):
        least, most = bounds.values()
        return f"(?s:.{{{least},{most}}})", tuple(key for key in left_out if key not in bounds)
    return "(?s:.*)", tuple(left_out)


def _restrictions(schema: Any) -> set[str]:
    """Keywords that allow less than the types do."""
    if not isinstance(schema, Mapping):
        return set()
    parts = [part for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list) for part in schema[key]]
    return (schema.keys() - _NO_RESTRICTIONS).union(*map(_restrictions, parts))
