"""Native memory on every native library: freed once, when it is closed or when nobody refers to it."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backends import Backend, Native, backend, over_all, over_native, store
from llama_cpp_models import TEXT, resident_bytes
from outrider.backends.gguf.model import Weights
from outrider.core.data import Span
from outrider.core.errors import BackendError
from tiny_gguf import write_tiny

__all__ = ["backend"]  # pytest finds the fixture by its name


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
