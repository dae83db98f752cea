"""How chat formats write tool calls: as grammars that demand them, and as patterns that read them. From its
beginning on the grammar holds a call to its syntax: what that lets through is read, and nothing else."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from outrider.constraints.json_schema import ANYTHING, Document, json_type
from outrider.core.files import parse_json
from outrider.formats.grammar import (
    BLANK,
    ID,
    MARKER,
    NUMBER,
    Call,
    Rules,
    ToolSpec,
    repeated,
    split_trigger,
)

PROBE = Call("probe_tool", {"probe_key": "probe value"})
"""What templates are tried with."""
Types = Mapping[str, Mapping[str, Set[str]]]
"""JSON types of the parameters of tools, by their names"""
Begun = Literal["no", "perhaps", "certain", "yes"]


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

    def begun(self, text: str, tools: Types, *, is_line_start: bool) -> Begun:
        """Whether a text, which comes at the start of a line or not, begins calls: "yes" where it is all
        before what `read` is given (or the beginning of that, if it is JSON), "certain" where nothing else
        could come of it."""
        del tools, is_line_start
        return _compared(text, self._trigger[0])

    def read(self, text: str, tools: Types) -> list[tuple[str, str]]:
        """The names of calls, and their arguments as far as they have come."""
        found: list[tuple[str, str]] = []
        following = self._first.match(text)
        while following and (call := self._read_call(text, following.end(), tools)):
            name, arguments, end = call
            found.append((name, arguments))
            following = None if end is None else self._next.match(text, end)
        return found

    def types(self, tool: ToolSpec) -> Mapping[str, Set[str]]:
        """What `read` has to know of a tool."""
        del tool
        return {}

    @cached_property
    def _first(self) -> re.Pattern[str]:
        return re.compile(_pattern(self._trigger[1]) + r"\s*")

    @cached_property
    def _next(self) -> re.Pattern[str]:
        return re.compile(rf"\s*{_pattern(self.separator + self.opener)}\s*")

    @abstractmethod
    def _read_call(self, text: str, at: int, tools: Types) -> tuple[str, str, int | None] | None:
        """The name of the call there, its arguments so far, and where it ends, if it does. None where its
        name is not complete."""

    @abstractmethod
    def _inside(self, call: Call, number: int) -> str:
        """What is written between head and closer."""

    @abstractmethod
    def _rule(self, rules: Rules, tool: ToolSpec) -> str:
        """The part of a grammar for a call of this tool, after the opener, closer included."""


def _compared(text: str, start: str) -> Begun:
    if not start.startswith(text):
        return "no"
    return "yes" if text == start else "perhaps"


def _filled(text: str, number: int = 0) -> str:
    return text.replace(NUMBER, str(number)).replace(ID, "probe1234").replace(BLANK, "")


def _as_json(given: object) -> str:
    return json.dumps(given, ensure_ascii=False)


_PATTERNS = {NUMBER: "[0-9]+", ID: "[a-zA-Z0-9]+", BLANK: r"\s*"}
_DECODER = json.JSONDecoder(strict=False)


def _pattern(text: str) -> str:
    """A regular expression of a text, placeholders included. White space does not matter."""
    parts = re.split(rf"({'|'.join(map(re.escape, _PATTERNS))}|\s+)", text)
    return "".join(_PATTERNS.get(part, r"\s*" if part.isspace() else re.escape(part)) for part in parts)


def _value(text: str, at: int) -> tuple[str, int | None]:
    """The JSON there as far as it has come, and where it ends, if it does."""
    try:
        _, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return text[at:], None
    return text[at:end], end


# Names, and arguments in JSON


@dataclass(frozen=True, kw_only=True)
class Named(CallSyntax):
    """A name, `between`, and the arguments in JSON."""

    between: str

    def _inside(self, call: Call, number: int) -> str:
        return f"{call.name}{_filled(self.between, number)}{_as_json(call.arguments)}"

    def _rule(self, rules: Rules, tool: ToolSpec) -> str:
        head = f"{rules.marker(self.head)} {_as_json(tool.name)} {rules.marker(self.between)}"
        return f"{head} {rules.arguments(tool)} {rules.marker(self.closer)}"

    @cached_property
    def _parts(self) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
        """Up to the end of the name, from there to the arguments, and after them."""
        name = re.compile(rf"{_pattern(self.head)}(?P<name>.+?){_pattern(self.between)}", re.DOTALL)
        return name, re.compile(r"\s*"), re.compile(rf"\s*{_pattern(self.closer)}")

    def _read_call(self, text: str, at: int, tools: Types) -> tuple[str, str, int | None] | None:
        del tools
        before, between, after = self._parts
        if (named := before.match(text, at)) is None:
            return None
        name, begins = named["name"].strip(), between.match(text, named.end())
        if begins is None or not text.startswith("{", begins.end()):
            return name, "", None
        arguments, end = _value(text, begins.end())
        closed = None if end is None else after.match(text, end)
        return name, arguments, closed and closed.end()


_TYPE = r'("type"\s*:\s*"function"\s*,\s*)?'
_TO_THE_NAME = rf'/((?s:.*)\n)?[ \t]*\{{\s*{_TYPE}"name"\s*:\s*/'
_BARE = ('{"name":"', '{"type":"function","name":"')
_HEAD_OF_BARE = rf'\{{\s*{_TYPE.replace("(", "(?:", 1)}"name"\s*:\s*"'


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

    def begun(self, text: str, tools: Types, *, is_line_start: bool) -> Begun:
        if self.is_bare and is_line_start and text[0] == "{":
            whole = "".join(text.split())
            calls = [f'{bare}{name}"' for bare in _BARE for name in tools]
            if any(call.startswith(whole) for call in calls):
                is_certain = any(whole.startswith(bare) for bare in _BARE)
                return "yes" if whole in calls else "certain" if is_certain else "perhaps"
        return _compared(text, self.tag or self._trigger[0])

    @cached_property
    def _parts(self) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
        head, closer = _pattern(self.head), _pattern(self.closer)
        if self.is_bare:
            head, closer = _HEAD_OF_BARE, rf"(?:{closer}|\}})"
        between = re.compile(_pattern(self.between[1:]) + r"\s*")
        return re.compile(rf'{head}(?P<name>[^"]+)"'), between, re.compile(rf"\s*{closer}")

    @cached_property
    def _next(self) -> re.Pattern[str]:
        opener = f"(?:{_pattern(self.opener)})?" if self.is_bare else _pattern(self.opener)
        return re.compile(rf"\s*{_pattern(self.separator)}\s*{opener}\s*")


# Parameters that are tagged one by one, text as it is and everything else in JSON

_MAX_UNNAMED = 16
"""Parameters that no schema names, of one call."""


@dataclass(frozen=True, kw_only=True)
class Tagged(CallSyntax):
    """A name, `after_name`, and parameters; `frame` is before the name of each, between it and the value, and
    after that. A value of type string is text as it is; other values are JSON. One that may be either is
    text, and JSON where it can be read so."""

    frame: tuple[str, str, str]
    after_name: str = ""

    def _inside(self, call: Call, number: int) -> str:
        del number
        before, between, after = self.frame
        return f"{call.name}{self.after_name}" + "".join(
            f"{before}{name}{between}{_as_text(given)}{after}" for name, given in call.arguments.items()
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
        return f"{rules.marker(self.frame[0])} {name} {rules.marker(self.frame[1])}"

    def _value(self, rules: Rules, tool: ToolSpec, one: Parameter) -> str:
        """A value and what follows it."""
        if "string" not in one.types:
            return f"{rules.value(tool, one.schema, one.name)} {rules.marker(self.frame[2])}"
        if one.values:
            texts = [json.dumps(_as_text(value)) for value in one.values]
            return f"{rules.choice(texts)} {rules.marker(self.frame[2])}"
        pattern, left_out = text_pattern(one.schema, one.types)
        rules.leave_out(tool, one.name, left_out)
        before, tag, after = self._end
        optional = "\\n?" if before else ""
        return f"{rules.text_up_to(f'/{pattern}{optional}/', tag)} {rules.marker(after)}"

    @property
    def _end(self) -> tuple[str, str, str]:
        """The white space before the tag that ends a value, the tag, and the white space after it."""
        tag = self.frame[2].strip()
        before, _, after = self.frame[2].partition(tag)
        return before, tag, after

    def types(self, tool: ToolSpec) -> Mapping[str, Set[str]]:
        return {one.name: one.types for one in parameters_of(tool.parameters)[0]}

    @cached_property
    def _parts(self) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
        """A name, a parameter up to its value, and the end of a call."""
        opener, between, _ = self.frame
        ends = re.escape(opener[0] + self.closer[0])
        named = rf"(?P<name>[^\s{ends}]+)(?=[\s{ends}])"
        if end := self.after_name.strip():
            named = rf"(?P<name>.+?){_pattern(end)}"
        value = _pattern(between.removesuffix("\n")) + "\n?" * between.endswith("\n")
        key = rf"\s*{_pattern(opener)}(?P<key>.*?){value}"
        patterns = (named, key, rf"\s*{_pattern(self.closer)}")
        before, parameter, closer = (re.compile(pattern, re.DOTALL) for pattern in patterns)
        return before, parameter, closer

    def _read_call(self, text: str, at: int, tools: Types) -> tuple[str, str, int | None] | None:
        before, parameter, closer = self._parts
        if (named := before.match(text, at)) is None:
            return None
        name, arguments, end = named["name"].strip(), "", named.end()
        types = tools.get(name, {})
        while begun := parameter.match(text, end):
            key = begun["key"].strip()
            value, after = self._read_value(text, begun.end(), types.get(key, ANYTHING))
            arguments += f"{', ' if arguments else '{'}{_as_json(key)}: {value}"
            if after is None:
                return name, arguments, None
            end = after
        closed = closer.match(text, end)
        return name, (arguments or "{") + "}" if closed else arguments, closed and closed.end()

    def _read_value(self, text: str, at: int, types: Set[str]) -> tuple[str, int | None]:
        """The JSON of a value as far as it has come, and the place after its end."""
        before, tag, _ = self._end
        start = len(text) - len(text[at:].lstrip())
        if "string" not in types and text[start : start + 1] in ("{", "[", '"'):
            value, end = _value(text, start)
            closed = None if end is None else re.compile(rf"\s*{re.escape(tag)}").match(text, end)
            return value, closed and closed.end()
        end = text.find(tag, at)
        is_text = types == {"string"}
        if end >= 0:
            value = text[at:end].removesuffix(before)
            return _as_json(value) if is_text else _typed(value, types), end + len(tag)
        # The end of the text may be the beginning of the tag.
        ends = (before + tag, tag)
        kept = next(i for i in range(at, len(text) + 1) if any(one.startswith(text[i:]) for one in ends))
        return (_as_json(text[at:kept])[:-1] if is_text else ""), None


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
        frame=("<parameter=", ">\n", "\n</parameter>\n"),
        closer="</function>\n</tool_call>",
        separator="\n",
    ),
    Tagged(
        name="seed-oss",
        opener="<seed:tool_call>\n<function=",
        after_name=">\n",
        frame=("<parameter=", ">", "</parameter>\n"),
        closer="</function>\n</seed:tool_call>",
        separator="\n",
    ),
    Tagged(
        name="minimax-m2",
        section=("<minimax:tool_call>\n", "</minimax:tool_call>"),
        opener='<invoke name="',
        after_name='">\n',
        frame=('<parameter name="', '">', "</parameter>\n"),
        closer="</invoke>\n",
    ),
    Tagged(
        name="minicpm5",
        opener='<function name="',
        after_name='">',
        frame=('<param name="', '">', "</param>"),
        closer="</function>",
        separator="\n",
    ),
    Tagged(
        name="glm-4.6",
        opener="<tool_call>",
        after_name="\n",
        frame=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
        closer="</tool_call>",
        separator="\n",
    ),
    Tagged(
        name="glm-4.7",
        opener="<tool_call>",
        frame=("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
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
