"""What every part shares: pydantic's errors in one line, files written whole or not at all, sequences."""

import os
import threading
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from examples import examples
from outrider.core.errors import SettingError
from outrider.core.files import check_writable, write_whole
from outrider.core.invalid import Invalid, invalid
from outrider.core.sequences import common_prefix


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    number: int | None = None
    sizes: list[Annotated[int, Field(ge=1, le=9)]] | Literal["all"] = "all"


class Whole(BaseModel):
    parts: Annotated[tuple[Part, ...], Field(min_length=1, max_length=2)] = (Part(name="a"),)
    share: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.5
    switch: bool = True
    kind: Literal["one", "other"] = "one"
    path: Path = Path()
    word: str = "x"

    @field_validator("word")
    @classmethod
    def _check(cls, word: str) -> str:
        if word != "x":
            raise ValueError("It is no x.\nNor anything else")
        return word


def found(data: Any) -> Invalid:
    with pytest.raises(ValidationError) as caught:
        Whole.model_validate(data)
    return invalid(caught.value)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"share": "much"}, "share: it has to be a number"),
        ({"share": 1.5}, "share: it has to be 1 or less"),
        ({"share": float("nan")}, "share: it has to be a finite number"),
        ({"switch": "maybe"}, "switch: it has to be true or false"),
        ({"kind": 3}, 'kind: it has to be "one" or "other"'),
        ({"path": 3}, "path: it has to be a path"),
        ({"word": "y"}, "word: it is no x."),
        ({"parts": 3}, "parts: it has to be an array"),
        ({"parts": []}, "parts: it has to be an array with at least 1 item"),
        ({"parts": [3]}, "parts[1]: it has to be an object"),
        ({"parts": [{"name": "a"}, {}]}, "parts[2].name: it is missing"),
        ({"parts": [{"name": 3}]}, "parts[1].name: it has to be text"),
        ({"parts": [{"name": "a", "nubmer": 1}]}, "parts[1].nubmer: it is not known"),
        ({"parts": [{"name": "a", "number": 1.5}]}, "parts[1].number: it has to be a whole number"),
        ({"parts": [{"name": "a", "sizes": [1, 12]}]}, "parts[1].sizes[2]: it has to be 9 or less"),
        ({"parts": [{"name": "a", "sizes": 3}]}, 'parts[1].sizes: it has to be an array or "all"'),
        (3, "it has to be an object"),
    ],
)
def test_place_and_reason_are_said(data: Any, said: str) -> None:
    assert str(found(data)) == said


def test_text_that_is_no_json_is_said_to_be_none() -> None:
    with pytest.raises(ValidationError) as caught:
        Whole.model_validate_json("{")
    assert str(invalid(caught.value)) == "it is not valid JSON"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@settings(max_examples=examples(200))
@given(st.fixed_dictionaries({}, optional=dict.fromkeys(Whole.model_fields, VALUES)))
def test_whatever_is_wrong_is_said_in_one_line_without_an_address(data: dict[str, Any]) -> None:
    try:
        Whole.model_validate(data)
    except ValidationError as error:
        said = str(invalid(error))
        assert said and "\n" not in said and "pydantic" not in said and "Input" not in said


# Files

TEXT = "a line\n" * 1000


def test_a_file_is_replaced_through_its_link_and_nothing_else_is_left(tmp_path: Path) -> None:
    link, file = tmp_path / "link", tmp_path / "file"
    file.write_text("an older plan")
    link.symlink_to(file)
    check_writable(link, "plan")
    write_whole(link, TEXT, "plan")
    assert link.is_symlink() and file.read_text() == TEXT
    with pytest.raises(SettingError, match="the plan could not be written"):
        write_whole(tmp_path / "absent" / "plan", TEXT, "plan")
    assert {*os.listdir(tmp_path)} == {"link", "file"}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    check_writable(pipe, "plan")
    write_whole(pipe, TEXT, "plan")
    if not pipe.is_fifo():
        pytest.fail("the pipe was replaced by a file")
    reader.join()
    assert read == [TEXT]


# Sequences of tokens


TOKENS = st.lists(st.integers(0, 2), max_size=8)


@given(TOKENS, TOKENS, TOKENS)
def test_a_common_prefix_is_the_longest_beginning_of_both(
    start: list[int], one: list[int], other: list[int]
) -> None:
    shared = common_prefix(one, other)
    assert one[:shared] == other[:shared]
    assert one[: shared + 1] != other[: shared + 1] or shared == len(one) == len(other)
    assert common_prefix(tuple(start + one), iter(start + other)) == len(start) + shared
