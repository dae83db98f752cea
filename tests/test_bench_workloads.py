"""Workloads: every shape of prompt file, the server's own log, and the prompts that come with the program."""

import asyncio
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grammars import COMPILER
from outrider.core.data import Grammar
from outrider.core.errors import PromptError
from outrider.lab.prompts import Workload
from outrider.lab.workloads import BUILT_IN, load_workload
from outrider.server.logs import RequestLog, log_to_stderr

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}


def read(folder: Path, *lines: Any, suffix: str = "", **settings: Any) -> Workload:
    path = folder / "mine.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return load_workload(f"{path}{suffix}", **settings)


def refusal(folder: Path, *lines: Any, **settings: Any) -> PromptError:
    with pytest.raises(PromptError) as caught:
        read(folder, *lines, **settings)
    assert caught.value.way_out and "\n" not in str(caught.value)
    return caught.value


# Files


def test_spec_bench_as_it_is(tmp_path: Path) -> None:
    lines = [
        {
            "question_id": 81,
            "category": "writing",
            "turns": ["Write.", "Rewrite.", "Again."],
            "reference": [],
        },
        {"id": 82, "category": "coding", "turns": ["Code."]},
    ]
    workload = read(tmp_path, *lines, max_tokens=64, temperature=0.7, seed=5)
    first, second = workload.prompts
    assert (first.id, second.id) == ("81", "82") and second.follow_ups == ()
    assert first.messages == ({"role": "user", "content": "Write."},)
    assert first.follow_ups == ("Rewrite.", "Again.") and first.max_tokens is None
    assert (workload.name, workload.max_tokens, workload.source) == ("mine", 64, str(tmp_path / "mine.jsonl"))
    assert (workload.sampling.temperature, workload.sampling.seed) == (0.7, 5)


def test_categories_by_the_name_of_the_file_or_by_a_field(tmp_path: Path) -> None:
    lines = [{"id": i, "category": "abc"[i % 3], "turns": ["x"]} for i in range(9)]
    by_name = read(tmp_path, *lines, suffix="#b")
    assert [prompt.id for prompt in by_name.prompts] == ["1", "4", "7"] and by_name.name == "mine b"
    both = read(tmp_path, *lines, suffix="#b,c")
    assert [prompt.id for prompt in both.prompts] == ["1", "2", "4", "5", "7", "8"]
    missing = refusal(tmp_path, *lines, suffix="#d")
    assert "no category 'd'" in missing.why and missing.way_out == "It has: a, b, c."
    hashed = tmp_path / "odd#b"
    hashed.write_text('{"prompt": "x"}')
    assert len(load_workload(str(hashed)).prompts) == 1


def test_chat_requests(tmp_path: Path) -> None:
    messages = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
        },
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "seen"},
    ]
    line = {"id": "x", "messages": messages, "tools": [TOOL], "max_tokens": 9, "model": "any", "stream": True}
    (prompt,) = read(tmp_path, line).prompts
    assert prompt.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "seen", "tool_call_id": "c1"},
    )
    assert prompt.tools == (TOOL,) and prompt.max_tokens == 9 and prompt.grammar is None


def test_what_limits_an_answer_is_what_the_server_makes_of_it(tmp_path: Path) -> None:
    schema = json.dumps(SCHEMA)
    lenient = {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": False}}
    for fields, grammar in (
        ({"response_format": FORMAT}, Grammar("json_schema", schema)),
        ({"response_format": lenient}, Grammar("json_schema", schema, lenient=True)),
        ({"response_format": {"type": "json_object"}}, Grammar("json_schema", '{"type": "object"}')),
        ({"response_format": {"type": "text"}}, None),
        ({"json_schema": SCHEMA}, Grammar("json_schema", schema)),
        ({"grammar": 'root ::= "a"'}, Grammar("gbnf", 'root ::= "a"')),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar("choice", '["a", "b"]')),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
    ):
        (prompt,) = read(tmp_path, {"prompt": "x", **fields}).prompts
        assert prompt.grammar == grammar, fields


def test_ids_are_made_different(tmp_path: Path) -> None:
    lines = [{"id": name, "prompt": "x"} for name in ("a", "a", "a.2", "a")]
    assert [prompt.id for prompt in read(tmp_path, *lines).prompts] == ["a", "a.2", "a.2.2", "a.3"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{'prompt': 1}", "it is not a JSON object"),
        ("[1]", "it is not a JSON object"),
        ({"question": "x", "answer": "y"}, "it holds no prompt but 'question', 'answer'"),
        ({"prompt": ["x"]}, "prompt: it has to be text"),
        ({"turns": []}, "turns: it has to be an array with at least 1 item"),
        ({"messages": []}, "messages: it has to be an array with at least 1 item"),
        (
            {"messages": [{"role": "bot", "content": "x"}]},
            'messages[1].role: it has to be "system", "developer", "user"',
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[1].content: it has to be text",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
            "messages[1].tool_calls[1].function: it is missing",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "tools": [{}]},
            "tools[1].function: it is missing",
        ),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens: it has to be 1 or more"),
        ({"prompt": "x", "response_format": {"type": "xml"}}, "response_format: it has to be "),
        ({"prompt": "x", "respone_format": FORMAT}, "it has no use for 'respone_format'"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, line: Any, why: str) -> None:
    error = refusal(tmp_path, {"prompt": "fine"}, "", line)
    assert error.what == f"{tmp_path / 'mine.jsonl'}, line 3" and why in error.why


