"""A running generation: reading it, leaving it, cancelling it."""

import pytest

from outrider.backends.fake import FakeModel, FakeVocabulary, scripted_logits
from outrider.core.params import SamplingParams
from outrider.drafters.suffix import SuffixDrafter
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


def test_an_error_in_the_loop_frees_the_sequence() -> None:
    session = fake_session()
    with pytest.raises(ZeroDivisionError):
        for _ in session.stream("abc, ", max_tokens=200):
            raise ZeroDivisionError
    assert session.generate("abc, ", max_tokens=5, sampling=GREEDY).text == "abc, "


def test_a_generation_that_was_never_begun_takes_no_sequence() -> None:
    session = fake_session()
    waiting = session.stream("abc, ", max_tokens=5, sampling=GREEDY)
    assert session.generate("abc, ", max_tokens=5, sampling=GREEDY).text == "abc, "
    assert waiting.completion.text == "abc, "
