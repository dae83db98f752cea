"""OpenAI's client for Python against the program `outrider serve` with a real model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any, Literal
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import anthropic
import jsonschema
import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, Field

from outrider.core.data import Completion
from outrider.policy.fixed import FixedPolicy
from outrider.session import Session
from real_server import CONTEXT, GREEDY, KEY, MODEL, NAME, ONE_AT_ONCE, OPTIONS, REASON, RealServer
from serving import user

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


@cache
def engines_answer() -> Completion:
    """What the engine alone says, decoding plainly."""
    with Session.load(
        MODEL, context_length=512, options=OPTIONS, policy=FixedPolicy(), bitwise=False
    ) as session:
        return session.generate(
            user(QUESTION), max_tokens=NUM_TOKENS, sampling=GREEDY, speculate=False, logprobs=2
        )


@pytest.fixture(scope="module")
def expected() -> Completion:
    """The same, once for all modules that ask a server for it."""
    return engines_answer()


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
    """The `outrider` object of an answer, which fits the answer's usage."""
    extra = answer.model_extra
    assert extra is not None
    found: dict[str, Any] = extra["outrider"]
    return found


def check_usage(answer: ChatCompletion) -> None:
    """Counts add up, and the `outrider` object has the same ones."""
    usage, found = answer.usage, account(answer)
    assert usage is not None and usage.completion_tokens_details is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert found["generated_tokens"] == usage.completion_tokens
    details = usage.completion_tokens_details
    assert details.accepted_prediction_tokens == found["accepted_tokens"]
    assert details.rejected_prediction_tokens == found["drafted_tokens"] - found["accepted_tokens"]
    assert found["target_calls"] + found["accepted_tokens"] >= usage.completion_tokens
    assert sum(one["accepted_tokens"] for one in found["drafters"].values()) == found["accepted_tokens"]


# Text


def test_anthropics_client_gets_the_engines_text(server: RealServer, expected: Completion) -> None:
    address = server.base_url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=address, api_key=KEY, max_retries=0) as client:
        with client.messages.stream(
            model=NAME,
            max_tokens=NUM_TOKENS,
            messages=[{"role": "user", "content": QUESTION}],
            extra_body={"temperature": 0},
        ) as stream:
            assert "".join(stream.text_stream) == expected.text
            usage = stream.get_final_message().usage
        assert usage.output_tokens == len(expected.tokens)
        read_tokens = usage.input_tokens + (usage.cache_read_input_tokens or 0)
        counted = client.messages.count_tokens(model=NAME, messages=[{"role": "user", "content": QUESTION}])
        assert read_tokens == counted.input_tokens == expected.prompt_tokens
    stranger = anthropic.Anthropic(base_url=address, api_key="wrong", max_retries=0)
    with stranger, pytest.raises(anthropic.AuthenticationError, match="not accepted"):
        stranger.messages.count_tokens(model=NAME, messages=[{"role": "user", "content": QUESTION}])


def test_a_chat_says_what_the_engine_says(client: OpenAI, expected: Completion) -> None:
    answer = client.chat.completions.create(**asked(logprobs=True, top_logprobs=2))
    choice = answer.choices[0]
    assert choice.message.content == expected.text
    assert (choice.finish_reason, answer.model) == ("length", NAME)
    assert answer.usage is not None and answer.usage.prompt_tokens == expected.prompt_tokens
    assert answer.usage.completion_tokens == NUM_TOKENS
    check_usage(answer)
    assert choice.logprobs is not None and choice.logprobs.content is not None
    scored = choice.logprobs.content
    assert b"".join(bytes(one.bytes or ()) for one in scored).decode() == expected.text
    assert expected.logprobs is not None
    for one, engines in zip(scored, expected.logprobs, strict=True):
        assert one.logprob == pytest.approx(engines.logprob, abs=0.1)
        assert one.top_logprobs[0].token == one.token  # greedy
        assert one.top_logprobs[0].logprob > one.top_logprobs[1].logprob


def test_a_body_that_is_called_a_form_is_read_as_curl_means_it(
    server: RealServer, expected: Completion
) -> None:
    body, headers = json.dumps(asked()).encode(), {"Authorization": f"Bearer {KEY}"}
    address = f"{server.base_url}/chat/completions"
    with urlopen(Request(address, body, headers)) as answer:  # it calls a body a form, like `curl -d`
        assert json.load(answer)["choices"][0]["message"]["content"] == expected.text
    for more, status in (({"Sec-Fetch-Site": "cross-site"}, 400), ({"Origin": "https://evil.example"}, 403)):
        with pytest.raises(HTTPError) as refused:
            urlopen(Request(address, body, headers | more))
        with refused.value as error:
            assert error.status == status


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
    check_usage(answer)
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
    check_usage(chat)
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
        client.chat.completions.create(**asked(extra_body={"top_q": 1}))
    assert (raised.value.param, raised.value.code) == ("top_q", "unknown_field")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(**asked(temperature=-1, stream=True))
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(**asked(messages=user("word " * CONTEXT)))
    assert raised.value.code == "context_length_exceeded"
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
