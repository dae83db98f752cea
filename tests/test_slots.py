"""What requests leave behind for others: who gets it, what is copied, and who makes room."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import (
    LANGUAGE,
    PROMPT,
    VOCABULARY,
    CheckedEngine,
    language_model,
    model_drafter,
    plain,
    request,
)
from engines import result as outcome_of
from examples import examples
from outrider.backends.fake import FakeModel
from outrider.core.contracts import Model
from outrider.core.errors import InputError
from outrider.engine import Engine

LONG = PROMPT * 20


def reused(engine: Engine, prompt: tuple[int, ...], scope: str = "") -> int:
    return engine.generate(request(prompt, scope)).reused_tokens


def test_a_shared_beginning_is_copied_and_stays_with_both() -> None:
    target = language_model(max_sequences=3)
    engine = Engine(target)
    mine, yours = (*LONG, *(0,) * 80), (*LONG, *(1,) * 70)
    assert reused(engine, mine) == 0
    assert reused(engine, yours) == len(LONG)
    assert reused(engine, mine) == len(mine) - 1
    assert reused(engine, yours) == len(yours) - 1


@pytest.mark.parametrize(("rewind", "shared"), [("free", len(LONG)), ("none", 0)])
def test_the_next_turn_goes_on_from_what_is_stored(rewind: str, shared: int) -> None:
    """A model that cannot rewind shares nothing but whole texts."""
    engine = Engine(language_model(max_sequences=2, rewind=rewind))
    first = engine.generate(request(LONG))
    assert reused(engine, (*LONG, *first.tokens, 3)) == len(LONG) + len(first.tokens) - 1
    assert reused(engine, (*LONG, 2)) == shared


def test_nothing_is_shared_across_scopes() -> None:
    engine = Engine(language_model(max_sequences=4))
    assert reused(engine, LONG, "one") == 0
    assert reused(engine, LONG, "two") == 0
    assert reused(engine, LONG, "one") == len(LONG) - 1


@pytest.mark.parametrize(("scope", "shared"), [("one", len(LONG)), ("two", 0)])
def test_a_running_request_shares_what_it_has_read_with_its_own_scope(scope: str, shared: int) -> None:
    engine = Engine(language_model(max_sequences=2))
    engine.submit(request((*LONG, 3), "one", max_tokens=50))
    while engine.step()[0].record.kind == "prefill":
        pass
    assert reused(engine, (*LONG, 2), scope) == shared


def test_what_was_used_longest_ago_makes_room() -> None:
    target = language_model(max_sequences=8, capacity_tokens=260)
    engine = Engine(target)
    texts = [tuple((token,) * 80) for token in range(4)]
    for text in texts[:3]:
        engine.generate(request(text))
    assert reused(engine, texts[0]) == 79  # used again
    assert reused(engine, texts[3]) == 0  # 1 had to go
    assert [reused(engine, texts[i]) for i in (0, 2)] == [79, 79]
    assert reused(engine, texts[1]) == 0
    assert engine.used_tokens <= 260


def test_little_is_kept_while_nothing_is_reused_and_more_where_it_would_have_been() -> None:
    target = language_model(max_sequences=40, context_length=1000, capacity_tokens=20_000)
    engine = Engine(target)
    texts = [tuple((i + j * (i + 2)) % 5 for j in range(900)) for i in range(4)]
    assert sum(reused(engine, text) for text in texts) < 900
    assert engine.used_tokens < 2100 + 1000  # two of the four were forgotten
    first = sum(reused(engine, text) for text in texts)
    for _ in range(3):
        last = sum(reused(engine, text) for text in texts)
    assert first < last == sum(len(text) - 1 for text in texts)
    assert engine.used_tokens > 3600


@pytest.mark.parametrize("between", ["another scope", "a reset"])
def test_what_may_not_be_reused_is_no_reason_to_keep_more(between: str) -> None:
    engine = Engine(language_model(max_sequences=40, context_length=1000, capacity_tokens=20_000))
    texts = [tuple((i + j * (i + 2)) % 5 for j in range(900)) for i in range(4)]
    for number in range(5):
        if between == "a reset":
            engine.reset()
        for text in texts:
            reused(engine, text, scope=str(number) if between == "another scope" else "")
    assert engine.used_tokens < 2100 + 1000  # as after the first time


def test_a_request_that_might_not_fit_beside_the_others_has_to_wait() -> None:
    engine = Engine(language_model(max_sequences=8, capacity_tokens=260))
    engine.submit(request(LONG, max_tokens=50))
    small, large = request((3,) * 50, max_tokens=60), request((3,) * 50, max_tokens=61)
    assert engine.has_room(small)
    assert not engine.has_room(large)
    with pytest.raises(InputError, match="no room"):
        engine.submit(large)
    engine.submit(small)
    while engine.step():
        pass
    assert engine.has_room(large)


@pytest.mark.parametrize("drafted", [False, True])
@settings(max_examples=examples(40))
@given(data=st.data())
def test_whatever_is_kept_copied_or_dropped_the_text_is_that_of_a_request_alone(
    drafted: bool, data: st.DataObject
) -> None:
    sequences, running = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 3))
    capacity = data.draw(st.integers(120, 400))
    options: dict[str, Any] = {"max_sequences": sequences, "capacity_tokens": capacity, "context_length": 120}
    drafters = [model_drafter(LANGUAGE, **options)] if drafted else []
    engine = CheckedEngine(FakeModel(VOCABULARY, LANGUAGE, **options), drafters)
    engine.engine.max_running = min(running, sequences)
    stems = [PROMPT * 8, (3, *PROMPT * 8), (2, 1)]
    waiting = [
        request(
            (*data.draw(st.sampled_from(stems)), *data.draw(st.lists(st.integers(0, 4), max_size=6))),
            data.draw(st.sampled_from(["", "other"])),
            data.draw(st.integers(1, 20)),
        )
        for _ in range(data.draw(st.integers(1, 8)))
    ]
    started = []
    while waiting or engine.engine.num_running:
        if waiting and engine.engine.has_room(waiting[0]):
            started.append((engine.submit(waiting[0]), waiting.pop(0)))
        if data.draw(st.integers(0, 15)) == 0 and started:
            engine.engine.cancel(started[-1][0])
        engine.step()
        assert engine.engine.used_tokens <= max(capacity, 120)
    for request_id, made in started:
        tokens, text, _ = outcome_of(engine.outcomes[request_id])
        alone = plain(language_model(context_length=120), made)
        assert alone[0][: len(tokens)] == tokens
        assert alone[1].startswith(text)


def num_evaluated(model: Model) -> int:
    assert isinstance(model, FakeModel)
    return sum(len(span.tokens) for call in model.calls for span in call)


def test_the_draft_model_makes_room_and_copies_too() -> None:
    drafter = model_drafter(LANGUAGE, max_sequences=4, capacity_tokens=240)
    engine = Engine(language_model(max_sequences=4), [drafter])
    mine, yours = (*LONG, *(0,) * 80), (*LONG, *(1,) * 70)
    engine.generate(request(mine))
    before = num_evaluated(drafter.model)
    engine.generate(request(yours))
    assert num_evaluated(drafter.model) - before < 70 + 20  # the beginning was not read again
    for token in (2, 3):
        engine.generate(request((token,) * 100))
