"""Calls to a model, on every backend: what they return, and what a bad or failing one leaves behind."""

import ctypes
import gc
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import (
    NATIVE,
    REFUSED,
    Backend,
    Native,
    assert_near,
    backend,
    next_rows,
    over,
    over_all,
    over_native,
    store,
)
from examples import examples
from kinds import CHECKPOINTS, FREE, KINDS, UNFORGETTING
from llama_cpp_models import TEXT, resident_bytes
from outrider.backends.gguf.model import Weights
from outrider.core.data import Span
from outrider.core.errors import BackendError, ModelFileError, OutOfMemory
from tiny_gguf import write_tiny

__all__ = ["backend"]  # pytest finds the fixture by its name

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


# Rows


@over(*KINDS, names=NATIVE)
def test_a_first_call_over_the_token_that_begins_texts_is_like_any_other(backend: Native, kind: str) -> None:
    begin = backend.weights(kind).vocabulary.bos
    assert begin is not None
    rows = []
    for further in ((), TEXT[:1]):
        with closing(backend.open(kind)) as model:
            [found] = model.decode([Span(0, (begin, *further), 0, 1 + len(further))])
            rows.append(found[0].copy())
    assert_near(rows[0], rows[1])


@over(*KINDS)
def test_rows_are_those_asked_for_in_the_order_of_the_spans(backend: Backend, kind: str) -> None:
    texts = [TEXT[50 * s : 50 * s + 56] for s in range(3)]
    expected = [backend.expected(text, kind) for text in texts]

    @settings(max_examples=examples(12))
    @given(calls)
    def check(calls: list[list[tuple[int, int, int]]]) -> None:
        with closing(backend.open(kind, 256, max_sequences=3)) as model:
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
                    assert rows_of_span.shape == (span.rows, model.vocabulary.size)
                    assert_near(rows_of_span, expected[span.sequence][end - span.rows : end])
                    assert model.length(span.sequence) == end

    check()


@over_native
def test_rows_are_views_of_the_buffer_that_the_c_api_shows(backend: Native) -> None:
    row_of = backend.functions.llama_get_logits_ith
    row_of.restype, row_of.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int32]
    model = backend.open(max_sequences=3)
    spans = [Span(2, TEXT[:3], 0, 2), Span(0, TEXT[3:12], 0, 0), Span(1, TEXT[12:17], 0, 5)]
    rows = model.decode(spans)
    assert [r.shape[0] for r in rows] == [2, 0, 5]
    for row, index in zip([*rows[0], *rows[2]], [1, 2, 12, 13, 14, 15, 16], strict=True):
        assert row.ctypes.data == row_of(model._native.pointer, index)
        assert not row.flags.owndata


# Many sequences, and the room for them


@over_all
def test_more_sequences_than_rows_can_be_open(backend: Backend) -> None:
    model = backend.open(context_length=32, max_sequences=8, max_rows=1)
    store(model, TEXT[:3], sequence=7)
    assert_near(next_rows(model, TEXT[3:4], 7), backend.expected(TEXT[:4])[3:])


@over_all
@pytest.mark.parametrize("length", [20, 128])
def test_a_context_is_as_long_as_was_asked_for_and_has_no_room_of_its_neighbour(
    backend: Backend, length: int
) -> None:
    model = backend.open(context_length=length, max_sequences=2)
    assert model.context_length == length
    store(model, TEXT[:length], sequence=1)
    with pytest.raises(REFUSED):
        model.decode([Span(1, (1,), length, 1)])
    store(model, TEXT[:length])
    assert (model.length(0), model.length(1)) == (length, length)


@over("dense", "whole window")
def test_sequences_share_a_capacity_and_give_it_back(backend: Backend, kind: str) -> None:
    model = backend.open(kind, 256, max_sequences=3, capacity_tokens=512)
    assert (model.context_length, model.capacity_tokens) == (256, 512)
    for sequence in (0, 1):
        store(model, TEXT[:256], sequence)
    with pytest.raises(REFUSED):
        model.decode([Span(2, TEXT[100:140], 0, 1)])
    assert [model.length(s) for s in range(3)] == [256, 256, 0]
    model.truncate(0, 200)
    expected = backend.expected(TEXT[100:150], kind)
    assert_near(next_rows(model, TEXT[100:150], 2), expected)


