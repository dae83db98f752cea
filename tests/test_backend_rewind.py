"""Forgetting and copying tokens, on every backend: how far it goes, and what is left then."""

import random
from bisect import bisect_left
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import REFUSED, Backend, Kept, Native, assert_near, backend, next_rows, over, over_all, store
from examples import examples
from kinds import CHECKPOINTS, FREE, KINDS, UNFORGETTING
from llama_cpp_models import TEXT
from outrider.core.data import Span
from outrider.core.errors import RewindUnsupported
from outrider.core.params import SamplingParams
from outrider.drafters.lookup import SuffixDrafter
from outrider.session import Session
from tiny_gguf import SLIDING_WINDOW

__all__ = ["backend"]  # pytest finds the fixture by its name


@over(*KINDS)
def test_what_a_model_can_forget_is_known_when_it_is_loaded(backend: Backend, kind: str) -> None:
    model = backend.open(kind)
    assert model.rewinding.kind == KINDS[kind].rewind
    model.close()


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
    model.close()


@over(*CHECKPOINTS, *UNFORGETTING)
def test_a_recurrent_state_forgets_everything_or_nothing(backend: Backend, kind: str) -> None:
    model = backend.open(kind)
    store(model, TEXT[:10])
    for length in (1, 5, 9):
        with pytest.raises(RewindUnsupported):
            model.truncate(0, length)
        assert model.length(0) == 10 and model.reach(0, length) == 0
    assert_near(next_rows(model, TEXT[10:11]), backend.expected(TEXT[:11], kind)[10:])
    model.close()


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
    model.close()


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
    model.close()


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
    model.close()


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
    model.close()


@over("whole window")
def test_a_whole_window_is_rewound_over_more_than_its_width(backend: Backend, kind: str) -> None:
    expected = backend.expected(TEXT[:128], kind)
    model = backend.open(kind, 128)
    store(model, TEXT[:120])
    for length in (120 - SLIDING_WINDOW, 70, 3):
        model.truncate(0, length)
        assert_near(next_rows(model, TEXT[length : length + 20]), expected[length : length + 20])
        model.truncate(0, length)
    model.close()


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
    model.close()


@over("window", *UNFORGETTING)
def test_what_keeps_no_state_of_every_part_is_not_copied(backend: Backend, kind: str) -> None:
    model = backend.open(kind, max_sequences=2)
    store(model, TEXT[:6])
    with pytest.raises(RewindUnsupported):
        model.copy(0, 1, 6)
    assert (model.length(0), model.length(1)) == (6, 0)
    assert_near(next_rows(model, TEXT[6:7]), backend.expected(TEXT[:7], kind)[-1:])
    model.close()


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


@over(*FREE, "window")
def test_truncating_and_going_on_is_like_never_having_been_there(backend: Backend, kind: str) -> None:
    @settings(max_examples=examples(15))
    @given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 12)), min_size=1, max_size=5))
    def check(rounds: list[tuple[int, int]]) -> None:
        with closing(backend.open(kind, 256, max_sequences=2)) as model:
            stored: tuple[int, ...] = ()
            for i, (grow, shrink) in enumerate(rounds):
                more = TEXT[31 * i : 31 * i + grow]
                store(model, more)
                store(model, more[:1], sequence=1)  # a neighbour that nothing should touch
                stored = (stored + more)[: max(0, len(stored) + grow - shrink)]
                model.truncate(0, len(stored))
                assert (model.length(0), model.length(1)) == (len(stored), i + 1)
            expected = backend.expected((*stored, *TEXT[-3:]), kind)[-3:]
            assert_near(next_rows(model, TEXT[-3:]), expected)

    check()


@over(*FREE)
@pytest.mark.parametrize("length", [1, 17, 40])
def test_a_copy_goes_its_own_way(backend: Backend, kind: str, length: int) -> None:
    model = backend.open(kind, 128, max_sequences=3)
    store(model, TEXT[:40])
    model.copy(0, 2, length)
    assert [model.length(s) for s in range(3)] == [40, 0, length]
    rows = model.decode([Span(0, TEXT[40:50], 40, 10), Span(2, TEXT[100:110], length, 10)])
    assert_near(rows[0], backend.expected(TEXT[:50], kind)[40:])
    assert_near(rows[1], backend.expected((*TEXT[:length], *TEXT[100:110]), kind)[length:])
    model.close()


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
    model.close()
