"""Forgetting and copying tokens, on every backend: how far it goes, and what is left then."""

import random
from bisect import bisect_left
from contextlib import closing
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import (
    MAINLINE,
    NATIVE,
    REFUSED,
    Backend,
    Kept,
    Native,
    assert_near,
    backend,
    next_rows,
    over,
    over_all,
    store,
)
from examples import examples
from kinds import CHECKPOINTS, FREE, KINDS, UNFORGETTING
from llama_cpp_models import TEXT
from outrider import Session
from outrider.core.contracts import Extent, SavedState, SavingModel
from outrider.core.data import Span
from outrider.core.errors import BackendError, RewindUnsupported
from outrider.core.params import SamplingParams
from outrider.drafters.lookup import SuffixDrafter

__all__ = ["backend"]  # pytest finds the fixture by its name


@over(*KINDS)
def test_what_a_model_can_forget_is_known_when_it_is_loaded(backend: Backend, kind: str) -> None:
    model = backend.open(kind)
    assert model.rewinding.kind == KINDS[kind].rewind


# Rewinding


@over("dense", *CHECKPOINTS, *UNFORGETTING)
def test_forgetting_everything_and_nothing_always_works(backend: Backend, kind: str) -> None:
    model = backend.open(kind, max_sequences=2)
    expected = backend.expected(TEXT[:11], kind)
    model.truncate(0, 0)
    store(model, TEXT[:10])
    store(model, TEXT[:4], sequence=1)
    model.truncate(0, 10)
    assert_near(next_rows(model, TEXT[10:11]), expected[10:])
    model.truncate(0, 0)
    assert (model.length(0), model.length(1)) == (0, 4)
    assert_near(next_rows(model, TEXT[:5]), expected[:5])
    assert_near(next_rows(model, TEXT[4:5], 1), expected[4:5])


@over(*CHECKPOINTS, *UNFORGETTING)
def test_a_recurrent_state_forgets_everything_or_nothing(backend: Backend, kind: str) -> None:
    model = backend.open(kind)
    store(model, TEXT[:10])
    for length in (1, 5, 9):
        with pytest.raises(RewindUnsupported):
            model.truncate(0, length)
        assert model.length(0) == 10 and model.reach(0, length) == 0
    assert_near(next_rows(model, TEXT[10:11]), backend.expected(TEXT[:11], kind)[10:])


@over(*CHECKPOINTS)
def test_a_state_goes_back_to_its_checkpoints(backend: Backend, kind: str) -> None:
    """Those of turns, and that of the last draft, as long as the text before them is the same."""
    model = backend.open(kind, 128, max_sequences=3)
    store(model, TEXT[:10])
    model.decode([Span(0, TEXT[10:14], 10, 0, is_turn=True), Span(1, TEXT[50:55], 0, 1)])
    model.decode([Span(0, TEXT[14:20], 14, 6, checkpoint=True)])
    assert [model.reach(0, length) for length in (20, 19, 14, 13, 10, 9)] == [20, 14, 14, 10, 10, 0]
    model.decode([Span(0, TEXT[20:22], 20, 0, is_turn=True)])
    model.copy(0, 2, 10)
    assert_near(next_rows(model, (7,), 2), backend.expected((*TEXT[:10], 7), kind)[-1:])
    model.truncate(0, 14)
    assert_near(next_rows(model, (8, 9)), backend.expected((*TEXT[:14], 8, 9), kind)[-2:])
    model.truncate(0, 10)
    store(model, TEXT[30:45])
    assert model.reach(0, 22) == 10
    model.truncate(0, 10)
    assert_near(next_rows(model, (5,)), backend.expected((*TEXT[:10], 5), kind)[-1:])
    assert_near(next_rows(model, (5,), 1), backend.expected((*TEXT[50:55], 5), kind)[-1:])
    model.truncate(0, 0)
    store(model, TEXT[:20])
    assert model.reach(0, 15) == 0


@over_all
@pytest.mark.parametrize(("sequence", "length"), [(-1, 0), (2, 0), (0, -1), (0, 5), (1, 1)])
def test_a_bad_truncation_is_refused_and_changes_nothing(
    backend: Backend, sequence: int, length: int
) -> None:
    model = backend.open(max_sequences=2)
    store(model, TEXT[:4])
    with pytest.raises(REFUSED):
        model.truncate(sequence, length)
    assert (model.length(0), model.length(1)) == (4, 0)
    assert_near(next_rows(model, TEXT[4:5]), backend.expected(TEXT[:5])[-1:])


