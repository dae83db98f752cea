"""The scripts of benchmarks/serve: what is asked, how it is timed, what figures are worked out from."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from outrider.lab.bench.servers import ContestantError, Server, fill
from outrider.server.metrics import Metrics
from outrider.server.worker import WorkerState
from serve import agent, report, soak
from serve.abuse import KINDS, REFUSED, Visitor
from serve.client import ask, body_of, burst_times
from serve.load import describe_run
from serve.metrics import running_and_waiting
from serve.processes import cpu_s, rss_bytes
from serve.questions import MIXED, Load, Question, deal, load_questions, loads, tool_questions
from serve.summary import best, by_load, latencies, median_speed, ratio, token_gaps, tokens_per_s

HELLO = Question("hello", "chat", ({"role": "user", "content": "Hello"},))
LIMITED = Question("limited", "json", HELLO.messages, {"type": "object"})
QUESTIONS = load_questions() + tool_questions()


# What is asked


def test_an_agents_session_has_20_turns_and_what_tools_gave_follows_a_call() -> None:
    turns = agent.SESSION["turns"]
    assert len(turns) == 20 and {turn["kind"] for turn in turns} == {"text", "edit", "call"}
    for before, turn in pairwise(turns):
        assert (turn["role"] == "tool") == (before["kind"] == "call")
    files = agent.SESSION["system"].count("\n=== src/")
    assert files == 9 and len(agent.SESSION["system"]) > 30_000
    names = {tool["function"]["name"] for tool in agent.SESSION["tools"]}
    assert names == {"read_file", "edit_file", "run_tests", "search"}


def test_an_agents_turns_are_streams_of_both_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text, a call in parts, and the tokens that were not read, as each server counts them."""
    call = {"index": 0, "id": "c1", "function": {"name": "search", "arguments": '{"te'}}
    rest = {"index": 0, "function": {"arguments": 'xt": "x"}'}}
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5}}
    events: list[dict[str, Any]] = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "I look."}}]},
        {"choices": [{"delta": {"tool_calls": [call]}}]},
        {"choices": [{"delta": {"tool_calls": [rest]}, "finish_reason": "tool_calls"}]},
        {"choices": [], "usage": usage},
    ]
    ends: list[tuple[dict[str, Any], dict[str, int]]] = [
        ({"outrider": {"target_calls": 2}}, {"cached_tokens": 5, "target_calls": 2}),
        ({"timings": {"cache_n": 3}}, {"cached_tokens": 3}),
    ]
    for last, expected in ends:
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in (*events[:-1], events[-1] | last))
        monkeypatch.setattr(agent, "client_of", lambda *_, answer=text: streaming(answer))
        server = SimpleNamespace(address="http://tiny", name="tiny")
        message, row = asyncio.run(agent.ask(server, [], agent.SESSION["turns"][1]))  # type: ignore[arg-type]
        [made] = message["tool_calls"]
        assert message["content"] == "I look." and made["function"]["arguments"] == '{"text": "x"}'
        assert {name: row[name] for name in expected} == expected
        assert (row["prompt_tokens"], row["tokens"], row["finish"]) == (9, 4, "tool_calls")
        assert 0 < row["ttft_s"] <= row["e2e_s"]


def streaming(text: str) -> httpx.AsyncClient:
    """A client whose server answers everything with this stream."""
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=text))
    return httpx.AsyncClient(base_url="http://tiny", transport=transport)


def test_no_server_is_asked_the_same_twice() -> None:
    hands = deal(QUESTIONS, loads([1, 2, 4, 8], 16, 8), 0, seed=3)
    asked = [question.id for question in chain(*hands)]
    assert len(asked) == len(set(asked)) == 4 * 16 + 3 * 8
    assert [{q.group for q in hand} for hand in hands[4:]] == [{"edit"}, {"json"}, {"tools"}]
    for hand in hands[:4]:
        assert {group: sum(q.group == group for q in hand) for group in MIXED} == MIXED


def test_in_the_end_each_number_of_clients_was_asked_the_same() -> None:
    mixed = loads([1, 2, 4], 16, 1)[:3]
    rounds = [deal(QUESTIONS, mixed, number, seed=0) for number in range(3)]
    asked = [sorted(q.id for hands in rounds for q in hands[i]) for i in range(3)]
    assert asked[0] == asked[1] == asked[2]
    assert rounds[0][0] != rounds[1][0]


def test_too_few_questions_are_said() -> None:
    with pytest.raises(SystemExit, match="too few questions of the group edit"):
        deal([HELLO], [Load("edits", 1, {"edit": 1})], 0, 0)


