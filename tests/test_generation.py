"""What a session is asked for, and a running generation: reading it, leaving it, cancelling it."""

from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider.backends.fake import FakeModel, FakeVocabulary, random_logits, scripted_logits
from outrider.core.errors import InputError
from outrider.core.params import SamplingParams
from outrider.drafters.lookup import SuffixDrafter
from outrider.session import Session

GREEDY = SamplingParams(temperature=0)


def fake_session() -> Session:
    vocabulary = FakeVocabulary("abcdefgh, ")
    model = FakeModel(vocabulary, scripted_logits(vocabulary, "abc, "), max_sequences=1)
    return Session(model, [SuffixDrafter()])


def test_a_generation_gives_its_text_as_it_comes_and_its_completion_any_number_of_times() -> None:
    generation = fake_session().stream("abc, ", max_tokens=12, sampling=GREEDY)
    pieces = [update.text for update in generation]
    completion = generation.completion
    assert "".join(pieces) == completion.text == "abc, abc, ab"
    assert generation.completion is completion and list(generation) == []
    assert tuple(generation.records) == completion.records


def test_asking_for_the_completion_runs_what_is_left() -> None:
    generation = fake_session().stream("abc, ", max_tokens=12, sampling=GREEDY)
    iterator = iter(generation)
    next(iterator)
    assert generation.completion.text == "abc, abc, ab"
    assert next(iterator, None) is None


@pytest.mark.parametrize("num_updates", [0, 1, 2])
def test_a_cancelled_generation_ends_after_its_step(num_updates: int) -> None:
    session = fake_session()
    generation = session.stream("abc, ", max_tokens=200, sampling=GREEDY)
    iterator = iter(generation)
    texts = [next(iterator).text for _ in range(num_updates)]
    generation.cancel()
    generation.cancel()
    texts += [update.text for update in iterator]
    completion = generation.completion
    assert completion.finish_reason == "cancelled" and completion.text == "".join(texts)
    assert len(completion.records) == max(num_updates, 1)
    assert session.generate("abc, ", max_tokens=5, sampling=GREEDY).text == "abc, "


@pytest.mark.parametrize("held", [True, False])
def test_leaving_the_loop_frees_the_sequence(held: bool) -> None:
    session = fake_session()
    generation = session.stream("abc, ", max_tokens=200, sampling=GREEDY)
    seen = ""
    for update in generation:
        seen += update.text
        if seen:
            break
    if held:  # what was made until then is its completion; nothing more is generated for it
        assert generation.completion.finish_reason == "cancelled"
        assert generation.completion.text == seen
    else:
        del generation
    assert session.generate("abc, ", max_tokens=5, sampling=GREEDY).text == "abc, "


def test_a_generation_that_was_never_begun_takes_no_sequence() -> None:
    session = fake_session()
    waiting = session.stream("abc, ", max_tokens=5, sampling=GREEDY)
    assert session.generate("abc, ", max_tokens=5, sampling=GREEDY).text == "abc, "
    assert waiting.completion.text == "abc, "


@pytest.mark.parametrize(
    ("prompt", "settings", "why"),
    [
        (None, {}, "prompt: it is a NoneType. Give a text, a conversation, or tokens."),
        (7, {}, "prompt: it is a int."),
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
