"""What a model stores of a sequence, saved and restored on every backend: as if evaluated there."""

from contextlib import closing
from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from backends import (
    MAINLINE,
    NATIVE,
    REFUSED,
    Backend,
    Native,
    assert_near,
    backend,
    next_rows,
    over,
    over_all,
    store,
)
from kinds import CHECKPOINTS, FREE, KINDS
from llama_cpp_models import TEXT
from outrider.core.contracts import Extent, SavedState, SavingModel
from outrider.core.data import Span
from outrider.core.errors import BackendError

__all__ = ["backend"]  # pytest finds the fixture by its name

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
