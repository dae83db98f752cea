"""The server's answers to one request of every kind, on the tiny exact model.

The model says what the last message has between [[ and ]].
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.testclient import TestClient

from golden.normal import normal
from outrider.server.assembly import assemble
from outrider.server.keys import KeyRing
from outrider.server.models import Models
from outrider.server.service import Service
from outrider.server.settings import ServeSettings
from serving import (
    CALL,
    CHAT,
    CLOCK,
    GENERATE,
    HERMES,
    LLAMA,
    MESSAGES,
    OLLAMA,
    RESPONSES,
    SCHEMA,
    TEMPLATE,
    TEXT,
    THINKING,
    TOOLS,
    WEATHER,
    tiny_session,
    user,
)

__all__ = ["ASKS", "answers", "serve"]

REPEATING = "one two three one two three one two three one two three"
FLAT_TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}

SERVERS: dict[str, dict[str, Any]] = {
    "plain": {"alias": "tiny-model"},
    "several": {},
    "tools": {"template": HERMES},
    "thinking": {"template": THINKING},
}


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: to which server, how, and with what body (plain data, or bytes as they are)."""

    path: str
    body: Any = None
    server: str = "plain"
    method: str = "POST"


@contextmanager
def serve(*, template: str | None = TEMPLATE, **settings: Any) -> Iterator[TestClient]:
    """A client of the whole server, as `outrider serve` puts it together; `settings` are the server's."""
    with tiny_session(template=template) as (session, _model):
        service = Service(session, ServeSettings(**settings))
        app = assemble(Models.of(service), service.settings, KeyRing([]))
        service.start()
        try:
            yield TestClient(app, base_url="http://127.0.0.1:8080", raise_server_exceptions=False)
        finally:
            service.close()


def answers() -> Any:
    """Status and body of every answer, in order: servers remember earlier texts."""
    found = {}
    with ExitStack() as stack:
        clients: dict[str, TestClient] = {}
        for name, ask in ASKS.items():
            if ask.server not in clients:
                clients[ask.server] = stack.enter_context(serve(**SERVERS[ask.server]))
            found[name] = _answer(clients[ask.server], ask)
    return found


def _answer(client: TestClient, ask: Ask) -> dict[str, Any]:
    content = ask.body if isinstance(ask.body, bytes | None) else json.dumps(ask.body)
    headers = {"content-type": "application/json"} if content is not None else {}
    response = client.request(ask.method, ask.path, content=content, headers=headers)
    kind = response.headers.get("content-type", "").partition(";")[0]
    # Which of several choices began first, and so what the others could reuse of it, is chance.
    chance = ("cached_tokens", "reused_prompt_tokens") if ask.server == "several" else _VARY
    body = normal(_body(response.text, kind), *chance)
    return {"status": response.status_code, "type": kind, "body": body}


_VARY = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration", "build_info")


def _body(text: str, kind: str) -> Any:
    """A body as data: a stream as a list, metrics as names with types."""
    if kind == "application/json":
        return json.loads(text)
    if kind == "application/x-ndjson":
        return [json.loads(line) for line in text.splitlines()]
    if kind == "text/event-stream":
        return _stream([_event(block) for block in text.split("\n\n") if block])
    # Metrics: those of the process itself depend on the system.
    types = (line.removeprefix("# TYPE ") for line in text.splitlines() if line.startswith("# TYPE "))
    return sorted(line for line in types if line.startswith("outrider_"))


def _stream(events: list[Any]) -> list[Any]:
    """The events of a stream; those of several choices in the order of these. They run side by side: which
    is told of first, and which brings the account as the last one, is chance."""
    if len({_choice(event) for event in events} - {_LAST}) < 2:
        return events
    accounts = [{"outrider": event.pop("outrider")} for event in events if "outrider" in event]
    return [*sorted(events, key=_choice), *accounts]


_LAST = 1_000


def _choice(event: Any) -> int:
    """The number of the choice that an event is about; those about none of them come last."""
    choices = event.get("choices") if isinstance(event, dict) else None
    return int(choices[0]["index"]) if choices else _LAST


def _event(block: str) -> Any:
    fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
    data = fields.get("data", "")
    event = data if data == "[DONE]" else json.loads(data)
    return {"event": fields["event"], "data": event} if "event" in fields else event


def _chat(said: str, server: str = "plain", **fields: Any) -> Ask:
    return Ask(CHAT, {"messages": user(f"Say [[{said}]]"), "seed": 3, **fields}, server)


def _text(said: str, **fields: Any) -> Ask:
    return Ask(TEXT, {"prompt": f"[[{said}]]|", "seed": 3, **fields})


def _response(asked: Any, server: str = "plain", **fields: Any) -> Ask:
    return Ask(RESPONSES, {"input": asked, "seed": 3, **fields}, server)


def _tools(said: str, **fields: Any) -> Ask:
    return _chat(said, "tools", tools=TOOLS, temperature=0, max_tokens=300, **fields)


