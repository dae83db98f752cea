"""The llama.cpp backend's calls, on tiny models: what they return, and what a bad one does."""

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_cpp_models import SMALL, TEXT, Load, assert_near, next_rows, one_by_one, store, tiny
from outrider.backends.gguf import Weights
from outrider.backends.gguf.library import lib
from outrider.core.data import Span
from outrider.core.errors import (
    BackendError,
    ModelFileError,
    OutOfMemory,
)
from tiny_gguf import ARCHITECTURES

__all__ = ["tiny"]  # pytest finds the fixture by its name

# Rows

calls = st.lists(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 14), st.integers(0, 14)),
        min_size=1,
        max_size=3,
        unique_by=lambda span: span[0],
    ),
    min_size=1,
    max_size=4,
)
"""Calls of spans (sequence, tokens, rows), in any order of the sequences"""


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_rows_are_those_asked_for_in_the_order_of_the_spans(tiny: Load, arch: str) -> None:
    weights = tiny(arch)
    texts = [TEXT[50 * s : 50 * s + 56] for s in range(3)]
    expected = [one_by_one(weights, text) for text in texts]

    @settings(max_examples=12)
    @given(calls)
    def check(calls: list[list[tuple[int, int, int]]]) -> None:
        model = weights.open(256, max_sequences=3)
        for call in calls:
            spans = []
            for sequence, num_tokens, rows in call:
                start = model.length(sequence)
                tokens = texts[sequence][start : start + num_tokens]
                spans.append(Span(sequence, tokens, start, min(rows, num_tokens)))
            results = model.decode(spans)
            assert len(results) == len(spans)
            for span, rows_of_span in zip(spans, results, strict=True):
                end = span.start + len(span.tokens)
                assert rows_of_span.shape == (span.rows, weights.vocabulary.size)
                wanted = expected[span.sequence][end - span.rows : end]
                assert_near(rows_of_span, wanted)
                assert model.length(span.sequence) == end
        model.close()

    check()


