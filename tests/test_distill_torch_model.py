"""A network in PyTorch that fulfils the Model contract: what it stores, and that the engine runs on it."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

# What is imported below needs it, and it need not be installed.
# ruff: noqa: E402
torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tiny products take longer on more

from engines import asked
from llama_cpp_models import SMALL, TEXT
from outrider.backends.gguf import GgufModel, Weights
from outrider.core.data import Span
from outrider.core.errors import BackendError
from outrider.core.params import SamplingParams
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.lab.distill.checkpoint import read_gguf
from outrider.lab.distill.network import Network, TorchModel
from outrider.models.vocab import align
from outrider.policy import FixedPolicy
from tiny_gguf import write_tiny

Row = npt.NDArray[np.float32]

CONTEXT = 48


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("torch") / "tiny.gguf", confidence=2.0)


@pytest.fixture(scope="module")
def weights(path: Path) -> Iterator[Weights]:
    loaded = Weights(path, SMALL)
    yield loaded
    loaded.close()


@pytest.fixture
def native(weights: Weights) -> Iterator[GgufModel]:
    model = weights.open(256, max_sequences=2)
    yield model
    model.close()


def opened(path: Path, native: GgufModel, sequences: int = 6, context: int = CONTEXT) -> TorchModel:
    network = Network.of(read_gguf(path), 1, dtype=torch.float32, device=torch.device("cpu"))
    return TorchModel("torch", network, native.vocabulary, sequences, context)


@pytest.fixture
def model(path: Path, native: GgufModel) -> TorchModel:
    return opened(path, native)


@pytest.fixture
def alone(path: Path, native: GgufModel) -> TorchModel:
    """One that is given a token at a time."""
    return opened(path, native, sequences=1)


def rows_of(model: TorchModel, tokens: Sequence[int]) -> Row:
    """The logits after each token, evaluated alone and one at a time."""
    model.truncate(0, 0)
    rows = [model.decode([Span(0, (token,), i, 1)])[0][0].copy() for i, token in enumerate(tokens)]
    return np.array(rows)


def same(found: Row, expected: Row) -> None:
    """Equal up to the rounding of 32 bits."""
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_it_says_what_llama_cpp_says(native: GgufModel, alone: TorchModel) -> None:
    expected = np.array(native.decode([Span(0, TEXT[:30], 0, 30)])[0])
    np.testing.assert_allclose(rows_of(alone, TEXT[:30]), expected, rtol=0, atol=2e-3 * expected.std())


def test_sequences_of_different_lengths_share_a_call(model: TorchModel, alone: TorchModel) -> None:
    texts = {4: TEXT[:17], 0: TEXT[20:23], 3: TEXT[5:6], 1: TEXT[40:72]}
    found = model.decode([Span(s, text, 0, len(text)) for s, text in texts.items()])
    for rows, text in zip(found, texts.values(), strict=True):
        same(rows, rows_of(alone, text))
    assert [model.length(s) for s in range(6)] == [3, 32, 0, 1, 17, 0]


def test_only_the_wanted_rows_come_back_in_the_order_of_the_spans(
    model: TorchModel, alone: TorchModel
) -> None:
    spans = [Span(2, TEXT[:9], 0, 2), Span(0, TEXT[9:14], 0, 0), Span(1, TEXT[14:20], 0, 1)]
    found = model.decode(spans)
    assert [rows.shape for rows in found] == [(2, 289), (0, 289), (1, 289)]
    same(found[0], rows_of(alone, TEXT[:9])[-2:])
    same(found[2], rows_of(alone, TEXT[14:20])[-1:])
    assert model.decode([Span(5, TEXT[:3], 0, 0)])[0].shape == (0, 289)


def test_a_text_in_pieces_equals_the_whole(model: TorchModel, alone: TorchModel) -> None:
    whole = rows_of(alone, TEXT[:40])
    at = 0
    for size in (1, 7, 2, 30):
        rows = model.decode([Span(3, TEXT[at : at + size], at, size)])[0]
        same(rows, whole[at : at + size])
        at += size


def test_what_is_not_in_a_call_is_left_as_it_is(model: TorchModel, alone: TorchModel) -> None:
    model.decode([Span(s, TEXT[:20], 0, 0) for s in range(5)])
    before = [cache.clone() for cache in model._cache]
    model.decode([Span(s, TEXT[20 : 21 + 5 * s], 20, 1) for s in (0, 1, 3, 4)])
    for was, cache in zip(before, model._cache, strict=True):
        assert torch.equal(was[:, 2, :, :CONTEXT], cache[:, 2, :, :CONTEXT])
    assert model.length(2) == 20
    rows = model.decode([Span(2, TEXT[20:24], 20, 4)])[0]
    same(rows, rows_of(alone, TEXT[:24])[20:])


def test_padding_at_the_end_of_the_context_touches_nothing(model: TorchModel, alone: TorchModel) -> None:
    """A sequence that is full but for one token, in a call with a long span."""
    whole = rows_of(alone, TEXT[:CONTEXT])
    model.decode([Span(0, TEXT[: CONTEXT - 1], 0, 0)])
    rows = model.decode([Span(0, TEXT[CONTEXT - 1 : CONTEXT], CONTEXT - 1, 1), Span(1, TEXT[:30], 0, 30)])
    same(rows[0][0], whole[-1])
    same(rows[1], whole[:30])
    model.truncate(0, CONTEXT - 3)
    again = model.decode([Span(0, TEXT[CONTEXT - 3 : CONTEXT], CONTEXT - 3, 3), Span(1, TEXT[30:48], 30, 18)])
    same(again[0], whole[-3:])
    same(again[1], whole[30:48])


def test_a_rewound_sequence_goes_on_as_if_the_rest_had_never_been(
    model: TorchModel, alone: TorchModel
) -> None:
    model.decode([Span(1, TEXT[:30], 0, 0)])
    model.truncate(1, 12)
    assert model.length(1) == 12
    other = (*TEXT[:12], *TEXT[100:110])
    rows = model.decode([Span(1, other[12:], 12, 10)])[0]
    same(rows, rows_of(alone, other)[12:])


def test_a_copy_goes_on_by_itself(model: TorchModel, alone: TorchModel) -> None:
    model.decode([Span(5, TEXT[:20], 0, 0)])
    model.copy(5, 2, 15)
    assert (model.length(2), model.length(5)) == (15, 20)
    texts = {2: (*TEXT[:15], *TEXT[60:70]), 5: TEXT[:24]}
    rows = model.decode([Span(2, texts[2][15:], 15, 10), Span(5, TEXT[20:24], 20, 4)])
    same(rows[0], rows_of(alone, texts[2])[15:])
    same(rows[1], rows_of(alone, texts[5])[20:])


@pytest.mark.parametrize(
    ("spans", "why"),
    [
        ([Span(0, TEXT[:2], 3, 1)], "does not hold 3"),
        ([Span(0, TEXT[: CONTEXT + 1], 0, 1)], f"49 tokens do not fit its context of {CONTEXT}"),
        ([Span(1, TEXT[:2], 0, 1), Span(1, TEXT[2:3], 0, 1)], "two spans of one sequence"),
    ],
)
def test_a_call_that_cannot_be_is_refused_and_stores_nothing(
    model: TorchModel, spans: list[Span], why: str
) -> None:
    with pytest.raises(BackendError, match=why):
        model.decode([Span(3, TEXT[:4], 0, 1), *spans])
    assert [model.length(s) for s in range(6)] == [0] * 6


def test_closing_frees_the_network_and_may_be_done_twice(model: TorchModel) -> None:
    model.close()
    model.close()
    assert not model._cache and not hasattr(model, "_network")


# The engine on it

GREEDY = SamplingParams(temperature=0)


def texts_of(engine: Engine) -> list[tuple[int, ...]]:
    requests = [asked(TEXT[i : i + 5 + i % 7], sampling=GREEDY, max_tokens=24) for i in (0, 40, 81)]
    return [engine.generate(request).tokens for request in requests]


def test_the_engine_says_the_same_on_it_as_on_llama_cpp(native: GgufModel, path: Path) -> None:
    expected = texts_of(Engine(native))
    assert len({token for text in expected for token in text}) > 10, "too dull a text to tell anything"
    assert texts_of(Engine(opened(path, native, context=64))) == expected


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_speculation_with_a_draft_on_it_equals_plain_decoding(
    native: GgufModel, path: Path, tmp_path: Path, noise: float
) -> None:
    expected = texts_of(Engine(opened(path, native, context=64)))
    drafting = opened(write_tiny(tmp_path / "draft.gguf", noise=noise, confidence=2.0), native, context=64)
    drafter = ModelDrafter(drafting, align(native.vocabulary, native.vocabulary))
    engine = Engine(opened(path, native, context=64), [drafter], FixedPolicy(p_min=0, hand_over=0))
    requests = [asked(TEXT[i : i + 5 + i % 7], sampling=GREEDY, max_tokens=24) for i in (0, 40, 81)]
    completions = [engine.generate(request) for request in requests]
    assert [completion.tokens for completion in completions] == expected
    accepted = sum(record.num_accepted for c in completions for record in c.records)
    drafted = sum(len(record.draft) for c in completions for record in c.records)
    assert drafted > 20 and (accepted == drafted if noise == 0 else 0 < accepted < drafted)
