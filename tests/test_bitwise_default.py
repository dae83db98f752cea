"""Equal bits by default are given where they find the memory, and are never why a model cannot be opened."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from backends import FILES, NATIVE
from outrider.backends.bitwise import BitwiseModel, Equality, EqualSizes, Price
from outrider.backends.gguf.model import Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.tuning import equality
from outrider.backends.tuning.equality import open_target
from outrider.core.data import Span
from outrider.core.errors import OutOfMemory
from tiny_gguf import write_tiny

HUGE = 2_000_000_000


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Weights]:
    found = Equality(EqualSizes((1, 16)), price=Price(0.01, 0.0))
    monkeypatch.setattr(equality, "known_equality", lambda *_, **__: found)
    with closing(Weights(write_tiny(tmp_path / "tiny.gguf"), LoadOptions(threads=1))) as opened:
        yield opened


def test_where_they_are_nearly_free_they_are_the_default(weights: Weights) -> None:
    model, found = open_target(weights, 64)
    assert isinstance(model, BitwiseModel) and found is not None
    model.close()


@pytest.mark.parametrize(
    "found",
    [
        Equality(EqualSizes((1, 16)), price=Price(0.03, 0.0)),
        Equality(EqualSizes((1, 16)), price=Price(0.0, 0.03)),
        Equality(EqualSizes((1, 16))),
        Equality(None, "single tokens need padding"),
    ],
)
def test_where_they_cost_something_they_are_not(
    weights: Weights, monkeypatch: pytest.MonkeyPatch, found: Equality
) -> None:
    monkeypatch.setattr(equality, "known_equality", lambda *_, **__: found)
    model, none = open_target(weights, 64)
    assert not isinstance(model, BitwiseModel) and none is None
    model.close()


def test_without_the_memory_for_them_a_model_is_opened_without(
    weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> BitwiseModel:
        raise OutOfMemory("target", "there is no room", "Give a smaller context.")

    monkeypatch.setattr(equality, "_lanes", no_room)
    model, found = open_target(weights, 64)
    assert not isinstance(model, BitwiseModel) and found is None
    model.close()
    with pytest.raises(OutOfMemory):
        open_target(weights, 64, bitwise=True)


def test_an_impossible_context_is_named_as_it_was_asked_for(weights: Weights) -> None:
    with pytest.raises(OutOfMemory) as caught:
        open_target(weights, HUGE)
    assert f"context of {HUGE} tokens" in caught.value.what


def test_what_is_found_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    found = [Equality(EqualSizes((1, 16)), flash_attention="on", price=Price(0.01, 0.0))]
    monkeypatch.setattr(equality, "_find", lambda *_, **__: found.pop())
    expected = found[0]
    with closing(Weights(write_tiny(tmp_path / "tiny.gguf"), LoadOptions(threads=1))) as weights:
        for measure in (True, True, False):
            known = equality.known_equality(weights, lambda _part: None, measure=measure)
            assert known == expected


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_every_library_opens_what_it_runs(
    name: str, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both kinds of attention are tried; over a sliding window ik_llama.cpp is right with one of them."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(equality, "find_equality", lambda *_, **__: Equality(None, "padding"))
    path = write_tiny(tmp_path / "tiny.gguf", arch=arch)
    tokens = tuple(range(40, 72))  # past the window
    with closing(Weights(path, LoadOptions(threads=1, library=str(FILES[name].path)))) as weights:
        with closing(open_target(weights, 64)[0]) as model:
            assert (model.context_length, model.max_sequences) == (64, 1)
            rows = model.decode([Span(0, tokens, 0, len(tokens))])[0].copy()
        with closing(weights.open(64)) as plain:
            [expected] = plain.decode([Span(0, tokens, 0, len(tokens))])
            np.testing.assert_allclose(rows, expected, atol=1e-2)