def test_rows_are_views_of_the_buffer_that_the_c_api_shows(
    tiny: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts: list[Any] = []
    real = lib.llama_decode

    def spy(context: Any, batch: Any) -> int:
        contexts.append(context)
        return int(real(context, batch))

    monkeypatch.setattr(lib, "llama_decode", spy)
    model = tiny().open(64, max_sequences=3)
    spans = [Span(2, TEXT[:3], 0, 2), Span(0, TEXT[3:12], 0, 0), Span(1, TEXT[12:17], 0, 5)]
    rows = model.decode(spans)
    assert [r.shape[0] for r in rows] == [2, 0, 5]
    for row, index in zip([*rows[0], *rows[2]], [1, 2, 12, 13, 14, 15, 16], strict=True):
        pointer = lib.llama_get_logits_ith(contexts[-1], index)
        assert row.ctypes.data == ctypes.addressof(pointer.contents)
        assert not row.flags.owndata
    np.testing.assert_array_equal(
        rows[0][1], np.ctypeslib.as_array(lib.llama_get_logits_ith(contexts[-1], 2), (289,))
    )
    model.close()


def test_the_last_row_allowed_is_given(tiny: Load) -> None:
    weights = tiny(options=replace(SMALL, max_rows=5))
    model = weights.open(64)
    assert_near(next_rows(model, TEXT[:5]), one_by_one(weights, TEXT[:5]))
    model.close()


def test_more_sequences_than_rows_can_be_open(tiny: Load) -> None:
    weights = tiny(options=replace(SMALL, max_rows=1))
    model = weights.open(32, max_sequences=8)
    store(model, TEXT[:3], sequence=7)
    assert_near(next_rows(model, TEXT[3:4], 7), one_by_one(weights, TEXT[:4])[3:])
    model.close()


def test_a_whole_context_can_be_filled_in_chunks(tiny: Load) -> None:
    weights = tiny()
    model = weights.open(256)
    store(model, TEXT[:255])
    row = next_rows(model, TEXT[255:256])
    assert_near(row, one_by_one(weights, TEXT[:256])[-1:])
    model.close()


def test_a_sequence_has_no_room_of_its_neighbour(tiny: Load) -> None:
    model = tiny().open(128, max_sequences=2)
    store(model, TEXT[:128])
    with pytest.raises(OutOfMemory, match="context of 128"):
        model.decode([Span(0, TEXT[128:129], 128, 1)])
    store(model, TEXT[:128], sequence=1)
    assert (model.length(0), model.length(1)) == (128, 128)
    model.close()


# Calls that break the contract

BAD_CALLS: dict[str, list[Span]] = {
    "no spans": [],
    "no tokens": [Span(0, (), 4, 0)],
    "starts too late": [Span(0, (1,), 5, 1)],
    "starts too early": [Span(0, (1,), 3, 1)],
    "starts below zero": [Span(0, (1,), -1, 1)],
    "negative sequence": [Span(-1, (1,), 2, 1)],
    "unknown sequence": [Span(3, (1,), 0, 1)],
    "one sequence twice": [Span(0, (1,), 4, 1), Span(0, (2,), 4, 1)],
    "a good span, then a bad one": [Span(0, (1, 2), 4, 1), Span(1, (1,), 7, 1)],
    "more rows than tokens": [Span(1, (5,), 2, 1), Span(0, (1, 2), 4, 3)],
    "negative rows": [Span(0, (1, 2), 4, -1)],
    "too many rows": [Span(0, (1,) * 9, 4, 9)],
    "too many rows together": [Span(0, (1,) * 5, 4, 5), Span(1, (1,) * 4, 2, 4)],
    "too many tokens": [Span(0, (1,) * 33, 4, 0)],
    "too many tokens together": [Span(0, (1,) * 20, 4, 0), Span(1, (1,) * 20, 2, 0)],
    "negative token": [Span(0, (1, -1), 4, 1)],
    "token past the end": [Span(0, (289,), 4, 1)],
    "token of 33 bits": [Span(0, (2**32 + 1,), 4, 1)],
    "token of 70 bits": [Span(0, (2**70,), 4, 1)],
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_bad_call_is_refused_and_changes_nothing(tiny: Load, case: str) -> None:
    weights = tiny(options=replace(SMALL, max_rows=8, batch_tokens=32))
    model = weights.open(64, max_sequences=3)
    store(model, TEXT[:4])
    store(model, TEXT[10:12], sequence=1)
    with pytest.raises(BackendError) as caught:
        model.decode(BAD_CALLS[case])
    assert not isinstance(caught.value, OutOfMemory) and caught.value.why
    assert [model.length(s) for s in range(3)] == [4, 2, 0]
    rows = model.decode([Span(1, TEXT[12:14], 2, 1), Span(0, TEXT[4:6], 4, 2)])
    assert_near(rows[1], one_by_one(weights, TEXT[:6])[-2:])
    assert_near(rows[0], one_by_one(weights, TEXT[10:14])[-1:])
    model.close()


@pytest.mark.parametrize(("sequence", "length"), [(-1, 0), (2, 0), (0, -1), (0, 5), (1, 1)])
def test_a_bad_truncation_is_refused_and_changes_nothing(tiny: Load, sequence: int, length: int) -> None:
    weights = tiny()
    model = weights.open(64, max_sequences=2)
    store(model, TEXT[:4])
    with pytest.raises(BackendError):
        model.truncate(sequence, length)
    assert (model.length(0), model.length(1)) == (4, 0)
    assert_near(next_rows(model, TEXT[4:5]), one_by_one(weights, TEXT[:5])[-1:])
    model.close()


@pytest.mark.parametrize("sequence", [-1, 2])
def test_the_length_of_a_sequence_that_is_none_is_an_error(tiny: Load, sequence: int) -> None:
    model = tiny().open(64, max_sequences=2)
    with pytest.raises(BackendError):
        model.length(sequence)
    model.close()


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
@pytest.mark.parametrize("status", [1, 2, -1, -3])
def test_a_failed_call_stores_nothing(
    tiny: Load, monkeypatch: pytest.MonkeyPatch, arch: str, status: int
) -> None:
    weights = tiny(arch)
    model = weights.open(64, max_sequences=2)
    store(model, TEXT[:4])
    store(model, TEXT[10:12], sequence=1)
    real = lib.llama_decode
    monkeypatch.setattr(lib, "llama_decode", lambda context, batch: real(context, batch) or status)
    with pytest.raises(OutOfMemory if status == 1 else BackendError):
        model.decode([Span(0, TEXT[20:39], 4, 1), Span(1, (1, 2), 2, 0)])
    monkeypatch.undo()
    assert (model.length(0), model.length(1)) == (4, 2)
    rows = model.decode([Span(0, TEXT[4:6], 4, 2), Span(1, TEXT[12:13], 2, 1)])
    assert_near(rows[0], one_by_one(weights, TEXT[:6])[-2:])
    assert_near(rows[1], one_by_one(weights, TEXT[10:13])[-1:])
    model.close()


@pytest.mark.parametrize("arch", ["llama", "mamba"])
def test_a_call_that_is_interrupted_when_it_returns_stores_nothing_wrong(
    tiny: Load, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    weights = tiny(arch)
    model = weights.open(64)
    store(model, TEXT[:4])
    real = lib.llama_decode

    def interrupted(context: Any, batch: Any) -> int:
        real(context, batch)
        raise KeyboardInterrupt

    monkeypatch.setattr(lib, "llama_decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.decode([Span(0, TEXT[4:9], 4, 1)])
    monkeypatch.undo()
    kept = model.length(0)
    assert kept == (4 if arch == "llama" else 0)
    assert_near(next_rows(model, TEXT[kept:12])[-1:], one_by_one(weights, TEXT[:12])[-1:])
    model.close()


def test_a_context_is_as_long_as_was_asked_for(tiny: Load) -> None:
    model = tiny().open(20, max_sequences=2)
    assert model.context_length == 20
    store(model, TEXT[:20], sequence=1)
    with pytest.raises(BackendError):
        model.decode([Span(1, (1,), 20, 1)])
    model.close()


@pytest.mark.parametrize("arch", ["mamba", "gemma3"])
def test_a_sequence_that_a_failed_call_spoilt_starts_anew(
    tiny: Load, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    weights = tiny(arch, replace(SMALL, full_window=False))
    model = weights.open(512)
    store(model, TEXT[:100])
    real = lib.llama_decode
    monkeypatch.setattr(lib, "llama_decode", lambda context, batch: real(context, batch) or -3)
    with pytest.raises(BackendError):
        model.decode([Span(0, TEXT[:300], 100, 1)])
    monkeypatch.undo()
    assert model.length(0) == 0
    assert_near(next_rows(model, TEXT[:5]), one_by_one(weights, TEXT[:5]))
    model.close()


def test_a_failure_names_what_the_library_said_of_this_call(
    tiny: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny().open(64)
    with pytest.raises(ModelFileError):
        Weights(Path("none.gguf"))  # what is logged here is of no concern to the call
    monkeypatch.setattr(lib, "llama_decode", lambda _context, _batch: -3)
    with pytest.raises(BackendError, match="llama_decode failed with status -3"):
        model.decode([Span(0, (1,), 0, 1)])
    model.close()


def test_a_model_without_logits_is_an_error_rather_than_a_crash(
    tiny: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny().open(64)
    monkeypatch.setattr(lib, "llama_get_logits", lambda _context: None)
    with pytest.raises(BackendError, match="no logits"):
        model.decode([Span(0, (1,), 0, 1)])
    model.close()
