"""Schemas in the Python API: what may be given, and what comes back."""

import json
from collections.abc import Iterator

import pytest
from pydantic import BaseModel, Field

from outrider.core.data import Completion, Grammar
from outrider.core.errors import GrammarError
from outrider.core.params import SamplingParams
from outrider.policy.fixed import FixedPolicy
from outrider.session import Session
from outrider.session.generation import parser_of, read_schema
from real_server import OPTIONS
from vocabularies import TableVocabulary, Token, bytes_and

GREEDY = SamplingParams(temperature=0)


class Town(BaseModel):
    """What is asked for."""

    name: str
    kind: str
    inhabitants: int


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session.load(policy=FixedPolicy(), options=OPTIONS, bitwise=False) as opened:
        yield opened


def test_a_pydantic_model_gives_its_schema_and_parses() -> None:
    text, parse = read_schema(Town)
    assert json.loads(text)["required"] == ["name", "kind", "inhabitants"]
    town = Town(name="Ulm", kind="city", inhabitants=5)
    assert parse('{"name": "Ulm", "kind": "city", "inhabitants": 5}') == town


def test_the_objects_of_a_model_have_its_fields_only() -> None:
    class Open(BaseModel, extra="allow"):
        town: Town
        example: dict[str, int] = Field(default={"type": "object", "properties": {}})  # type: ignore[dict-item]

    text, _ = read_schema(Open)
    schema = json.loads(text)
    assert schema["additionalProperties"] is True
    assert schema["$defs"]["Town"]["additionalProperties"] is False
    assert schema["properties"]["example"]["default"] == {"type": "object", "properties": {}}
    plain = {"type": "object", "properties": {}}
    assert json.loads(read_schema(plain)[0]) == plain


@pytest.mark.parametrize("schema", [{"type": "integer"}, '{"type": "integer"}'])
def test_plain_data_and_text_are_schemas(schema: dict[str, str] | str) -> None:
    text, parse = read_schema(schema)
    assert json.loads(text) == {"type": "integer"} and parse("3") == 3


@pytest.mark.parametrize("schema", [7, None, [1], str, {"a": object()}, {"a": {1, 2}}])
def test_anything_else_is_refused(schema: object) -> None:
    with pytest.raises(GrammarError, match="schema"):
        read_schema(schema)  # type: ignore[arg-type]


def test_an_answer_comes_back_as_an_object(session: Session) -> None:
    completion = session.generate(
        [{"role": "user", "content": "Describe the city of Paris."}],
        schema=Town,
        sampling=GREEDY,
        max_tokens=60,
    )
    assert completion.is_complete and completion.finish_reason == "stop"
    assert isinstance(completion.parsed, Town) and completion.parsed.name in completion.text
    assert any("grammar" in record.draft.sources for record in completion.records)


def test_a_truncated_answer_is_not_parsed(session: Session) -> None:
    completion = session.generate("Paris", schema=Town, sampling=GREEDY, max_tokens=5)
    assert completion.finish_reason == "length"
    assert not completion.is_complete and completion.parsed is None


def test_forcing_changes_no_token(session: Session) -> None:
    prompt = [{"role": "user", "content": "Describe the city of Rome."}]
    off, exact = (
        session.generate(
            prompt,
            schema=Town,
            grammar=Grammar("json_schema", fast_forward=mode),
            sampling=GREEDY,
            max_tokens=60,
        )
        for mode in ("off", "exact")
    )
    assert off.text == exact.text and off.parsed == exact.parsed
    calls = [sum(record.kind == "decode" for record in run.records) for run in (off, exact)]
    assert calls[1] < calls[0] / 1.5


def test_a_schema_that_cannot_be_enforced_is_refused_before_anything_runs(session: Session) -> None:
    with pytest.raises(GrammarError):
        session.generate("Paris", schema={"type": "object", "properties": 3})
    assert session.generate("Paris", sampling=GREEDY, max_tokens=2).tokens


@pytest.mark.parametrize("marks", [(), ("</think>",)], ids=["spelled", "a control token"])
def test_what_is_behind_a_trigger_is_parsed(marks: tuple[str, ...]) -> None:
    vocabulary = TableVocabulary(
        [
            *bytes_and("a}", '>{"'),
            *(Token(mark.encode(), control=True) for mark in marks),
            Token(b"<end>", control=True, end=True),
        ]
    )
    grammar, parse = Grammar("json_schema", after="</think>"), read_schema("{}")[1]
    trigger = [vocabulary.size - 2] if marks else list(b"</think>")
    text = [*b'{"a": "\xc3\xa9"} ', *trigger, *b'\n{"a": "</think>"}', vocabulary.size - 1]
    parsed = parser_of(grammar, vocabulary, parse)(answered(text))
    assert parsed == {"a": "</think>"}
    assert parser_of(grammar, vocabulary, parse)(answered([65, 66])) is None


def test_an_answer_that_was_thought_over_is_parsed(session: Session) -> None:
    completion = session.generate(
        "Paris lies in",
        schema=Town,
        grammar=Grammar("json_schema", after=" "),
        sampling=GREEDY,
        max_tokens=90,
    )
    assert completion.is_complete and isinstance(completion.parsed, Town)
    assert not completion.text.startswith("{")


def test_an_answer_that_a_stop_string_cut_is_not_parsed(session: Session) -> None:
    completion = session.generate("Paris", schema={"const": {"a": 1}}, sampling=GREEDY, stop=["}"])
    assert completion.finish_reason == "stop" and completion.text == '{"a": 1'
    assert not completion.is_complete and completion.parsed is None


def answered(tokens: list[int]) -> Completion:
    return Completion("not read", tuple(tokens), "stop", 1, 0, 0, "token", ())
