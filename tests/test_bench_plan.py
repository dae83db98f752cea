"""What is swept: settings and their slips; models by their names."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from grammars import COMPILER
from outrider.core.data import Grammar
from outrider.core.errors import HubError, ModelFileError, PromptError, SettingError
from outrider.lab.bench.plan import SweepPlan
from outrider.lab.models import ModelFile, find_models
from outrider.lab.prompts import Workload
from outrider.lab.workloads import BUILT_IN, load_workload
from outrider.models.hub import HubOptions
from outrider.server.assembly import RequestLog, log_to_stderr
from tiny_gguf import write_tiny

OFFLINE = HubOptions(offline=True)


def test_settings_that_need_no_draft_model_are_replayed_without_one_alone() -> None:
    plan = SweepPlan(draft_lengths="2", p_mins="0,0.5", controls=["auto model", "lookup 4"])
    alone = ["plain", "auto lookup", "lookup 2", "lookup 2/0.5", "lookup 4"]
    assert [setting.name for setting in plan.settings(None)] == alone
    assert [s.name for s in plan.settings("d")] == [
        "auto", "auto model", "model 2", "model 2/0.5", "both 2", "both 2/0.5",
    ]  # fmt: skip
    assert [setting.name for setting in plan.settings(None, can_draft=False)] == ["plain"]


def test_workloads_of_one_name_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.jsonl").write_text('{"prompt": "x"}\n')
    twice = [str(tmp_path / name / "mine.jsonl") for name in ("a", "b")]
    with pytest.raises(SettingError, match="--workload mine: two of the workloads would have this name"):
        SweepPlan(workload=twice).workloads()
    [one] = SweepPlan(workload=[twice[0]] * 2, max_tokens=9, temperature=0.5).workloads()
    assert (one.name, one.max_tokens, one.sampling.temperature) == ("mine", 9, 0.5)


# Models


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """a.gguf, b.gguf, deep/er/c.gguf, a split model of two parts, and a file that is no model."""
    write_tiny(tmp_path / "a.gguf", seed=1)
    write_tiny(tmp_path / "b.gguf", seed=2)
    (tmp_path / "deep" / "er").mkdir(parents=True)
    write_tiny(tmp_path / "deep" / "er" / "c.gguf", seed=3)
    (tmp_path / "notes.txt").write_text("no model")
    return tmp_path


def found(*references: object, taken: list[ModelFile] | None = None) -> list[tuple[str, Path]]:
    models = find_models([str(reference) for reference in references], hub=OFFLINE, taken=taken or [])
    return [(model.name, model.path) for model in models]


def test_globs_paths_and_homes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = folder / "a.gguf", folder / "b.gguf", folder / "deep/er/c.gguf"
    assert found(folder / "*") == [("a", a), ("b", b)]
    assert found(folder / "**" / "*.gguf") == [("a", a), ("b", b), ("c", c)]
    assert found(b, folder / "[a-b].gguf") == [("b", b), ("a", a)]
    monkeypatch.setenv("HOME", str(folder))
    assert found("~/deep/*/c.gguf", "~/a.gguf") == [("c", c), ("a", a)]
    model = find_models([str(a)], hub=OFFLINE)[0]
    assert model.card.architecture == "llama"
    assert model.fingerprint != find_models([str(b)], hub=OFFLINE)[0].fingerprint


def test_alike_names_get_their_folder_and_then_a_number(folder: Path) -> None:
    other = folder / "deep" / "a.gguf"
    write_tiny(other, seed=9)
    twin = folder / "x" / "deep" / "a.gguf"
    twin.parent.mkdir(parents=True)
    write_tiny(twin, seed=8)
    names = [name for name, _ in found(folder / "a.gguf", other, twin, folder / "b.gguf")]
    assert names == [f"{folder.name}/a", "deep/a", "deep/a (2)", "b"]


def test_a_model_of_the_hub_is_called_by_its_repository(folder: Path) -> None:
    snapshot = folder / "models--someone--Tiny-GGUF" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    shutil.copy(folder / "b.gguf", snapshot / "a.gguf")
    assert [name for name, _ in found(folder / "a.gguf", snapshot / "a.gguf")][1] == "Tiny-GGUF/a"


def test_parts_of_a_split_model_are_one(folder: Path) -> None:
    write_tiny(folder / "big.gguf", shards=2)
    first, second = folder / "big-00001-of-00002.gguf", folder / "big-00002-of-00002.gguf"
    assert found(folder / "big*") == found(second) == [("big", first)]
    second.unlink()
    with pytest.raises(ModelFileError, match="1 of them are missing"):
        found(folder / "big*")


def test_what_leads_nowhere_is_named(folder: Path) -> None:
    for reference, why in (
        (folder / "q*.gguf", "nothing matches"),
        (folder / "*.txt", "none of the 1 files that it matches is a .gguf"),
        (folder / "gone.gguf", "there is no such file"),
        (folder, "it is a directory"),
    ):
        with pytest.raises(ModelFileError) as caught:
            found(reference)
        assert caught.value.what == str(reference) and why in caught.value.why and caught.value.way_out
    with pytest.raises(HubError, match="not in the hub's cache"):
        found("hf:no-one/no-model")


# Workloads: every shape of prompt file, the server's own log, and the prompts that come with the program

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


# Recorded traffic


class Traffic:
    """Requests that go through the server's own log."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def log(self, path: str, body: Any, *, status: int = 200, bodies: bool = True) -> str:
        """The line that the server logs of a request."""
        app = FastAPI()

        async def answer(request: Request) -> None:
            await request.body()

        app.post(path, status_code=status)(answer)
        self._capture.readouterr()
        log_to_stderr(as_json=True)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        TestClient(RequestLog(app, bodies=bodies)).post(path, content=data)
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