def test_files_that_hold_nothing(tmp_path: Path) -> None:
    assert "it holds no prompts" in refusal(tmp_path, "").why
    for path, why in ((tmp_path / "none.jsonl", "no such file"), (tmp_path, "is a directory")):
        with pytest.raises(PromptError, match=why):
            load_workload(str(path))


# Recorded traffic


class Traffic:
    """Requests that go through the server's own log."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def log(self, path: str, body: Any, *, status: int = 200, bodies: bool = True) -> str:
        """The line that the server logs of a request."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": path, "headers": []}
        scope["route"] = SimpleNamespace(path=path)

        async def app(_scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": data}

        async def send(_message: Any) -> None: ...

        self._capture.readouterr()
        log_to_stderr(as_json=True)
        asyncio.run(RequestLog(app, bodies=bodies)(scope, receive, send))
        return self._capture.readouterr().err.strip()


@pytest.fixture
def traffic(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Traffic:
    for name in ("outrider", "uvicorn", "asyncio"):
        logger = logging.getLogger(name)
        for attribute in ("handlers", "level", "propagate"):
            monkeypatch.setattr(logger, attribute, getattr(logger, attribute))
    return Traffic(capsys)


def test_a_servers_log_is_asked_again(tmp_path: Path, traffic: Traffic) -> None:
    user = {"role": "user", "content": "Hi"}
    chat = {"messages": [user], "tools": [TOOL], "max_completion_tokens": 20, "temperature": 1.0}
    silent = {"messages": [user], "tools": [TOOL], "tool_choice": "none", "response_format": FORMAT}
    lines = [
        "llama.cpp says something",
        '{"time": "t", "level": "info", "event": "started"}',
        traffic.log("/v1/chat/completions", chat),
        traffic.log("/v1/chat/completions", silent),
        traffic.log("/v1/chat/completions", chat, status=400),
        traffic.log("/v1/completions", {"prompt": ["Once", "Twice"], "max_tokens": 8}),
        traffic.log("/v1/responses", {"input": "Hi"}),
        traffic.log("/v1/tokens", {"text": "x"}),
    ]
    workload = read(tmp_path, *lines, max_tokens=100)
    called, quiet, once, twice = workload.prompts
    assert called.messages == (user,) and called.tools == (TOOL,) and called.max_tokens == 20
    assert quiet.tools == () and quiet.grammar == Grammar("json_schema", json.dumps(SCHEMA))
    assert (once.messages, twice.messages, twice.max_tokens) == ("Once", "Twice", 8)
    assert len({prompt.id for prompt in workload.prompts}) == 4
    assert workload.sampling.temperature == 0
    assert "(1 skipped: it was asked of /v1/responses)" in workload.source


def test_requests_that_cannot_be_asked_again_are_counted(tmp_path: Path, traffic: Traffic) -> None:
    long = json.dumps({"messages": [{"role": "user", "content": "x" * 70_000}]}).encode()
    tokens = traffic.log("/v1/completions", {"prompt": [1, 2, 3]})
    fine = traffic.log("/v1/completions", {"prompt": "Once"})
    workload = read(tmp_path, traffic.log("/v1/chat/completions", long), tokens, tokens, fine)
    assert len(workload.prompts) == 1
    assert workload.source.endswith(
        "(1 skipped: the body is longer than what is logged; 2 skipped: the prompt is given in tokens)"
    )


def test_a_log_without_bodies_says_what_to_log(tmp_path: Path, traffic: Traffic) -> None:
    error = refusal(tmp_path, traffic.log("/v1/completions", {"prompt": "Once"}, bodies=False))
    assert "the body was not logged (1)" in error.why and "--log-prompts" in error.way_out


# Built in


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_workloads(name: str) -> None:
    workload = load_workload(name)
    assert (workload.name, workload.source, len(workload.prompts)) == (name, "built in", 8)
    assert len({prompt.id for prompt in workload.prompts}) == 8
    for prompt in workload.prompts:
        assert not isinstance(prompt.messages, str)
        length = sum(len(json.dumps(message)) for message in prompt.messages)
        assert 120 < length < 2_200, (prompt.id, length)
        assert prompt.messages[-1]["role"] in ("user", "tool")
        assert (prompt.grammar is not None) == (name == "json")
        assert bool(prompt.tools) == (name == "agent")
        if prompt.grammar is not None:
            COMPILER.compile(prompt.grammar)