def test_schemas_come_with_the_json_questions_alone() -> None:
    assert {q.group for q in QUESTIONS if q.schema is not None} == {"json"}
    assert all(q.schema is not None for q in QUESTIONS if q.group == "json")


def test_tools_come_with_questions_for_which_one_is_called() -> None:
    [tools] = [q for q in QUESTIONS if q.id == "tools-event"]
    body = body_of(tools, 8)
    assert "create_event" in [tool["function"]["name"] for tool in body["tools"]]
    assert body["tool_choice"] == "required"
    assert {q.group for q in QUESTIONS if q.tools} == {"tools"}


def test_further_questions_can_be_given(tmp_path: Path) -> None:
    more = tmp_path / "more.jsonl"
    rows = [
        {"id": 1, "category": "rag", "turns": ["Which?"]},
        {"id": 2, "category": "qa", "turns": ["x" * 9000]},
    ]
    more.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found = [question for question in load_questions([more]) if question.id.startswith("more")]
    assert [(q.id, q.group, q.messages[0]["content"]) for q in found] == [("more-1", "summary", "Which?")]


# A request and its times


def event(**fields: Any) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


def words(*texts: str, finish: str = "stop") -> list[bytes]:
    """A stream of an answer as OpenAI's servers send it."""
    sent = [event(choices=[{"delta": {"role": "assistant", "content": ""}}])]
    sent += [event(choices=[{"delta": {"content": text}}]) for text in texts]
    sent += [event(choices=[{"delta": {}, "finish_reason": finish}])]
    details = {"accepted_prediction_tokens": 2}
    usage = {"prompt_tokens": 7, "completion_tokens": 5, "completion_tokens_details": details}
    return [*sent, event(choices=[], usage=usage), b"data: [DONE]\n\n"]


class Stream(httpx.AsyncByteStream):
    def __init__(self, parts: Sequence[bytes]) -> None:
        self._parts = parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part


def answering(answer: Any) -> httpx.AsyncClient:
    """A client whose server answers each request with what the function makes of it."""
    return httpx.AsyncClient(base_url="http://test", transport=httpx.MockTransport(answer))


def asked(parts: Sequence[bytes], status: int = 200, question: Question = HELLO) -> tuple[Any, Any]:
    """The row of a question that is answered with these bytes, and the body that was sent."""
    bodies = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(status, stream=Stream(parts))

    async def run() -> Any:
        async with answering(answer) as client:
            return await ask(client, question, 5, 30)

    return asyncio.run(run()), bodies[0]


def test_an_answer_is_timed_and_counted() -> None:
    row, body = asked(words("one ", "two ", "three"))
    assert (row["tokens"], row["prompt_tokens"], row["accepted"]) == (5, 7, 2)
    assert (row["chunks"], row["characters"], row["finish"]) == (3, 13, "stop")
    assert 0 < row["ttft_s"] <= row["e2e_s"] and len(row["gaps_s"]) <= 2
    assert body["temperature"] == 0 and body["stream_options"] == {"include_usage": True}
    assert body["max_tokens"] == 5 and "response_format" not in body


def test_a_schema_is_sent() -> None:
    _, body = asked(words("{}"), question=LIMITED)
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}


@pytest.mark.parametrize(
    ("parts", "status", "error"),
    [
        ([b'{"error": "busy"}'], 503, '503: {"error": "busy"}'),
        ([event(choices=[{"delta": {"content": "a"}}])], 200, "no usage"),
        ([event(choices=[], usage={"completion_tokens": 0, "prompt_tokens": 1})], 200, "no text"),
        ([b"data: {broken\n\n"], 200, "JSONDecodeError"),
    ],
)
def test_a_failure_is_a_row(parts: list[bytes], status: int, error: str) -> None:
    row, _ = asked(parts, status)
    assert row["error"].startswith(error) and row["id"] == "hello"


def test_chunks_of_one_step_are_one_burst() -> None:
    assert list(burst_times([1.0, 1.0005, 1.001, 1.05, 1.051, 2.0])) == [1.0, 1.05, 2.0]


# Figures


def answer(id_: str, tokens: int, e2e_s: float, gaps_s: Sequence[float] = ()) -> dict[str, Any]:
    return {"id": id_, "tokens": tokens, "e2e_s": e2e_s, "ttft_s": e2e_s / 10, "gaps_s": list(gaps_s)}


def row(name: str, number: int, wall_s: float, *requests: dict[str, Any]) -> dict[str, Any]:
    same = {"kind": "load", "load": "mixed", "clients": 1, "round": number, "cpu_s": 1.0, "rss_bytes": 10}
    return {**same, "contestant": name, "wall_s": wall_s, "requests": list(requests)}


