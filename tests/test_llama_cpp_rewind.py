"""Which tiny models forget tokens on the llama.cpp backend, how far, and what is left then."""

from bisect import bisect_left
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_cpp_models import SMALL, TEXT, Load, assert_near, next_rows, one_by_one, store, tiny
from outrider.backends.gguf.library import lib
from outrider.core.errors import (
    RewindUnsupported,
)
from outrider.core.params import SamplingParams
from outrider.drafters.suffix import SuffixDrafter
from outrider.session import Session

__all__ = ["tiny"]  # pytest finds the fixture by its name

# Rewinding


@pytest.mark.parametrize("arch", ["llama", "qwen2moe", "gemma3"])
def test_truncating_and_going_on_is_like_never_having_been_there(tiny: Load, arch: str) -> None:
    weights = tiny(arch)

    @settings(max_examples=15)
    @given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=5))
    def check(rounds: list[tuple[int, int]]) -> None:
        model = weights.open(256, max_sequences=2)
        stored: tuple[int, ...] = ()
        for i, (grow, shrink) in enumerate(rounds):
            more = TEXT[31 * i : 31 * i + grow]
            store(model, more)
            store(model, more[:1], sequence=1)  # a neighbour that nothing should touch
            stored = (stored + more)[: max(0, len(stored) + grow - shrink)]
            model.truncate(0, len(stored))
            assert (model.length(0), model.length(1)) == (len(stored), i + 1)
        expected = one_by_one(weights, (*stored, *TEXT[-3:]))[-3:]
        assert_near(next_rows(model, TEXT[-3:]), expected)
        model.close()

    check()


@pytest.mark.parametrize(
    ("arch", "full_window", "kind"),
    [
        ("llama", False, "free"),
        ("qwen2moe", True, "free"),
        ("gemma3", True, "free"),
        ("gemma3", False, "window"),
        ("mamba", True, "none"),
        ("jamba", True, "none"),
    ],
)
def test_what_a_model_can_forget_is_known_when_it_is_loaded(
    tiny: Load, arch: str, full_window: bool, kind: str
) -> None:
    weights = tiny(arch, replace(SMALL, full_window=full_window))
    model = weights.open(64)
    assert weights.rewind == model.rewind == kind
    model.close()


@pytest.mark.parametrize("num_stored", [40, 300, 333, 480])
def test_a_window_is_rewound_exactly_as_far_as_it_reaches(
    tiny: Load, monkeypatch: pytest.MonkeyPatch, num_stored: int
) -> None:
    weights = tiny("gemma3", replace(SMALL, full_window=False))

    def allowed(length: int) -> bool:
        model = weights.open(512)
        store(model, TEXT[:num_stored])
        kept = length
        try:
            model.truncate(0, length)
        except RewindUnsupported:
            kept = num_stored
        assert model.length(0) == kept
        assert_near(next_rows(model, [7, 8]), one_by_one(weights, (*TEXT[:kept], 7, 8))[-2:])
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
    monkeypatch.setattr(lib, "llama_memory_seq_pos_min", lambda _memory, _sequence: 0)
    model = weights.open(512)
    store(model, TEXT[:num_stored])
    model.truncate(0, first - 1)
    wrong, right = next_rows(model, [7]), one_by_one(weights, (*TEXT[: first - 1], 7))[-1:]
    assert np.abs(wrong - right).max() > 0.01
    model.close()


@pytest.mark.parametrize("arch", ["mamba", "jamba"])
def test_a_recurrent_state_forgets_everything_or_nothing(tiny: Load, arch: str) -> None:
    weights = tiny(arch)
    expected = one_by_one(weights, TEXT[:11])
    model = weights.open(64, max_sequences=2)
    store(model, TEXT[:10])
    store(model, TEXT[:4], sequence=1)
    for length in (1, 5, 9):
        with pytest.raises(RewindUnsupported):
            model.truncate(0, length)
    model.truncate(0, 10)
    assert_near(next_rows(model, TEXT[10:11]), expected[10:])
    model.truncate(0, 0)
    assert (model.length(0), model.length(1)) == (0, 4)
    assert_near(next_rows(model, TEXT[:5]), expected[:5])
    assert_near(next_rows(model, TEXT[4:5], 1), expected[4:5])
    model.close()


def test_a_recurrent_target_decodes_plainly_and_says_so(tiny: Load) -> None:
    weights = tiny("mamba")
    tokens = list(TEXT[:6])
    while len(tokens) < 30:
        tokens.append(int(one_by_one(weights, tokens)[-1].argmax()))
    session = Session(weights.open(128), [SuffixDrafter()])
    greedy = SamplingParams(temperature=0)
    completion = session.generate(TEXT[:6], max_tokens=24, sampling=greedy, ignore_end=True)
    assert list(completion.tokens) == tokens[6:]
    assert all(not record.draft.tokens for record in completion.records)
    assert len(session.notices) == 1 and "cannot forget" in session.notices[0]
