"""Calls in the syntaxes of several models, written by the embedded model through a real server and read by
OpenAI's client: the model knows none of them, so what holds the calls together is the grammar."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai import OpenAI

from real_server import KEY, MODEL, NAME, REASON, real_server
from serving import user
from test_formats_native import TEMPLATES

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not MODEL.exists(), reason=REASON)]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "note": {"type": "string", "maxLength": 12},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather_forecast", "parameters": SCHEMA}}]
NAMED: Any = {"type": "function", "function": {"name": "get_weather_forecast"}}


@pytest.mark.parametrize("name", ["qwen3-coder", "glm-4.6", "deepseek-r1", "kimi-k2", "command-r7b"])
def test_a_call_is_valid_streamed_and_mostly_forced(name: str, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATES[name])
    with (
        real_server(tmp_path, "--chat-template-file", str(template)) as server,
        OpenAI(base_url=server.base_url, api_key=KEY, max_retries=0) as client,
    ):
        # A model that knows the syntax writes forced text in its usual tokens; this one is made to. How
        # far it drafts must not depend on a clock.
        usual = {"speculation": {"fast_forward": "canonical", "policy": "fixed", "max_draft": 16}}
        settings: Any = {
            "model": NAME,
            "temperature": 0,
            "tools": TOOLS,
            "max_tokens": 200,
            "extra_body": usual,
        }
        question: Any = user("How warm will it be in Oslo?")
        whole = client.chat.completions.create(messages=question, tool_choice=NAMED, **settings)
        [call] = whole.choices[0].message.tool_calls or []
        assert call.type == "function"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
        account = whole.model_extra["outrider"] if whole.model_extra else {}
        assert account["target_calls"] <= 0.35 * account["generated_tokens"], account
        arguments = ""
        for chunk in client.chat.completions.create(
            messages=question, tool_choice=NAMED, stream=True, **settings
        ):
            for delta in chunk.choices[0].delta.tool_calls or ():
                arguments += (delta.function and delta.function.arguments) or ""
        assert arguments == call.function.arguments
