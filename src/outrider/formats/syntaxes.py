"""How chat formats write tool calls: as grammars that demand them, and as scans that read them. From its
beginning on the grammar holds a call to its syntax, so scans read what that lets through and nothing else."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any, NamedTuple

from outrider.constraints.json_schema import ANYTHING, Document, json_type
from outrider.core.files import parse_json
from outrider.formats.conversation import Call, ToolSpec
from outrider.formats.grammar import BLANK, ID, MARKER, NUMBER, Rules, repeated, split_trigger
from outrider.formats.reader import (
    BLANKS,
    Reader,
    Scan,
    blank,
    either,
    expect,
    one_of,
    text_up_to,
    until,
    value,
)

PROBE = Call("probe_tool", {"probe_key": "probe value"})
"""What templates are tried with."""


@dataclass(frozen=True, kw_only=True)
class CallSyntax(ABC):
    """How a chat format writes calls: `opener`, `head` and `closer` are around each, `section` around all of
    them, `separator` between two."""

    name: str
    opener: str = ""
    head: str = ""
    closer: str = ""
    section: tuple[str, str] = ("", "")
    separator: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """Parts of the texts that may be control tokens."""
        fields = (field if isinstance(field, tuple) else (field,) for field in astuple(self)[1:])
        texts = [text for field in fields for text in field if isinstance(text, str)]
        return tuple(dict.fromkeys(MARKER.findall("\n".join(texts))))

    @property
    def _start(self) -> str:
        return self.section[0] + self.opener

    @cached_property
    def _trigger(self) -> tuple[str, str]:
        return split_trigger(self._start)

    def is_of(self, source: str, rendered: str) -> bool:
        """Whether a template with this source writes calls so: `rendered` is what it made of the call
        `PROBE`. One that renders no calls has to mention an opener that is a control token."""
        if PROBE.name not in rendered:
            opener = self.opener or self.section[0]
            return opener.startswith(("<|", "<｜")) and MARKER.findall(opener)[0] in source
        return self.written([PROBE]).partition("probe value")[0] in rendered

    def written(self, calls: Sequence[Call]) -> str:
        """The calls as the model writes them."""
        texts = (
            f"{self.opener}{_filled(self.head, i)}{self._inside(one, i)}{self.closer}"
            for i, one in enumerate(calls)
        )
        return f"{_filled(self.section[0])}{self.separator.join(texts)}{self.section[1]}"

    def calls(self, rules: Rules, tools: Sequence[ToolSpec], max_calls: int, *, free: bool) -> list[str]:
        """One to `max_calls` calls, as parts of a grammar of which one has to match; `free`: after any
        text."""
        return [self._calls(rules, tools, max_calls, self._start, free=free)]

    def _calls(
        self, rules: Rules, tools: Sequence[ToolSpec], max_calls: int, start: str, *, free: bool
    ) -> str:
        one = rules.choice([self._rule(rules, tool) for tool in tools])
        first = f"{rules.opener(start, free=free)} {one}"
        following = f"{rules.marker(self.separator + self.opener)} {one}"
        return f"{repeated(first, following, max_calls)} {rules.marker(self.section[1])}"

    def scan_from(self, first: str, reader: Reader) -> Scan[None] | None:
        """What reads calls, of which one may begin with this character; None: none can."""
        trigger, rest = self._trigger
        return self._scan(first, reader, trigger, rest) if trigger.startswith(first) else None

    def _scan(self, first: str, reader: Reader, trigger: str, rest: str) -> Scan[None]:
        yield from either([trigger], first)
        reader.certain()
        yield from either([rest.replace(BLANK, "") + self.head[:1]])
        yield from self._scan_calls(reader)

    def _scan_calls(self, reader: Reader) -> Scan[None]:
        """Read calls after the opener of the first and a character of its head."""
        following = [self.separator + self.opener + self.head[:1]]
        while True:
            yield from self._scan_call(reader)
            if not self.section[1] and not self.separator.strip():
                return  # the next one has an opener of its own
            if (yield from either([*following, *filter(None, self.section[1:])])):
                return

    @abstractmethod
    def _inside(self, call: Call, number: int) -> str:
        """What is written between head and closer."""

    @abstractmethod
    def _rule(self, rules: Rules, tool: ToolSpec) -> str:
        """The part of a grammar for a call of this tool, after the opener, closer included."""

    @abstractmethod
    def _scan_call(self, reader: Reader) -> Scan[None]:
        """Read a call after its opener and the first character of its head, closer included."""


def _filled(text: str, number: int = 0) -> str:
    return text.replace(NUMBER, str(number)).replace(ID, "probe1234").replace(BLANK, "")


def _as_json(given: object) -> str:
    return json.dumps(given, ensure_ascii=False)


# Names, and arguments in JSON


_PLACEHOLDERS = re.compile(rf"{re.escape(NUMBER)}|{re.escape(ID)}")


@dataclass(frozen=True, kw_only=True)
class Named(CallSyntax):
    """A name, `between`, and the arguments in JSON."""

    between: str

    def _inside(self, call: Call, number: int) -> str:
        return f"{call.name}{_filled(self.between, number)}{_as_json(call.arguments)}"

    def _rule(self, rules: Rules, tool: ToolSpec) -> str:
        head = f"{rules.marker(self.head)} {_as_json(tool.name)} {rules.marker(self.between)}"
        return f"{head} {rules.arguments(tool)} {rules.marker(self.closer)}"

    def _scan_call(self, reader: Reader) -> Scan[None]:
        before, *others = _PLACEHOLDERS.split(self.between)
        text = yield from until((others or [before])[-1].rstrip())
        reader.begin((text.rpartition(before)[0] if others else text).strip())
        yield from self._scan_arguments(reader, self.closer)

    def _scan_arguments(self, reader: Reader, closer: str) -> Scan[None]:
        expect((yield from blank()) == "{")
        yield from value("{", reader.arguments)
        reader.close()
        yield from either([closer])


_TYPE = r'("type"\s*:\s*"function"\s*,\s*)?'
_TO_THE_NAME = rf'/((?s:.*)\n)?[ \t]*\{{\s*{_TYPE}"name"\s*:\s*/'
_BARE = ('{"name":"', '{"type":"function","name":"')


@dataclass(frozen=True, kw_only=True)
class Objects(Named):
    """JSON objects.

    `is_bare`: in an answer that may call tools, but need not, a line that begins with an object whose first
    key is the name of a tool is a call without markers (some models leave them out); so is what follows
    `tag`. Templates have all the `signs` of one of the rows in their source.
    """

    head: str = '{"name": "'
    between: str = '", "arguments": '
    closer: str = "}"
    is_bare: bool = False
    tag: str = ""
    signs: tuple[tuple[str, ...], ...] = ((),)

    def is_of(self, source: str, rendered: str) -> bool:
        if PROBE.name not in rendered:
            return super().is_of(source, rendered)
        # White space and the order of keys differ.
        begins = "".join(f"{_filled(self._start)}{{".split()) in "".join(rendered.split())
        is_signed = any(all(sign in source for sign in row) for row in self.signs)
        return begins and is_signed and all(f'"{key}"' in rendered for key in PROBE.arguments)

    def calls(self, rules: Rules, tools: Sequence[ToolSpec], max_calls: int, *, free: bool) -> list[str]:
        found = []
        if free and self.is_bare:
            one = rules.choice([self._object(rules, tool) for tool in tools])
            following = f"{json.dumps(self.separator)} {one}"
            found = [repeated(self._bare(rules, tool), following, max_calls) for tool in tools]
        start = self._start or (self.tag if free else "")
        if start or not free:
            found.append(self._calls(rules, tools, max_calls, start, free=free))
        return found

    def _rule(self, rules: Rules, tool: ToolSpec) -> str:
        return super()._rule(rules, tool) if self._start else self._object(rules, tool)

    def _object(self, rules: Rules, tool: ToolSpec) -> str:
        """An object without markers. Other JSON may be allowed in its place, which llguidance tells apart
        after lexemes that are alike."""
        head = re.findall(r'"[^"]*"|[^"]+', f"{self.head}{tool.name}{self.between}")
        return f'{" ".join(map(json.dumps, head))} {rules.arguments(tool)} "}}"'

    def _bare(self, rules: Rules, tool: ToolSpec) -> str:
        prefix = rules.text_up_to(_TO_THE_NAME, _as_json(tool.name))
        return f'{prefix} {json.dumps(self.between[1:])} {rules.arguments(tool)} "}}"'

    def scan_from(self, first: str, reader: Reader) -> Scan[None] | None:
        if self.is_bare and reader.is_line_start and first == "{":
            return self._scan_bare(reader)
        if self.tag.startswith(first):
            return self._scan(first, reader, self.tag, "")
        return super().scan_from(first, reader)

    def _scan_call(self, reader: Reader) -> Scan[None]:
        yield from until(_PLACEHOLDERS.split(self.head[1:])[-1])
        yield from self._scan_object(reader, (yield from until('"')), self.closer)

    def _scan_object(self, reader: Reader, name: str, closer: str) -> Scan[None]:
        reader.begin(name)
        yield from until(self.between[1:].rstrip())
        yield from self._scan_arguments(reader, closer)

    def _scan_bare(self, reader: Reader) -> Scan[None]:
        yield from either(_BARE, "{")
        reader.certain()
        yield from self._scan_object(reader, (yield from one_of(reader.tools, '"')), "}")
        if self.separator.strip():
            yield from either([self.separator + "{"])
            yield from self._scan_calls(reader)


# Parameters that are tagged one by one, text as it is and everything else in JSON

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

    def _inside(self, call: Call, number: int) -> str:
        del number
        return f"{call.name}{self.after_name}" + "".join(
            f"{self.key}{name}{self.after_key}{self.before_value}{_as_text(given)}{self.after_value}"
            for name, given in call.arguments.items()
        )

    def _rule(self, rules: Rules, tool: ToolSpec) -> str:
        parameters, is_open = parameters_of(tool.parameters)
        parts = [_as_json(tool.name), rules.marker(self.after_name)]
        for one in parameters:
            rule = rules.named(f"{self._key(rules, json.dumps(one.name))} {self._value(rules, tool, one)}")
            parts.append(rule if one.is_required else f"{rule}?")
        if is_open:
            anything = self._value(rules, tool, Parameter("", False, ANYTHING, None, {}))
            unnamed = rules.named(f"{self._key(rules, '/[a-zA-Z_][a-zA-Z0-9_]*/')} {anything}")
            parts.append(f"{unnamed}{{0,{_MAX_UNNAMED}}}")
        return " ".join([*parts, rules.marker(self.closer)])

    def _key(self, rules: Rules, name: str) -> str:
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
        reader.begin(name)
        known = parameters_of(reader.tools[name].parameters)[0] if name in reader.tools else []
        types = {one.name: one.types for one in known}
        count = 0
        while not (yield from either([self.key, self.closer], read)):
            key, read = (yield from until(self.after_key.strip())).strip(), ""
            reader.arguments(f"{', ' if count else '{'}{_as_json(key)}: ")
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
            yield from text_up_to(before, tag, lambda text: reader.arguments(_as_json(text)[1:-1]), read)
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
        reader.arguments(_typed("".join(texts), types))


def _as_text(given: Any) -> str:
    return given if isinstance(given, str) else _as_json(given)


def _typed(text: str, types: Set[str]) -> str:
    """A value that is JSON of one of the types as it is, and any other as a string."""
    try:
        is_json = json_type(parse_json(text)) in types - {"string"}
    except ValueError:
        is_json = False
    return text.strip() if is_json else _as_json(text)


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
    left_out = tuple(sorted(_restrictions(schema)))
    if types != {"string"} or not isinstance(schema, Mapping):
        return "(?s:.*)", left_out
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if all(bound == "" or (isinstance(bound, int) and 0 <= bound <= _MAX_LENGTH) for bound in (least, most)):
        others = tuple(key for key in left_out if key not in ("minLength", "maxLength"))
        return f"(?s:.{{{least},{most}}})", others
    return "(?s:.*)", left_out


def _restrictions(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    parts = [part for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list) for part in schema[key]]
    return (schema.keys() - _NO_RESTRICTIONS).union(*map(_restrictions, parts))


# All that are known

JSON = Objects(name="json", separator="\n", is_bare=True)
"""What a model that knows no tools is asked for."""

SYNTAXES: tuple[CallSyntax, ...] = (
    Tagged(
        name="qwen3-coder",
        opener="<tool_call>\n<function=",
        after_name=">\n",
        key="<parameter=",
        after_key=">",
        before_value="\n",
        after_value="\n</parameter>\n",
        closer="</function>\n</tool_call>",
        separator="\n",
    ),
    Tagged(
        name="seed-oss",
        opener="<seed:tool_call>\n<function=",
        after_name=">\n",
        key="<parameter=",
        after_key=">",
        after_value="</parameter>\n",
        closer="</function>\n</seed:tool_call>",
        separator="\n",
    ),
    Tagged(
        name="minimax-m2",
        section=("<minimax:tool_call>\n", "</minimax:tool_call>"),
        opener='<invoke name="',
        after_name='">\n',
        key='<parameter name="',
        after_key='">',
        after_value="</parameter>\n",
        closer="</invoke>\n",
    ),
    Tagged(
        name="minicpm5",
        opener='<function name="',
        after_name='">',
        key='<param name="',
        after_key='">',
        after_value="</param>",
        closer="</function>",
        separator="\n",
    ),
    Tagged(
        name="glm-4.6",
        opener="<tool_call>",
        after_name="\n",
        key="<arg_key>",
        after_key="</arg_key>",
        before_value="\n<arg_value>",
        after_value="</arg_value>\n",
        closer="</tool_call>",
        separator="\n",
    ),
    Tagged(
        name="glm-4.7",
        opener="<tool_call>",
        key="<arg_key>",
        after_key="</arg_key>",
        before_value="<arg_value>",
        after_value="</arg_value>",
        closer="</tool_call>",
    ),
    Named(
        name="deepseek-v3.1",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        opener="<｜tool▁call▁begin｜>",
        between="<｜tool▁sep｜>",
        closer="<｜tool▁call▁end｜>",
    ),
    Named(
        name="deepseek-r1",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        opener="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        between="\n```json\n",
        closer="\n```<｜tool▁call▁end｜>",
        separator="\n",
    ),
    Named(
        name="kimi-k2",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        opener="<|tool_call_begin|>functions.",
        between=f":{NUMBER}<|tool_call_argument_begin|>",
        closer="<|tool_call_end|>",
    ),
    Named(name="functionary", opener="<function=", between=">", closer="</function>"),
    Objects(
        name="command-r7b",
        section=("<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>"),
        head=f'{{"tool_call_id": "{NUMBER}", "tool_name": "',
        between='", "parameters": ',
        separator=",\n    ",
    ),
    Objects(name="nemotron", section=("<TOOLCALL>[", "]</TOOLCALL>"), separator=", "),
    Objects(name="apriel", section=("<tool_calls>[", "]</tool_calls>"), separator=", "),
    Objects(name="minimax-m1", section=("<tool_calls>\n", "\n</tool_calls>"), separator="\n"),
    Objects(name="gigachat", opener="<|function_call|>"),
    Objects(name="granite-3", section=("<|tool_call|>[", "]"), separator=", "),
    Named(name="mistral", opener="[TOOL_CALLS]", between=f"[CALL_ID]{ID}[ARGS]"),
    Named(name="mistral", opener="[TOOL_CALLS]", between="[ARGS]"),
    # Tokenizers of the older models put a blank after the marker.
    Objects(name="mistral", section=(f"[TOOL_CALLS]{BLANK}[", "]"), separator=", "),
    Objects(
        name="hermes",
        opener="<tool_call>\n",
        closer="}\n</tool_call>",
        separator="\n",
        is_bare=True,
    ),
    Objects(
        name="llama3",
        between='", "parameters": ',
        separator="; ",
        tag="<|python_tag|>",
        is_bare=True,
        signs=(("<|python_tag|>",), ("<|start_header_id|>", '"parameters"')),
    ),
)
"""The first that takes a template holds."""


def syntax_of(source: str, rendered: str) -> CallSyntax | None:
    """How a template with this source writes calls, by what it made of the call `PROBE` ("": it cannot
    write calls, and may mention how the model does); None where that is not known."""
    return next((syntax for syntax in SYNTAXES if syntax.is_of(source, rendered)), None)
