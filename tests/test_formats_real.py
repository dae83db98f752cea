"""Formats, conversations and grammars of real models, as far as they lie in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from formats_samples import TOOLS
from outrider.backends.gguf import LoadOptions, Weights
from outrider.constraints import Compiler
from outrider.core.contracts import Vocabulary
from outrider.core.params import FastForward
from outrider.formats import ChatFormat, Named, format_of
from outrider.models import cache_dir
from outrider.models.chat import ChatTemplate
from outrider.models.embedded import EMBEDDED_NAME
from outrider.models.gguf import read_card
from outrider.session.loading import template_of

pytestmark = pytest.mark.slow

MODELS = {
    EMBEDDED_NAME: ("json", '{"name": "get", "arguments": {"text": "a}b"}}'),
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf": (
        "hermes",
        '<tool_call>\n{"name": "get", "arguments": {"text": "a}b"}}\n</tool_call>',
    ),
}

Known = tuple[ChatFormat, ChatTemplate, Vocabulary, str]


@pytest.fixture(scope="module", params=list(MODELS))
def known(request: pytest.FixtureRequest) -> Iterator[Known]:
    path = cache_dir() / "models" / request.param
    if not path.exists():
        pytest.skip(f"{request.param} is not in the cache; tests fetch nothing")
    weights = Weights(path, LoadOptions(threads=1))
    template = template_of(weights, read_card(path).chat_template)
    assert template is not None
    name, call = MODELS[request.param]
    found = format_of(template, weights.vocabulary)
    assert found.name == name and found.visible == ()
    yield found, template, weights.vocabulary, call
    weights.close()


@pytest.mark.parametrize("fast_forward", ["exact", "canonical"])
def test_calls_in_the_models_own_tokens_are_allowed_and_mostly_forced(
    known: Known, fast_forward: FastForward
) -> None:
    found, _, vocabulary, call = known
    compiler = Compiler(vocabulary)
    tokens = vocabulary.tokenize(call, add_special=False)
    grammar = found.grammar(TOOLS, Named("get"), parallel=True, fast_forward=fast_forward)
    assert grammar is not None
    constraint = compiler.compile(grammar).start()
    head = constraint.forced(())
    assert list(head) == tokens[: len(head)] and len(head) >= len(tokens) // 2
    constraint.accept(tokens)
    assert constraint.is_complete
    for choice in ("auto", "required"):
        grammar = found.grammar(TOOLS, choice, parallel=True, fast_forward="off")
        assert grammar is not None
        for text, fits in ((call, True), (call.replace('"a}b"', "7"), False), (f"{call} x", False)):
            spelled = vocabulary.tokenize(text, add_special=False)
            permitted = compiler.compile(grammar).start().permits((), spelled)
            assert (permitted == len(spelled)) is fits


def test_tools_calls_and_results_get_into_the_prompt(known: Known) -> None:
    found, template, _, call = known
    function = {"name": "get", "arguments": '{"text": "a}b"}'}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Keep it."},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "kept"},
    ]
    ready, tools = found.conversation(messages, TOOLS, "auto")
    text = template.render(ready, tools=tools)
    assert "Keeps a note." in text and call in text and text.index(call) < text.index("kept")
    # The prompt of the next turn goes on where the model's own answer ended.
    ready, tools = found.conversation(messages[:1], TOOLS, "auto")
    assert text.startswith(template.render(ready, tools=tools) + call)
