"""What a Session is asked for: arguments that make no sense, and generations that are closed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider.backends.fake import FakeModel, FakeVocabulary, random_logits
from outrider.core.errors import InputError
from outrider.core.params import SamplingParams
from outrider.session import Session


@pytest.mark.parametrize(
    ("prompt", "settings", "why"),
    [
        ("", {}, "prompt: it is empty. Give some text."),
        ([], {}, "prompt: it is empty."),
        (None, {}, "prompt: it is a NoneType. Give a text, a conversation, or tokens."),
        (7, {}, "prompt: it is a int."),
        ([10_000], {}, "prompt: it has tokens outside of"),
        ([{"role": "user", "content": "a"}], {}, "has no chat template. Give the prompt as one text."),
        ("abc", {"max_tokens": "5"}, "max_tokens: it is a str. Give one of type int, or None."),
        ("abc", {"max_tokens": -1}, "max tokens: -1 asks for nothing"),
        ("abc", {"sampling": 0.5}, "sampling: it is a float. Give one of type SamplingParams"),
        ("abc", {"grammar": "[ab]"}, "grammar: it is a str. Give one of type Grammar"),
    ],
)
def test_what_makes_no_sense_is_an_error_in_the_words_of_the_api(
    prompt: Any, settings: dict[str, Any], why: str
) -> None:
    vocabulary = FakeVocabulary("abc")
    session = Session(FakeModel(vocabulary, random_logits(vocabulary.size)))
    with pytest.raises(InputError) as caught:
        session.generate(prompt, **settings)
    assert why in str(caught.value) and "-p" not in str(caught.value)


def test_a_generation_is_closed_by_hand_or_by_its_block() -> None:
    vocabulary = FakeVocabulary("abc")
    session = Session(FakeModel(vocabulary, random_logits(vocabulary.size)))
    whole = session.generate("abc", max_tokens=8, ignore_end=True, stop="never")
    with session.stream(
        "abc", max_tokens=8, ignore_end=True, sampling=SamplingParams(seed=whole.seed)
    ) as running:
        next(iter(running))
    assert session.engine.num_running == 0 and running.records
    other = session.stream("abc", max_tokens=8)
    other.close()
    other.close()
    assert session.engine.num_running == 0 and not other.records


def test_every_public_name_is_documented() -> None:
    text = (Path(__file__).parents[1] / "docs" / "python.md").read_text(encoding="utf-8")
    names = text[text.index("## Every name") :]
    assert {name for name in outrider.__all__ if f"`{name}`" not in names} == set()
    cells = [row.split(" | ")[0] for row in names.splitlines() if row.startswith("| `")]
    listed = {name for cell in cells for name in cell.split("`")[1::2]}
    assert listed == set(outrider.__all__)