def test_failed_requests_give_no_tokens() -> None:
    assert tokens_per_s(row("a", 0, 4.0, answer("x", 40, 2), {"id": "y", "error": "503"})) == 10


def test_ratios_are_means_of_rounds() -> None:
    ours = {i: row("a", i, 10.0, answer("x", 60, 5), answer("y", 60, 5)) for i in range(3)}
    theirs = {i: row("b", i, 12.0, answer("x", 60, 6), answer("y", 60, 6)) for i in range(3)}
    assert ratio(ours, theirs) == pytest.approx((1.2, 1.2, 1.2))
    theirs[1] = row("b", 1, 24.0, answer("x", 60, 12), answer("y", 60, 12))
    found = ratio(ours, theirs)
    assert found.value == pytest.approx((1.2 * 1.2 * 2.4) ** (1 / 3))
    assert (found.low, found.high) == pytest.approx((1.2, 2.4))


def test_the_interval_widens_with_the_questions() -> None:
    """One of two answers is twice as fast: drawn again, both may be that one, or neither."""
    ours = {0: row("a", 0, 15.0, answer("x", 50, 5), answer("y", 50, 10))}
    theirs = {0: row("b", 0, 20.0, answer("y", 50, 10), answer("x", 50, 10))}
    assert ratio(ours, theirs) == pytest.approx((4 / 3, 1.0, 2.0))


def test_rounds_that_one_lacks_are_left_out() -> None:
    ours = {0: row("a", 0, 10.0, answer("x", 100, 10)), 1: row("a", 1, 1.0, answer("x", 100, 1))}
    assert ratio(ours, {0: row("b", 0, 20.0, answer("x", 100, 20))}).value == pytest.approx(2.0)


def test_tokens_of_one_burst_have_no_gap_among_them() -> None:
    assert token_gaps(answer("x", 5, 1, [0.2, 0.3])) == [0.2, 0.3, 0.0, 0.0]
    assert token_gaps(answer("x", 1, 1)) == []
    found = latencies({0: row("a", 0, 9.0, answer("x", 21, 1, [0.5] + [0.1] * 4), answer("y", 1, 3))})
    assert (found.ttft_p50_s, found.pause_p50_s) == pytest.approx((0.2, 0.1))
    assert found.gap_p95_s == pytest.approx(0.12) and found.pause_p95_s == pytest.approx(0.42)


def test_the_best_of_the_others_is_chosen_by_load() -> None:
    rows = [
        *(row("ours", i, 10.0, answer("x", 100, 10)) for i in range(3)),
        *(row("slow", i, 20.0, answer("x", 100, 20)) for i in range(3)),
        *(row("fast", i, (9.0, 8.0, 99.0)[i], answer("x", 100, 9)) for i in range(3)),
    ]
    [servers] = by_load(rows).values()
    assert median_speed(servers["fast"]) == pytest.approx(100 / 9)
    assert best(servers, "ours") == "fast" and best({"ours": servers["ours"]}, "ours") is None


def test_the_report_shows_every_server() -> None:
    head = {
        "cpu": "a processor",
        "threads": 2,
        "slots": 8,
        "models": {"m.gguf": "1"},
        "tokens": 96,
        "commit": "c",
    }
    failed = {"id": "z", "error": "503: busy"}
    rows = [
        row("outrider", 0, 10.0, answer("x", 120, 10, [0.1] * 3)),
        row("llama plain", 0, 10.0, answer("x", 100, 10, [0.2] * 9), failed),
    ]
    text = "\n".join(report.report(head, rows, "outrider"))
    assert "| mixed, 1 client | 12.0 | 10.0 | 1.20x llama plain | 1.20 to 1.20 |" in text
    assert "mixed, 1 client, llama plain: 1 requests failed, as 503: busy" in text
    assert "| mixed, 1 client, outrider | 1000 |" in text


# The soak


def test_growth_is_judged_after_the_warm_up() -> None:
    warm = [100, 300, 500, 700, 900]
    assert soak.growth([*warm, *[1000] * 20]) == 0
    assert soak.growth([*warm, *range(1000, 1200, 10)]) == pytest.approx(1175 / 1015 - 1)
    assert soak.growth([1, 2, 3]) is None