@over(*FREE)
def test_room_in_pieces_is_room(backend: Backend, kind: str) -> None:
    """Sequences that grow in turn and are rewound leave free cells here and there."""
    model = backend.open(kind, 128, max_sequences=4, capacity_tokens=256)
    for start in range(0, 64, 4):
        for sequence in range(4):
            store(model, TEXT[start : start + 4], sequence)
    for sequence in (0, 2):
        model.truncate(sequence, 12)
    expected = backend.expected(TEXT[:128], kind)
    assert_near(next_rows(model, TEXT[64:128], 1), expected[64:])
    assert_near(next_rows(model, TEXT[64:66], 3), expected[64:66])
    assert_near(next_rows(model, TEXT[12:20], 2), expected[12:20])


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


@over_all
@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_bad_call_is_refused_and_changes_nothing(backend: Backend, case: str) -> None:
    model = backend.open(max_sequences=3, max_rows=8, batch_tokens=32)
    store(model, TEXT[:4])
    store(model, TEXT[10:12], sequence=1)
    with pytest.raises(REFUSED) as caught:
        model.decode(BAD_CALLS[case])
    assert not isinstance(caught.value, OutOfMemory) and str(caught.value)
    assert [model.length(s) for s in range(3)] == [4, 2, 0]
    rows = model.decode([Span(1, TEXT[12:14], 2, 1), Span(0, TEXT[4:6], 4, 2)])
    assert_near(rows[1], backend.expected(TEXT[:6])[-2:])
    assert_near(rows[0], backend.expected(TEXT[10:14])[-1:])


@over_all
@pytest.mark.parametrize("sequence", [-1, 2])
def test_the_length_of_a_sequence_that_is_none_is_an_error(backend: Backend, sequence: int) -> None:
    model = backend.open(max_sequences=2)
    with pytest.raises(REFUSED):
        model.length(sequence)


# Calls that fail


@over("dense", "whole window")
@pytest.mark.parametrize("status", [1, 2, -1, -3])
def test_a_failed_call_stores_nothing(backend: Backend, kind: str, status: int) -> None:
    model = backend.open(kind, max_sequences=2)
    store(model, TEXT[:4])
    store(model, TEXT[10:12], sequence=1)
    full = status == 1 and isinstance(backend, Native)
    with backend.failing(model, status), pytest.raises(OutOfMemory if full else BackendError):
        model.decode([Span(0, TEXT[20:39], 4, 1), Span(1, (1, 2), 2, 0)])
    assert (model.length(0), model.length(1)) == (4, 2)
    rows = model.decode([Span(0, TEXT[4:6], 4, 2), Span(1, TEXT[12:13], 2, 1)])
    assert_near(rows[0], backend.expected(TEXT[:6], kind)[-2:])
    assert_near(rows[1], backend.expected(TEXT[10:13], kind)[-1:])


@over(*FREE, *CHECKPOINTS, *UNFORGETTING)
def test_a_call_that_is_interrupted_when_it_returns_stores_nothing_wrong(backend: Backend, kind: str) -> None:
    model = backend.open(kind)
    store(model, TEXT[:4])
    with backend.interrupted(model), pytest.raises(KeyboardInterrupt):
        model.decode([Span(0, TEXT[4:9], 4, 1)])
    kept = model.length(0)
    assert kept in ((4,) if model.rewinding.is_free else (4, 0))
    assert_near(next_rows(model, TEXT[kept:12])[-1:], backend.expected(TEXT[:12], kind)[-1:])


@over(*CHECKPOINTS, *UNFORGETTING, "window", names=NATIVE)
def test_a_sequence_that_a_failed_call_spoilt_starts_again(backend: Backend, kind: str) -> None:
    model = backend.open(kind, 512)
    store(model, TEXT[:100])
    with backend.failing(model), pytest.raises(BackendError):
        model.decode([Span(0, TEXT[:300], 100, 1)])
    assert model.length(0) == 0
    assert_near(next_rows(model, TEXT[:5]), backend.expected(TEXT[:5], kind))


@over(*CHECKPOINTS, names=NATIVE)
def test_a_checkpoint_undoes_a_failed_call(backend: Backend, kind: str) -> None:
    model = backend.open(kind, 512)
    store(model, TEXT[:100])
    with backend.failing(model), pytest.raises(BackendError):
        model.decode([Span(0, TEXT[:30], 100, 1, checkpoint=True)])
    assert model.length(0) == 100
    assert_near(next_rows(model, (7,)), backend.expected((*TEXT[:100], 7), kind)[-1:])
    with backend.failing(model), pytest.raises(BackendError):
        model.decode([Span(0, TEXT[:30], 101, 1)])
    assert model.length(0) == 0
    store(model, TEXT[100:220])
    assert model.reach(0, 110) == 0


