"""How chat formats write tool calls: as grammars that demand them, and as scans that read them."""

from __future__ import annotations

from outrider.formats.syntaxes.base import PROBE, CallSyntax, Named
from outrider.formats.syntaxes.objects import Mistral, Objects
from outrider.formats.syntaxes.tagged import Tagged

__all__ = ["JSON", "PROBE", "SYNTAXES", "CallSyntax", "Mistral", "syntax_of"]

JSON = Objects(name="json", comma="\n", is_bare=True)
"""What a model that knows no tools is asked for."""

SYNTAXES: tuple[CallSyntax, ...] = (
    # A name and parameters with tags.
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
    # A name and arguments in JSON.
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
        between=":{number}<|tool_call_argument_begin|>",
        closer="<|tool_call_end|>",
    ),
    Named(name="functionary", opener="<function=", between=">", closer="</function>"),
    # JSON objects.
    Objects(
        name="command-r7b",
        opener="<|START_ACTION|>",
        begin="[\n    ",
        head='{"tool_call_id": "{number}", "tool_name": ',
        key="parameters",
        comma=",\n    ",
        end="\n]",
        closer="<|END_ACTION|>",
    ),
    Objects(name="nemotron", opener="<TOOLCALL>", begin="[", end="]", closer="</TOOLCALL>"),
    Objects(name="apriel", opener="<tool_calls>", begin="[", end="]", closer="</tool_calls>"),
    Objects(
        name="minimax-m1", opener="<tool_calls>", begin="\n", comma="\n", end="\n", closer="</tool_calls>"
    ),
    Objects(name="gigachat", opener="<|function_call|>", comma="<|function_call|>"),
    Objects(name="granite-3", opener="<|tool_call|>", begin="[", end="]"),
    Mistral(marks=("[CALL_ID]", "[ARGS]")),
    Mistral(marks=("[ARGS]",)),
    Mistral(),
    Objects(
        name="hermes",
        opener="<tool_call>\n",
        comma="\n</tool_call>\n<tool_call>\n",
        closer="\n</tool_call>",
        separator="\n",
        is_bare=True,
    ),
    Objects(
        name="llama3",
        key="parameters",
        comma="; ",
        tag="<|python_tag|>",
        is_bare=True,
        signs=(("<|python_tag|>",), ("<|start_header_id|>", '"parameters"')),
    ),
)
"""All that are known; the first that takes a template holds."""


def syntax_of(source: str, rendered: str) -> CallSyntax | None:
    """How a template with this source writes calls, by what it made of the call `PROBE` ("": it cannot
    write calls, and may mention how the model does); None where that is not known."""
    return next((syntax for syntax in SYNTAXES if syntax.is_of(source, rendered)), None)
