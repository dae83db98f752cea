"""Other engines: what they are asked, how answers are timed and counted, and what their failures say."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from outrider.core.data import Grammar
from outrider.core.errors import SettingError
from outrider.core.params import SamplingParams
from outrider.lab.bench.contestants import Answer, Contestant, ContestantError
from outrider.lab.bench.plan import ContestantSpec
from outrider.lab.bench.servers import Server, fill
from real_server import MODEL, REASON, real_server

HELLO = ({"role": "user", "content": "Hello"},)
GREEDY = SamplingParams(temperature=0, seed=7)
SLOW_S = 0.03
USUAL: dict[str, Any] = {"prompt": HELLO, "sampling": GREEDY, "max_tokens": 5}


class StandIn:
    """A server on the loopback that streams what it is told: dicts are events, numbers pauses in seconds,
    strings raw lines, None cuts the connection."""

    def __init__(self, owner: str = "llamacpp") -> None:
        self.owner = owner
        self.script: list[Any] = []
        self.status = 200
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.headers: dict[str, str] = {}
        standin = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                listed = {"data": [{"id": "the-model", "owned_by": standin.owner}]}
                self._send(json.dumps(listed if self.path == "/v1/models" else {}).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                standin.bodies.append((self.path, body))
                standin.headers = dict(self.headers)
                self.send_response(standin.status)
                self.end_headers()
                for part in standin.script:
                    if part is None:
                        self.connection.close()
                        return
                    if isinstance(part, int | float):
                        time.sleep(part)
                    else:
                        line = part if isinstance(part, str) else f"data: {json.dumps(part)}"
                        self.wfile.write(f"{line}\n\n".encode())

            def _send(self, body: bytes) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    @contextmanager
    def asked(self, **settings: Any) -> Iterator[Contestant]:
        thread = Thread(target=self.http.serve_forever, args=(0.01,))
        thread.start()
        spec = ContestantSpec(name="them", url=self.url, **settings)
        try:
            where = (Path("t.gguf"), None)
            with Contestant(spec, *where, context=0, threads=1, answer_patience_s=0.5) as contestant:
                yield contestant
        finally:
            self.http.shutdown()
            self.http.server_close()
            thread.join()


def said(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}


ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}}
WHOLE = [ROLE, SLOW_S, said("one "), SLOW_S, said("two "), said("three"), SLOW_S, END, USAGE, "data: [DONE]"]


def answer_to(script: list[Any], owner: str = "llamacpp", **asked: Any) -> tuple[Answer, dict[str, Any]]:
    standin = StandIn(owner)
    standin.script = script
    with standin.asked() as contestant:
        answer = contestant.ask(**(USUAL | asked))
    return answer, standin.bodies[-1][1]


def failure_of(script: list[Any], status: int = 200, **asked: Any) -> str:
    standin = StandIn()
    standin.script, standin.status = script, status
    with standin.asked() as contestant, pytest.raises(ContestantError) as caught:
        contestant.ask(**(USUAL | asked))
    return str(caught.value)


def test_an_answer_is_timed_from_its_first_token_to_its_end() -> None:
    answer, body = answer_to(WHOLE)
    assert answer.text == "one two three" and answer.is_whole_text and answer.finish_reason == "stop"
    assert (answer.tokens, answer.timed_tokens) == (5, 4)
    # The role alone is no token; the end token, which has no text, took its time.
    # A late reader makes the first longer and the second shorter, never their sum.
    assert answer.prefill_s >= SLOW_S and answer.prefill_s + answer.decode_s >= 3 * SLOW_S
    assert (answer.drafted, answer.accepted, answer.target_calls) == (None, None, None)
    assert body["messages"] == [{"role": "user", "content": "Hello"}] and body["model"] == "the-model"
    assert (body["temperature"], body["max_tokens"], body["seed"]) == (0, 5, 7)
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
    assert body["cache_prompt"] is False and "tools" not in body and "response_format" not in body


def test_llama_servers_speculation_is_read() -> None:
    timings = {"draft_n": 12, "draft_n_accepted": 7, "predicted_n": 5}
    answer, _ = answer_to([*WHOLE[:-2], USAGE | {"timings": timings}])
    assert (answer.drafted, answer.accepted) == (12, 7)
    silent, _ = answer_to([*WHOLE[:-2], USAGE | {"timings": {"predicted_n": 5}}])
    assert (silent.drafted, silent.accepted) == (0, 0)


def test_outriders_account_is_read() -> None:
    account = {"drafted_tokens": 8, "accepted_tokens": 6, "target_calls": 3, "draft_calls": 4}
    answer, body = answer_to(
        [*WHOLE[:-2], USAGE | {"outrider": account | {"forced_tokens": 2}}], owner="outrider"
    )
    assert (answer.drafted, answer.accepted, answer.target_calls) == (8, 6, 3)
    assert (answer.draft_calls, answer.forced) == (4, 2)
    assert "cache_prompt" not in body


def test_without_usage_the_engines_own_count_is_taken_or_the_answer_refused() -> None:
    counted, _ = answer_to([*WHOLE[:-2], {"choices": [], "timings": {"predicted_n": 4}}])
    assert counted.tokens == 4
    assert "does not say how many tokens" in failure_of(WHOLE[:-2])


def test_an_answer_in_one_piece_times_nothing() -> None:
    answer, _ = answer_to([SLOW_S, said("all of it", "stop"), USAGE])
    assert (answer.tokens, answer.timed_tokens, answer.decode_s) == (5, 0, 0.0)


def test_reasoning_and_tool_calls_are_no_whole_text() -> None:
    thought = {"choices": [{"delta": {"reasoning_content": "Hm. "}}]}
    answer, _ = answer_to([thought, SLOW_S, *WHOLE])
    assert answer.text == "Hm. one two three" and not answer.is_whole_text
    call = {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"name": "f"}}]}}]}
    answer, _ = answer_to([call, SLOW_S, call, END, USAGE])
    assert answer.text == "" and not answer.is_whole_text and answer.timed_tokens == 4


def test_a_text_is_continued_as_it_stands() -> None:
    standin = StandIn()
    standin.script = [
        {"choices": [{"text": "a"}]},
        SLOW_S,
        {"choices": [{"text": "b", "finish_reason": "length"}]},
    ]
    standin.script.append(USAGE)
    with standin.asked() as contestant:
        answer = contestant.ask("Once upon", sampling=GREEDY, max_tokens=5)
    path, body = standin.bodies[-1]
    assert path == "/v1/completions" and body["prompt"] == "Once upon" and "messages" not in body
    assert answer.text == "ab" and answer.finish_reason == "length"


def test_schemas_tools_and_samplers_are_asked_for() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    sampling = SamplingParams(temperature=0.7, top_k=20, min_p=0.1, seed=1)
    grammar = Grammar("json_schema", '{"type": "object"}')
    _, body = answer_to(WHOLE, grammar=grammar, tools=(tool,), sampling=sampling)
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"} and body["tools"] == [tool]
    assert (body["temperature"], body["top_k"], body["min_p"]) == (0.7, 20, 0.1)
    _, body = answer_to(WHOLE, grammar=Grammar("gbnf", "root ::= [a-z]"))
    assert body["grammar"] == "root ::= [a-z]"
    _, body = answer_to(WHOLE, owner="vllm")
    _, again = answer_to(WHOLE, owner="vllm")
    assert body["cache_salt"] != again["cache_salt"]


def test_what_an_engine_cannot_be_asked_is_said() -> None:
    assert "regex grammar" in failure_of(WHOLE, grammar=Grammar("regex", "[a-z]"))
    odd = SamplingParams(temperature=0.7, xtc_probability=0.5)
    assert "xtc_probability" in failure_of(WHOLE, sampling=odd)
    with pytest.raises(ContestantError, match="knows no top_k"):
        answer_to(WHOLE, owner="someone", sampling=SamplingParams(temperature=0.7, top_k=20, min_p=0))


@pytest.mark.parametrize(
    ("script", "status", "why"),
    [
        (['{"error": {"message": "the model is loading"}}'], 503, "answers 503: the model is loading"),
        ([ROLE, said("a"), SLOW_S, None], 200, "breaks off"),
        ([ROLE, said("a"), {"error": {"message": "out of memory"}}], 200, "breaks off: out of memory"),
        ([ROLE, said("a"), 'error: {"message": "slot is gone"}'], 200, "breaks off: slot is gone"),
        ([ROLE, "data: {broken"], 200, "no JSON"),
        ([ROLE, said("a"), 1.2, END, USAGE], 200, "takes too long"),
    ],
)
def test_a_failure_is_named(script: list[Any], status: int, why: str) -> None:
    shown = failure_of(script, status)
    assert shown.startswith("them: ") and why in shown


def test_a_key_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    standin = StandIn()
    standin.script = WHOLE
    monkeypatch.setenv("THEIR_KEY", "secret")
    with standin.asked(api_key_env="THEIR_KEY", model="another") as contestant:
        contestant.ask(HELLO, sampling=GREEDY, max_tokens=5)
    assert standin.headers["Authorization"] == "Bearer secret"
    assert standin.bodies[-1][1]["model"] == "another"
    monkeypatch.delenv("THEIR_KEY")
    with pytest.raises(ContestantError, match="THEIR_KEY holds no key"):
        open_command("unused {port}", api_key_env="THEIR_KEY")


# Processes


def open_command(command: str, **settings: Any) -> Contestant:
    spec = ContestantSpec(name="started", command=command, **settings)
    return Contestant(spec, Path("a target.gguf"), None, context=64, threads=1, start_patience_s=20)


PROGRAM = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
print("loading", *sys.argv[1:], flush=True)
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "it"}]}')
    def do_POST(self):
        print("the end is near", flush=True)
        raise SystemExit
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_command_is_started_asked_and_ended(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    with open_command(f"{sys.executable} {program} {{port}} -m {{target}} -c {{context}}") as contestant:
        assert contestant.model == "it" and contestant.engine == "other"
        with pytest.raises(ContestantError, match=r"(?s)broke off.*-m a target.gguf -c 64.*the end is near"):
            contestant.ask(HELLO, sampling=GREEDY, max_tokens=5)
    contestant.close()


@pytest.mark.parametrize(
    ("command", "error", "why"),
    [
        ("no-such-program --port {port}", ContestantError, "no program 'no-such-program'"),
        (f"{sys.executable} -c 'print(9); exit(3)' {{port}}", ContestantError, r"(?s)ended with code 3.*\n9"),
        ("llama-server {port} -md {draft}", ContestantError, "wants a draft model"),
        ("llama-server {port} {typo}", SettingError, "fill in for {typo}"),
        ("llama-server '{port}", SettingError, "is no command"),
    ],
)
def test_a_command_that_cannot_run_is_named(command: str, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        open_command(command)


def test_nobody_listens() -> None:
    spec = ContestantSpec(name="gone", url="http://127.0.0.1:9/v1")
    with pytest.raises(ContestantError, match="gone: it cannot be reached"):
        Contestant(spec, Path("t.gguf"), None, context=64, threads=1)


@pytest.mark.skipif(sys.platform != "linux", reason="made for Linux")
def test_what_a_server_started_ends_with_it(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    shell = tmp_path / "start.sh"
    shell.write_text(f"{sys.executable} {program} $1 & echo $! > {tmp_path}/pid; wait", encoding="utf-8")
    with Server("shell", f"sh {shell} {{port}}", {}):
        child = int((tmp_path / "pid").read_text())
        assert Path(f"/proc/{child}").exists()
    end_s = time.monotonic() + 10
    while _runs(child) and time.monotonic() < end_s:
        time.sleep(0.02)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_braces_can_be_written() -> None:
    assert fill("run {{}} {port}", {"port": 1}) == ["run", "{}", "1"]


@pytest.mark.slow
@pytest.mark.skipif(not MODEL.exists(), reason=REASON)
def test_our_own_server_is_a_contestant(tmp_path: Path) -> None:
    with real_server(tmp_path, "-c", "512") as server:
        (tmp_path / "key").write_text("")
        spec = ContestantSpec(name="ours", url=server.base_url, api_key_env="OURS")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OURS", "the-key-of-the-tests-itself")
            with Contestant(spec, MODEL, None, context=512, threads=1) as contestant:
                answer = contestant.ask(HELLO, sampling=GREEDY, max_tokens=24)
                raw = contestant.ask("One, two, three,", sampling=GREEDY, max_tokens=8)
    assert contestant.engine == "outrider" and answer.text and raw.tokens == 8
    assert answer.target_calls and 0 < answer.timed_tokens == answer.tokens - 1 and answer.decode_s > 0