@over("window")
def test_a_draft_can_always_be_taken_back_from_a_window(backend: Native, kind: str) -> None:
    rng = random.Random(0)
    model = backend.open(kind, 512, max_sequences=4)
    for _ in range(60):
        for sequence in range(4):
            if model.length(sequence) > 400:
                model.truncate(sequence, 0)
        chosen = [sequence for sequence in range(4) if rng.random() < 0.8] or [0]
        sizes = {sequence: rng.randrange(1, 33) for sequence in chosen}  # longer than the window, too
        spans = [Span(s, tuple(rng.choices(TEXT, k=n)), model.length(s), 1) for s, n in sizes.items()]
        model.decode(spans)
        for span in spans:
            length = span.start + rng.randrange(1, len(span.tokens) + 1)
            assert model.reach(span.sequence, length) == length
            model.truncate(span.sequence, length)


@over("window")
@pytest.mark.parametrize(
    "num_stored", [40, 333, *(pytest.param(n, marks=pytest.mark.slow) for n in (300, 480))]
)
def test_a_window_is_rewound_exactly_as_far_as_it_reaches(
    backend: Native, kind: str, num_stored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allowed(length: int) -> bool:
        model = backend.open(kind, 512)
        store(model, TEXT[:num_stored])
        kept = length
        try:
            model.truncate(0, length)
        except RewindUnsupported:
            kept = num_stored
        assert model.length(0) == kept
        assert_near(next_rows(model, [7, 8]), backend.expected((*TEXT[:kept], 7, 8), kind)[-2:])
        model.close()
        return kept == length

    lengths = range(1, num_stored + 1)
    first = lengths[bisect_left(lengths, True, key=allowed)]
    assert allowed(num_stored - 1)
    if num_stored == 40:
        assert first == 1
        return
    # One token less is refused, and rightly: with the check blinded, the answer would be wrong.
    assert first > 1
    monkeypatch.setattr(backend.functions, "llama_memory_seq_pos_min", lambda _memory, _sequence: 0)
    model = backend.open(kind, 512)
    store(model, TEXT[:num_stored])
    model.truncate(0, first - 1)
    wrong, right = next_rows(model, [7]), backend.expected((*TEXT[: first - 1], 7), kind)[-1:]
    assert np.abs(wrong - right).max() > 0.01


@over(*UNFORGETTING)
def test_a_recurrent_target_decodes_plainly_and_says_so(backend: Backend, kind: str) -> None:
    tokens = list(TEXT[:6])
    while len(tokens) < 30:
        tokens.append(int(backend.expected(tokens, kind)[-1].argmax()))
    session = Session(backend.open(kind, 128), [SuffixDrafter()])
    greedy = SamplingParams(temperature=0)
    completion = session.generate(TEXT[:6], max_tokens=24, sampling=greedy, ignore_end=True)
    assert list(completion.tokens) == tokens[6:]
    assert all(not record.draft.tokens for record in completion.records)
    assert len(session.notices) == 1 and "cannot forget" in session.notices[0]


# Copying


BAD_COPIES = {
    "of more than is stored": (0, 2, 5),
    "of nothing": (0, 2, 0),
    "of less than nothing": (0, 2, -1),
    "of an empty sequence": (2, 3, 1),
    "over another": (0, 1, 2),
    "over itself": (0, 0, 2),
    "of no sequence": (4, 2, 1),
    "of all sequences": (-1, 2, 1),
    "to no sequence": (0, 4, 1),
    "to all sequences": (0, -1, 1),
}


@over_all
@pytest.mark.parametrize("case", BAD_COPIES)
def test_a_bad_copy_is_refused_and_changes_nothing(backend: Backend, case: str) -> None:
    model = backend.open(max_sequences=4)
    store(model, TEXT[:4])
    store(model, TEXT[10:12], sequence=1)
    with pytest.raises(REFUSED):
        model.copy(*BAD_COPIES[case])
    assert [model.length(s) for s in range(4)] == [4, 2, 0, 0]
    assert_near(next_rows(model, TEXT[4:5]), backend.expected(TEXT[:5])[-1:])
    assert_near(next_rows(model, TEXT[12:13], 1), backend.expected(TEXT[10:13])[-1:])


@over("window", *UNFORGETTING)
def test_what_keeps_no_state_of_every_part_is_not_copied(backend: Backend, kind: str) -> None:
    model = backend.open(kind, max_sequences=2)
    store(model, TEXT[:6])
    with pytest.raises(RewindUnsupported):
        model.copy(0, 1, 6)
    assert (model.length(0), model.length(1)) == (6, 0)
    assert_near(next_rows(model, TEXT[6:7]), backend.expected(TEXT[:7], kind)[-1:])


# All of it in any order


@over(*KINDS)
def test_calls_rewinding_and_copying_in_any_order(backend: Backend, kind: str) -> None:
    operations = st.tuples(
        st.sampled_from(["grow", "grow", "shrink", "copy"]), st.integers(0, 2), st.integers(0, 30)
    )

    @settings(max_examples=examples(25))
    @given(st.lists(operations, min_size=4, max_size=16))
    def check(operations: list[tuple[str, int, int]]) -> None:
        # As little room as three texts of 64 tokens need, so that cells are used again.
        with closing(backend.open(kind, 64, max_sequences=3)) as model:
            kept = Kept(model, TEXT, 60, may_refuse="window" in kind or kind not in FREE)
            for operation in operations:
                kept.do(*operation)
                assert [model.length(s) for s in range(3)] == [len(text) for text in kept.texts]
            for sequence, text in enumerate(kept.texts):
                expected = backend.expected((*text, *TEXT[-2:]), kind)[-2:]
                assert_near(next_rows(model, TEXT[-2:], sequence), expected)

    check()


@over(*FREE)
def test_a_copy_outlives_what_it_was_copied_from(backend: Backend, kind: str) -> None:
    model = backend.open(kind, 64, max_sequences=3, capacity_tokens=256)
    store(model, TEXT[:40])
    model.copy(0, 1, 30)
    model.copy(1, 2, 20)
    model.truncate(0, 0)
    store(model, TEXT[200:230])  # into cells that are free again, if any are
    model.truncate(1, 25)
    expected = backend.expected(TEXT[:40], kind)
    assert_near(next_rows(model, TEXT[25:40], 1), expected[25:40])
    assert_near(next_rows(model, TEXT[20:40], 2), expected[20:40])
    assert_near(next_rows(model, TEXT[230:235]), backend.expected(TEXT[200:235], kind)[30:])


# Saving: what a model stores of a sequence, restored as if it had been evaluated there


LONG = TEXT[:90]


def opened(backend: Backend, kind: str, max_sequences: int = 2) -> SavingModel:
    return cast(SavingModel, backend.open(kind, 256, max_sequences=max_sequences))


def kept(state: SavedState) -> SavedState:
    """The same bytes, as a file would give them."""
    return SavedState(state.extent, tuple(np.frombuffer(part.tobytes(), np.uint8) for part in state.parts))


@over(*KINDS)
def test_what_was_saved_goes_on_in_another_context_as_if_it_had_been_evaluated_there(
    backend: Backend, kind: str
) -> None:
    expected = backend.expected((*LONG, *TEXT[90:95]), kind)[-5:]
    with closing(opened(backend, kind)) as model:
        store(model, TEXT[40:60])  # whose cells are not the first
        store(model, LONG, sequence=1)
        state = kept(model.save(1))
        assert state.extent.length == model.length(1) == len(LONG)
    with closing(opened(backend, kind, max_sequences=3)) as other:
        store(other, TEXT[100:130], sequence=1)
        other.restore(0, state)
        assert (other.length(0), other.length(1), other.length(2)) == (len(LONG), 30, 0)
        assert_near(next_rows(other, TEXT[90:95]), expected)
        after = backend.expected((*TEXT[100:130], TEXT[3]), kind)[-1:]
        assert_near(next_rows(other, TEXT[3:4], sequence=1), after)
        other.restore(2, state)  # as often as one likes
        assert_near(next_rows(other, TEXT[90:95], sequence=2), expected)


@over(*FREE, "window")
def test_what_was_restored_can_be_cut_where_the_extent_says(backend: Backend, kind: str) -> None:
    with closing(opened(backend, kind)) as model:
        store(model, LONG)
        if model.rewinding.is_free:
            model.copy(0, 1, 80)  # cells that two sequences share
        else:
            store(model, TEXT[:80], sequence=1)
        state = kept(model.save(1))
        model.truncate(0, 0)
        assert state.extent == Extent(80, 79 if kind == "window" else 0)
        for length in (80, 79, 50, 1):
            reach = state.extent.reach(length)
            model.truncate(1, 0)
            model.restore(1, state)
            assert model.reach(1, length) == reach
            model.truncate(1, reach)
            expected = backend.expected((*TEXT[:reach], 7, 8), kind)[-2:]
            assert_near(next_rows(model, (7, 8), sequence=1), expected)


@over(*CHECKPOINTS)
def test_checkpoints_are_saved_and_restored_too(backend: Backend, kind: str) -> None:
    with closing(opened(backend, kind)) as model:
        store(model, TEXT[:30])
        model.decode([Span(0, TEXT[30:40], 30, 0, is_turn=True)])
        model.decode([Span(0, TEXT[40:50], 40, 10, checkpoint=True)])
        state = kept(model.save(0))
        assert state.extent == Extent(50, 50, (30, 40))
        assert [state.extent.reach(n) for n in (29, 30, 39, 45, 50, 60)] == [0, 30, 30, 40, 50, 50]
        model.decode([Span(0, TEXT[60:70], 50, 10, checkpoint=True)])  # which writes over one of them
    for length in (50, 40, 30):
        with closing(opened(backend, kind)) as other:
            other.restore(1, state)
            assert other.reach(1, length) == length
            other.truncate(1, length)
            expected = backend.expected((*TEXT[:length], 7, 8), kind)[-2:]
            assert_near(next_rows(other, (7, 8), sequence=1), expected)


@over("dense", "delta net", "window", "unforgetting")
def test_a_restored_sequence_is_saved_and_copied_like_any_other(backend: Backend, kind: str) -> None:
    expected = backend.expected((*LONG, 7), kind)[-1:]
    with closing(opened(backend, kind, max_sequences=3)) as model:
        store(model, LONG)
        first = kept(model.save(0))
        model.restore(1, first)
        second = kept(model.save(1))
        assert second.extent.length == first.extent.length
        model.restore(2, second)
        assert_near(next_rows(model, (7,), sequence=2), expected)


@over_all
def test_what_cannot_be_saved_or_restored_is_refused(backend: Backend) -> None:
    with closing(opened(backend, "dense")) as model:
        with pytest.raises(REFUSED):
            model.save(0)
        store(model, TEXT[:10])
        state = model.save(0)
        with pytest.raises(REFUSED, match="not empty"):
            model.restore(0, state)
        long = opened(backend, "dense")
        with closing(cast(SavingModel, backend.open("dense", 8))) as short, closing(long):
            with pytest.raises(REFUSED):
                short.restore(0, state)
            assert short.length(0) == 0


@over("dense", "whole window", "delta net", names=MAINLINE)
def test_bytes_that_are_no_state_are_refused_and_leave_the_sequence_empty(backend: Native, kind: str) -> None:
    with closing(opened(backend, kind)) as model:
        store(model, TEXT[:20])
        store(model, TEXT[:5], sequence=1)
        state = model.save(0)
        model.truncate(0, 0)
        for wrong in (state.parts[0][:7], state.parts[0][: state.parts[0].size // 2], np.zeros(99, np.uint8)):
            with pytest.raises(BackendError):
                model.restore(0, replace(state, parts=(wrong, *state.parts[1:])))
            assert (model.length(0), model.length(1)) == (0, 5)
        store(model, TEXT[:20])
        assert_near(next_rows(model, TEXT[20:22]), backend.expected(TEXT[:22], kind)[-2:])
        assert_near(next_rows(model, TEXT[5:7], sequence=1), backend.expected(TEXT[:7], kind)[-2:])


@over("dense", names=NATIVE)
def test_where_there_is_no_room_nothing_is_restored(backend: Native, kind: str) -> None:
    with closing(opened(backend, kind)) as model:
        store(model, LONG)
        state = model.save(0)
    with closing(cast(SavingModel, backend.open(kind, 256, max_sequences=2, capacity_tokens=256))) as full:
        store(full, TEXT[:200], sequence=1)
        with pytest.raises(BackendError):
            full.restore(0, state)
        assert (full.length(0), full.length(1)) == (0, 200)
        full.truncate(1, 10)  # cells between others are free now
        full.restore(0, state)
        assert_near(next_rows(full, (7,)), backend.expected((*LONG, 7), kind)[-1:])
        expected = backend.expected((*TEXT[:10], 7), kind)[-1:]
        assert_near(next_rows(full, (7,), sequence=1), expected)