def test_what_is_wrong_is_said() -> None:
    fine = {
        "num_errors": 0, "growth": 0.01, "left_running": 0.0, "left_waiting": 0.0, "health": 200,
        "requests": dict.fromkeys(KINDS, 3),
    }  # fmt: skip
    assert soak.problems(fine) == []
    for change, said in (
        ({"num_errors": 2}, "2 requests did not end as they should"),
        ({"growth": 0.031}, "memory grew by 3.1% after the warm-up"),
        ({"growth": None}, "too few samples"),
        ({"left_running": 1.0}, "1 requests are left running"),
        ({"left_waiting": None}, "/metrics does not say"),
        ({"health": 0}, "/health answers 0 afterwards"),
        ({"requests": {}}, "nothing was tried of stream"),
    ):
        [problem] = soak.problems(fine | change)
        assert problem.startswith(said)


def visited(kind: str, response: httpx.Response) -> str | None:
    """The complaint of a visitor whose server answers everything in one way."""

    async def run() -> str | None:
        async with answering(lambda _request: response) as client:
            visitor = Visitor(client, [HELLO, LIMITED], random.Random(0), 5, 30)
            return await visitor.visit(kind)

    return asyncio.run(run())


def choices(*texts: str, finish: str = "stop") -> httpx.Response:
    found = [{"message": {"content": text}, "finish_reason": finish} for text in texts]
    return httpx.Response(200, json={"choices": found})


def test_visitors_are_content_with_a_good_server() -> None:
    assert visited("refused", httpx.Response(400)) is None
    assert visited("whole", choices("{}")) is None
    assert visited("whole", choices('{"a', finish="length")) is None
    assert visited("choices", choices("{}", "{}")) is None
    for kind in ("stream", "json", "leave", "leave early"):
        assert visited(kind, httpx.Response(200, stream=Stream(words("a", "b")))) is None


@pytest.mark.parametrize(
    ("kind", "response", "complaint"),
    [
        ("refused", httpx.Response(200, text="fine"), "is answered 200: fine"),
        ("refused", httpx.Response(500), "is answered 500"),
        ("whole", choices("no JSON"), "JSONDecodeError"),
        ("whole", httpx.Response(500, text="oh"), "500: oh"),
        ("choices", choices("{}"), "1 choices instead of 2"),
        ("stream", httpx.Response(503, text="busy"), "503: busy"),
        ("leave", httpx.Response(500, text="oh"), "500: oh"),
    ],
)
def test_visitors_complain(kind: str, response: httpx.Response, complaint: str) -> None:
    assert complaint in str(visited(kind, response))


def test_what_has_to_be_refused_is_no_request() -> None:
    for path, body in REFUSED:
        assert path.startswith("/v1/") and isinstance(body, bytes)


def test_the_load_of_our_server_and_of_llama_cpps_is_read() -> None:
    state = WorkerState(3, 2, 4, 0, 100, draining=False)
    ours = Metrics(lambda: state, model={}, build={}).render()[0].decode()
    assert running_and_waiting(ours) == (3, 2)
    theirs = "# TYPE llamacpp:requests_processing gauge\nllamacpp:requests_processing 1\n"
    assert running_and_waiting(f"{theirs}llamacpp:requests_deferred 5\n") == (1, 5)
    assert running_and_waiting("no metrics") == (None, None)


# Processes

SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="made for Linux")
def test_a_server_is_started_watched_and_ended(tmp_path: Path) -> None:
    program = tmp_path / "server.py"
    program.write_text(SERVER, encoding="utf-8")
    with Server(
        "tiny", "{python} {program} {port}", {"python": sys.executable, "program": program}
    ) as server:
        assert server.is_alive
        assert [server.get(path)[0] for path in ("/health", "/nowhere")] == [200, 404]
        assert rss_bytes(server) > rss_bytes(server, own=True) > 1_000_000 and cpu_s(server) >= 0
    assert not server.is_alive
    assert server.get("/health")[0] == 0


def test_a_server_that_does_not_start_is_named_with_its_log() -> None:
    with pytest.raises(ContestantError, match=r"(?s)tiny: it does not start.*no such thing"):
        Server("tiny", "{python} -c 'import sys; sys.exit(\"no such thing\")'", {"python": sys.executable})


def test_values_with_blanks_stay_one_argument() -> None:
    assert fill("run -m {model} -x 'a b'", {"model": "a model.gguf"}) == [
        "run",
        "-m",
        "a model.gguf",
        "-x",
        "a b",
    ]


def test_results_do_not_name_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.load.describe", lambda *models: {"models": len(models)})
    arguments = soak_like()
    head = describe_run(arguments, {"a": "/opt/my/llama-server -m {model}", "b": "outrider serve"})
    assert head["commands"] == {"a": "llama-server -m {model}", "b": "outrider serve"}
    assert head["threads"] == 2 and head["llama_server"] is None


def soak_like() -> Any:
    values: dict[str, Any] = {"model": Path("m"), "draft": None, "llama_server": None, "threads": 2}
    return type("Arguments", (), values)()