@over_native
def test_a_failure_names_what_the_library_said_of_this_call(backend: Native) -> None:
    model = backend.open()
    with pytest.raises(ModelFileError):  # what is logged here is of no concern to the call
        Weights(backend.path().with_name("none.gguf"), backend.options())
    with backend.failing(model), pytest.raises(BackendError, match="failed with status -3"):
        model.decode([Span(0, (1,), 0, 1)])


@over_native
def test_a_model_without_logits_is_an_error_rather_than_a_crash(
    backend: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = backend.open()
    monkeypatch.setattr(backend.functions, "llama_get_logits", lambda _context: None)
    with pytest.raises(BackendError, match="no logits"):
        model.decode([Span(0, (1,), 0, 1)])


# Native memory: freed once, when it is closed or when nobody refers to it


@over_all
def test_closing_twice_is_harmless(backend: Backend) -> None:
    model, other = backend.open(), backend.open()
    store(model, TEXT[:4])
    store(other, TEXT[:4])
    model.close()
    model.close()
    store(other, TEXT[4:8])
    assert other.length(0) == 8
    other.close()


@over_native
def test_a_closed_context_answers_with_errors(backend: Native) -> None:
    model = backend.open(max_sequences=2)
    store(model, TEXT[:4])
    model.close()
    with pytest.raises(BackendError, match="was closed"):
        model.decode([Span(0, (1,), 4, 1)])
    with pytest.raises(BackendError, match="was closed"):
        model.copy(0, 1, 4)
    for length in (0, 2, 4):
        with pytest.raises(BackendError, match="was closed"):
            model.truncate(0, length)


@over_native
def test_closed_weights_close_their_contexts_and_vocabulary(backend: Native, tmp_path: Path) -> None:
    weights = backend.fresh(tmp_path)
    vocabulary, model = weights.vocabulary, weights.open(64)
    store(model, TEXT[:4])
    weights.close()
    weights.close()
    asked: list[Callable[[], Any]] = [
        lambda: model.decode([Span(0, (1,), 4, 1)]),
        lambda: model.truncate(0, 1),
        lambda: weights.open(64),
        lambda: weights.metadata("general.name"),
        lambda: vocabulary.tokenize("text"),
        lambda: vocabulary.piece(3),
        lambda: vocabulary.spelling(3),
        lambda: vocabulary.is_control(3),
        lambda: vocabulary.ends_generation(3),
    ]
    for ask in asked:
        with pytest.raises(BackendError, match="was closed"):
            ask()
    model.close()


@over_native
def test_what_nobody_refers_to_is_freed_contexts_first(
    backend: Native, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[str] = []
    library = backend.weights().library

    def watch(owner: Any, name: str, what: str) -> None:
        real = getattr(owner, name)

        def free(pointer: Any) -> None:
            freed.append(what)
            real(pointer)

        monkeypatch.setattr(owner, name, free)

    watch(library.functions, "llama_free", "context")
    watch(library.functions, "llama_model_free", "weights")
    weights = backend.fresh(tmp_path)
    model, other = weights.open(64), weights.open(64)
    vocabulary = weights.vocabulary
    del weights, other
    gc.collect()
    assert freed == ["context"]
    store(model, TEXT[:4])  # a context keeps its weights
    del model
    gc.collect()
    assert freed == ["context"] * 2
    assert vocabulary.tokenize("the")  # and so does a vocabulary
    del vocabulary
    gc.collect()
    assert freed == ["context", "context", "weights"]
    model = backend.fresh(tmp_path).open(64)
    del model
    gc.collect()
    assert freed[3:] == ["context", "weights"]


@over_native
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_opening_and_closing_again_and_again_takes_no_memory(backend: Native, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "own.gguf", context_length=2048)

    def rounds(number: int) -> int:
        for _ in range(number):
            weights = Weights(path, backend.options())
            for _ in range(2):
                model = weights.open(2048, max_sequences=2)
                store(model, TEXT[:8])
                store(model, TEXT[:8], 1)
                model.truncate(0, 2)
                store(model, TEXT[:8])
                model.close()
            weights.close()
        gc.collect()
        return resident_bytes()

    before = rounds(5)
    # Each round maps a megabyte of KV and of weights: leaking either would show tenfold.
    assert rounds(20) - before < 8e6