def _message(turns: list[Any], **fields: Any) -> Ask:
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    return Ask(MESSAGES, {"messages": turns, "max_tokens": 300, "seed": 3, "tools": tools, **fields}, "tools")


def _llama(said: str, **fields: Any) -> Ask:
    return Ask(LLAMA, {"prompt": f"[[{said}]]|", "seed": 3, "return_tokens": True, **fields})


def _ollama(turns: list[Any], server: str = "tools", **fields: Any) -> Ask:
    return Ask(
        OLLAMA, {"messages": turns, "options": {"temperature": 0, "num_predict": 50}, **fields}, server
    )


def _get(path: str) -> Ask:
    return Ask(path, None, method="GET")


_PREDICTED = "Nothing here repeats, so only the prediction knows it."
_SEEN: dict[str, Any] = {
    "stream": True,
    "stream_options": {"include_usage": True},
    "speculation": {"show_sources": True},
}
_RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "[[Noon.]]"}
_USED = {"type": "tool_use", "id": "1", "name": "weather", "input": {}}
_FORM = {"type": "json_schema", "name": "w", "schema": SCHEMA, "strict": True}

ASKS: dict[str, Ask] = {
    "chat": _chat("Good morning!"),
    "chat, stream with usage and sources": _chat(REPEATING, temperature=0, **_SEEN),
    "chat, stream of two choices": _chat("ab", "several", n=2, stream=True, speculation={"policy": "plain"}),
    "chat, stream of log probabilities": _chat(
        "abé", logprobs=True, top_logprobs=2, temperature=0, stream=True
    ),
    "chat, a prediction": _chat(
        _PREDICTED, temperature=0, prediction={"type": "content", "content": _PREDICTED}
    ),
    "tools, two calls": _tools(f"{CALL}\n{CLOCK}"),
    "tools, stream": _tools(f"Wait. {CALL}", stream=True),
    "reasoning": _chat("Let me see.</think>\n\nFour.", "thinking"),
    "reasoning, stream": _chat("Hm, hm.</think>Four.", "thinking", stream=True),
    "completion, 16 tokens": _text(REPEATING),
    "completion, two prompts and two choices": Ask(
        TEXT, {"prompt": ["[[ab]]|", "[[cd]]|"], "n": 2}, "several"
    ),
    "completion, log probabilities": _text("ab", logprobs=2, temperature=0),
    "completion, stream": _text(REPEATING, max_tokens=100, logprobs=1, temperature=0, **_SEEN),
    "response, items": _response(
        [
            {"role": "user", "content": [{"type": "input_text", "text": "What time?"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {
                "type": "function_call",
                "call_id": "call_1",
                "name": "weather",
                "arguments": "{}",
                "id": "fc_1",
            },
            {"type": "function_call_output", "call_id": "call_1", "output": "[[Noon.]]"},
        ],
        "tools",
        tools=[FLAT_TOOL],
    ),
    "response, a schema": _response(f"[[{WEATHER}]]", text={"format": _FORM}),
    "response, stream of text and a call": _response(
        f"[[Wait. {CALL}]]", "tools", tools=[FLAT_TOOL], stream=True
    ),
    "response, log probabilities": _response(
        "Say [[ab]]", include=["message.output_text.logprobs"], top_logprobs=2, temperature=0
    ),
    "response, reasoning": _response("[[Hm.</think>Four.]]", "thinking", stream=True),
    "message, blocks": _message(
        [
            {"role": "user", "content": "What time?"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, _USED]},
            {"role": "user", "content": [_RESULT]},
        ],
        system=[{"type": "text", "text": "Be brief."}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        stop_sequences=["."],
    ),
    "message, stream of text and a call": _message(user(f"[[Wait. {CALL}]]"), stream=True, temperature=0),
    "llama, probabilities of the next tokens": _llama("one\ntwo", n_predict=5, n_probs=2, temperature=0),
    "llama, stream": _llama("ab", samplers=["top_k"], t_max_predict_ms=60_000, stream=True),
    "llama, properties": _get("/props"),
    "ollama, a result": _ollama(
        [
            {"role": "assistant", "tool_calls": [{"function": {"name": "clock", "arguments": {}}}]},
            {"role": "tool", "tool_name": "clock", "content": "[[Noon.]]"},
        ],
        tools=TOOLS,
        stream=False,
    ),
    "ollama, stream of a thought": _ollama(user("[[Hm.</think>Noon.]]"), "thinking", think=True),
    "ollama, a text": Ask(GENERATE, {"prompt": "[[ab]]", "system": "Be brief.", "seed": 3, "logprobs": True}),
    "ollama, a model": Ask("/api/show", {"model": "tiny:latest", "verbose": True}),
    "ollama, models": _get("/api/tags"),
    "tokenize, messages": Ask("/tokenize", {"messages": user("hi"), "add_special": True}),
    "detokenize": Ask("/detokenize", {"tokens": [97, 256, 98]}),
    "models": _get("/v1/models"),
    "status": _get("/outrider/status"),
    "metrics": _get("/metrics"),
}
