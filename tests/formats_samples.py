"""Chat templates with tools as models bring them, a vocabulary with their markers, and tools."""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from outrider.core.data import AnswerReader, Character, Part
from outrider.formats import ChatFormat, ToolSpec, format_of
from outrider.models.chat import ChatTemplate
from vocabularies import TableVocabulary, Token, bytes_and

WEATHER = ToolSpec(
    "get_weather",
    "The weather in a city.",
    {
        "type": "object",
        "properties": {"city": {"enum": ["Ulm", "Köln"]}, "days": {"type": "integer"}},
        "required": ["city"],
    },
)
NOTE = ToolSpec(
    "get",
    "Keeps a note.",
    {"type": "object", "properties": {"text": {"type": "string", "maxLength": 4}}, "required": ["text"]},
)
TOOLS = [WEATHER, NOTE]

_MESSAGES = "{% for message in messages %}<|{{ message.role }}|>"
_START = "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
_LISTED = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"

HERMES = (
    _LISTED
    + _MESSAGES
    + "{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>\n"
    + '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    + "\n</tool_call>{% endfor %}"
    + _START
)
TEXT_ARGUMENTS = HERMES.replace(" | tojson }}}", " }}}")
THINKING = HERMES + "{% if thinks %}<think>\n{% elif quick %}<think>\n\n</think>\n\n{% endif %}"
LLAMA = (
    "{% if tools %}Answer with {'name': …, \"parameters\": …}.{% for tool in tools %}{{ tool | tojson }}"
    "{% endfor %}{% endif %}{% for message in messages %}"
    "<|start_header_id|>{{ message.role }}<|end_header_id|>"
    "{% if message.tool_calls %}{% if message.tool_calls | length != 1 %}"
    "{{ raise_exception('This model takes single calls.') }}{% endif %}{% set call = message.tool_calls[0] %}"
    '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}<|python_tag|>'
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{% endif %}"
)
_SHORT_IDS = (
    "{% for message in messages %}{% for id in [message.tool_call_id] if message.role == 'tool' %}"
    "{% if id | length != 9 %}{{ raise_exception('Ids have 9 characters.') }}{% endif %}{% endfor %}"
    "{% for call in message.tool_calls or [] %}{% if call.id | length != 9 %}"
    "{{ raise_exception('Ids have 9 characters.') }}{% endif %}{% endfor %}{% endfor %}"
)
MISTRAL = (
    _SHORT_IDS
    + "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    + "{% for message in messages %}{% if message.tool_calls %}[TOOL_CALLS]["
    + "{% for call in message.tool_calls %}"
    + '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, '
    + '"id": "{{ call.id }}"}{{ ", " if not loop.last }}{% endfor %}]</s>'
    + "{% elif message.role == 'tool' %}[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]"
    + "{% else %}[INST]{{ message.content }}[/INST]{% endif %}{% endfor %}"
)
MISTRAL_NAMED = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for message in messages %}{% if message.tool_calls %}{% for call in message.tool_calls %}"
    "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}</s>"
    "{% elif message.role == 'tool' %}[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]"
    "{% else %}[INST]{{ message.content }}[/INST]{% endif %}{% endfor %}{# reasons in [THINK] #}"
)
PLAIN = _MESSAGES + "{{ message.content }}\n" + _START

TEMPLATES = {
    "hermes": HERMES,
    "thinking": THINKING,
    "llama3": LLAMA,
    "mistral": MISTRAL,
    "named": MISTRAL_NAMED,
    "json": PLAIN,
}
CONTROLS = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "[THINK]", "[/THINK]", "<end>")


def vocabulary_with(*controls: str) -> TableVocabulary:
    """Every byte, some words, and control tokens; the one called <end> ends a text."""
    words = bytes_and('{"', "name", '": ', '", "', "get", "_we", "<tool_call>", "\n\n")
    return TableVocabulary(
        [*words, *(Token(name.encode(), control=True, end=name == "<end>") for name in controls)]
    )


VOCABULARY = vocabulary_with(*CONTROLS)


def template(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES.get(name, name), bos="<s>", eos="</s>")


def chat_format(name: str) -> ChatFormat:
    return format_of(template(name), VOCABULARY)


def merged(parts: Iterable[Part]) -> list[tuple[str, int, str]]:
    """Kind, call and text of the parts that are shown, those of one kind joined."""
    flat = [(part.kind, part.call, part.name or part.text) for part in parts if part.name or part.text]
    return [
        (*key, "".join(text for *_, text in group)) for key, group in groupby(flat, lambda plain: plain[:2])
    ]


def characters(*texts: str) -> list[Character]:
    """Texts as of a token each."""
    return [Character(text, (place,)) for place, text in enumerate(texts)]


class Read:
    """What a reader made of texts, all in all."""

    def __init__(self, reader: AnswerReader, *texts: str) -> None:
        self.parts = [part for one in characters(*texts) for part in reader.push(one)] + reader.end()
        self.content = self._joined("content")
        self.reasoning = self._joined("reasoning")
        names = [(part.call, part.name) for part in self.parts if part.name]
        assert [call for call, _ in names] == list(range(len(names)))
        self.calls = [(name, self._joined("call", call)) for call, name in names]

    def _joined(self, kind: str, call: int = -1) -> str:
        return "".join(part.text for part in self.parts if (part.kind, part.call) == (kind, call))


def read(name: str, *texts: str, **given: Any) -> Read:
    """What the format's reader makes of texts; `given` are further arguments of it."""
    return Read(chat_format(name).reader(TOOLS, **given), *texts)
