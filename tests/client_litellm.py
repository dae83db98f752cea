"""litellm against `outrider serve`, in a process of its own: its import warns, and takes seconds.

`client_litellm.py URL MODEL TEXT` runs all cases and prints {name: null, or what went wrong} as JSON; the
key is in the environment. TEXT is what the engine says to `alphabet`. No case may ask another host than
this one.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import socket
import sys
import traceback
from typing import Any

import jsonschema

_lookup = socket.getaddrinfo
_reached: list[str] = []


def _only_here(host: Any, *rest: Any, **more: Any) -> Any:
    if host not in ("127.0.0.1", b"127.0.0.1"):
        _reached.append(str(host))
        raise OSError(f"{host} is not to be asked")
    return _lookup(host, *rest, **more)


socket.getaddrinfo = _only_here

import litellm  # noqa: E402 - after the guard: it fetches prices when it is imported, unless told not to

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 18, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "keep", "description": "Keeps.", "parameters": PERSON}}]


def asked(content: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    common = {"model": f"openai/{sys.argv[2]}", "api_base": f"{sys.argv[1]}/v1", "temperature": 0}
    return {**common, "num_retries": 0, "messages": messages, "max_tokens": 24, **more}


def complete(**request: Any) -> Any:
    return litellm.completion(**request)


def alphabet(**more: Any) -> Any:
    return complete(**asked("Write the alphabet in small letters.", **more))


def check_a_chat() -> None:
    answer = alphabet()
    assert answer.choices[0].message.content == sys.argv[3]
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens == 24
    assert answer.outrider["generated_tokens"] == 24


def check_a_stream_says_what_the_whole_answer_says() -> None:
    chunks = list(alphabet(stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == alphabet().choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 24
    built: Any = litellm.stream_chunk_builder(chunks)
    assert built.choices[0].message.content == text


def by_another_protocol(provider: str, **more: Any) -> Any:
    """The same question, in the protocol of a provider."""
    address = {"model": f"{provider}/{sys.argv[2]}", "api_base": sys.argv[1]}
    return alphabet(**address | {"api_key": os.environ["OPENAI_API_KEY"]} | more)


_SURE = len("The alphabet in small letters is: a")
"""So far the text does not depend on rounding, in which calls differ by how much of a prompt they read."""


def check_other_protocols_say_the_same() -> None:
    for provider in ("ollama_chat", "ollama", "anthropic"):
        answer = by_another_protocol(provider)
        assert answer.choices[0].message.content[:_SURE] == sys.argv[3][:_SURE], (provider, answer)
        assert answer.usage.completion_tokens == 24, provider
        chunks = by_another_protocol(provider, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text[:_SURE] == sys.argv[3][:_SURE], (provider, text)


def check_other_protocols_fit_a_schema_and_call() -> None:
    format_ = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    answer = by_another_protocol("ollama_chat", response_format=format_, max_tokens=64)
    jsonschema.validate(json.loads(answer.choices[0].message.content), PERSON)
    asked = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 64, "parallel_tool_calls": False}
    [call] = by_another_protocol("anthropic", **asked).choices[0].message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), PERSON)


def check_several_at_once() -> None:
    async def ask_all() -> list[Any]:
        one = asked("Write the alphabet in small letters.", max_tokens=8)
        return await asyncio.gather(*(litellm.acompletion(**one) for _ in range(3)))

    answers = asyncio.run(ask_all())
    assert len({answer.choices[0].message.content for answer in answers}) == 1


def check_a_schema() -> None:
    format_ = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    answer = complete(**asked("Describe a person.", response_format=format_, max_tokens=64))
    jsonschema.validate(json.loads(answer.choices[0].message.content), PERSON)


def check_a_tool() -> None:
    settings: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 64}
    question = asked("Keep Ann, who is 30.", parallel_tool_calls=False, **settings)
    message = complete(**question).choices[0].message
    [call] = message.tool_calls
    assert call.function.name == "keep"
    jsonschema.validate(json.loads(call.function.arguments), PERSON)
    result = {"role": "tool", "tool_call_id": call.id, "content": "kept"}
    turns = [*question["messages"], message, result]
    answer = complete(**question | {"messages": turns, "tool_choice": "none", "max_tokens": 8})
    assert answer.choices[0].message.content
    streamed: Any = litellm.stream_chunk_builder(list(complete(**question, stream=True)))
    assert streamed.choices[0].message.tool_calls[0].function.arguments == call.function.arguments


def check_errors_are_of_its_classes() -> None:
    for wrong, expected in (
        ({"model": "openai/gpt-9"}, litellm.exceptions.NotFoundError),
        ({"extra_body": {"top_q": 1}}, litellm.exceptions.BadRequestError),
        ({"api_key": "a-key-that-nobody-was-given"}, litellm.exceptions.AuthenticationError),
    ):
        try:
            alphabet(**wrong)
        except expected:
            continue
        raise AssertionError(f"{wrong} raised nothing")
    for provider, kind in (("anthropic", "AuthenticationError"), ("ollama_chat", "APIConnectionError")):
        try:
            by_another_protocol(provider, api_key="a-key-that-nobody-was-given")
        except getattr(litellm.exceptions, kind):
            continue
        raise AssertionError(f"{provider} raised nothing")
    long = "word " * 2000
    try:
        complete(**asked(long))
    except litellm.exceptions.ContextWindowExceededError:
        pass
    else:
        raise AssertionError("a prompt that is too long raised nothing")


def check_nobody_else_was_asked() -> None:
    assert _reached == [], _reached


def main() -> None:
    os.environ["OLLAMA_API_BASE"] = sys.argv[1]  # where it looks what a model can, whatever `api_base` says
    checks = [
        made for name, made in globals().items() if name.startswith("check_") and inspect.isfunction(made)
    ]
    outcomes: dict[str, str | None] = {}
    for check in checks:
        try:
            check()
            outcomes[check.__name__.removeprefix("check_")] = None
        except Exception:
            outcomes[check.__name__.removeprefix("check_")] = traceback.format_exc()
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
