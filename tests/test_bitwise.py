"""Calls of equal sizes: how they are found, how a model keeps to them, and what its text then depends on."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import FILES, NATIVE
from engines import (
    GREEDY,
    LANGUAGE,
    VOCABULARY,
    ScriptedDrafter,
    model_drafter,
    oracle,
    other_vocabulary_drafter,
    random_guess,
    reduced_drafter,
)
from examples import examples
from outrider.backends import tuning
from outrider.backends.bitwise import (
    TRIED,
    BitwiseModel,
    Equality,
    EqualSizes,
    Price,
    find_equality,
    measure_price,
)
from outrider.backends.fake import FakeModel, random_logits
from outrider.backends.gguf.model import Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.tuning import open_target
from outrider.core.contracts import Drafter, Model, Policy
from outrider.core.data import Request, Row, Span
from outrider.core.errors import BackendError, OutOfMemory
from outrider.core.params import SamplingParams, Verification
from outrider.drafters.earlier import EarlierDrafter
from outrider.drafters.lookup import SuffixDrafter
from outrider.drafters.prediction import PredictionDrafter
from outrider.engine import Engine
from outrider.policy.auto import AutoPolicy
from outrider.policy.fixed import FixedPolicy
from rounded import RoundedModel, Rounding, bitwise
from timed_models import TimedModel
from tiny_gguf import write_tiny

NO_SINGLE = Rounding((1,))
UP_TO_SEVEN = Rounding((7, 63))


def rounded(rounding: Rounding, context_length: int = 512, **options: Any) -> FakeModel:
    settings = {"max_sequences": 1, "max_batch_tokens": 128, "max_rows": 128} | options
    return RoundedModel(VOCABULARY, LANGUAGE, rounding, context_length=context_length, **settings)


def rows_of(model: FakeModel | BitwiseModel, tokens: Sequence[int], cuts: Sequence[int]) -> list[bytes]:
    """The bits of all rows of a text that is read in parts of these sizes, over and over."""
    rows: list[bytes] = []
    while len(rows) < len(tokens):
        for cut in cuts:
            part = tuple(tokens[len(rows) : len(rows) + cut])
            if part:
                rows += [row.tobytes() for row in model.decode([Span(0, part, len(rows), len(part))])[0]]
    model.truncate(0, 0)
    return rows


# Sizes


@given(st.sets(st.integers(1, 70), min_size=1), st.integers(1, 300))
def test_any_number_of_tokens_is_cut_into_calls_of_known_sizes(known: set[int], num_tokens: int) -> None:
    sizes = EqualSizes(tuple(sorted(known)))
    parts = sizes.parts(num_tokens)
    assert sum(taken for taken, _ in parts) == num_tokens
    assert len(parts) == -(-num_tokens // max(known))
    for taken, size in parts:
        assert size in known and 0 < taken <= size
        assert not [other for other in known if taken <= other < size]
        assert size - taken <= sizes.padding


def test_sizes_in_words() -> None:
    sizes = EqualSizes((2, 3, 4, 8, 12, 13))
    assert str(sizes) == "2-4, 8, 12-13"
    for wrong in ((), (0, 1), (3, 2), (2, 2)):
        with pytest.raises(ValueError, match="no sizes"):
            EqualSizes(wrong)


# The probe


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        ((), TRIED),
        ((1,), TRIED[1:]),
        ((31,), tuple(size for size in TRIED if size <= 31)),
        ((7, 63), tuple(range(1, 8))),
        ((1, 2, 3, 7), (4, 5, 6, 7)),
    ],
)
def test_the_sizes_that_agree_are_found(kernels: tuple[int, ...], expected: tuple[int, ...]) -> None:
    model = rounded(Rounding(kernels))
    assert find_equality(model) == Equality(EqualSizes(expected))
    assert model.length(0) == 0
    assert (find_equality(model, hasty=True).sizes is not None) == (1 not in kernels)


def test_no_two_sizes_agree() -> None:
    found = find_equality(rounded(Rounding(TRIED)))
    assert found.sizes is None and "no two sizes" in found.reason


def test_sizes_that_agree_on_a_short_text_alone_are_refused() -> None:
    class Forgetful(RoundedModel):
        """Beyond some tokens another kernel takes over, which knows more sizes."""

        def _mark(self, sequence: int, num_tokens: int, length: int) -> int:
            return super()._mark(sequence, num_tokens, length) + 7 * num_tokens * (length == 100)

    model = Forgetful(
        VOCABULARY,
        LANGUAGE,
        Rounding(()),
        context_length=512,
        max_sequences=1,
        max_batch_tokens=128,
        max_rows=128,
    )
    found = find_equality(model)
    assert found.sizes is None and "longer text" in found.reason


def test_models_that_cannot_be_probed_say_why() -> None:
    recurrent = FakeModel(VOCABULARY, LANGUAGE, rewind="none")
    assert "cannot forget" in find_equality(recurrent).reason
    tiny = rounded(NO_SINGLE, 16)
    assert "too small" in find_equality(tiny).reason


def test_the_price_is_measured_against_the_plain_model() -> None:
    made: list[TimedModel] = []

    def open_lane(length: int) -> TimedModel:
        made.append(TimedModel(lambda num_tokens, *_: 1.0 + 0.1 * num_tokens, context_length=length))
        return made[-1]

    plain = open_lane(512)
    lanes = BitwiseModel(open_lane, EqualSizes((2, 4)), context_length=512)
    price = measure_price(plain, lanes, clock=lambda: sum(model.now for model in made))
    assert price.step == pytest.approx(1.2 / 1.1 - 1)
    assert price.prompt == pytest.approx(128 / 4 * 1.4 / (1 + 12.8) - 1)
    assert str(price) == "a plain step takes 9% longer, reading a prompt 225% longer"
    assert plain.length(0) == lanes.length(0) == 0


# The model


@settings(max_examples=examples(30))
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 1000))
def test_the_bits_do_not_depend_on_how_a_text_is_cut(cuts: list[int], seed: int) -> None:
    text = np.random.default_rng(seed).integers(0, VOCABULARY.size, 60).tolist()
    for rounding, sizes in ((NO_SINGLE, (2, 3, 5, 9)), (UP_TO_SEVEN, (1, 2, 7)), (UP_TO_SEVEN, (8, 16, 63))):
        model = bitwise(LANGUAGE, rounding, sizes)
        assert rows_of(model, text, cuts) == rows_of(model, text, [1])


@given(st.integers(1, 30), st.data())
def test_the_rows_that_were_wanted_are_those_of_the_last_tokens(num_tokens: int, data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(0, num_tokens))
    tokens = tuple(i % VOCABULARY.size for i in range(num_tokens))
    model, exact = bitwise(LANGUAGE, Rounding(()), (2, 4, 8)), FakeModel(VOCABULARY, LANGUAGE)
    [rows] = model.decode([Span(0, tokens, 0, num_rows)])
    assert rows.shape == (num_rows, VOCABULARY.size) and model.length(0) == num_tokens
    whole = bitwise(LANGUAGE, Rounding(()), (2, 4, 8)).decode([Span(0, tokens, 0, num_tokens)])[0]
    assert (rows == whole[num_tokens - num_rows :]).all()
    assert exact.decode([Span(0, tokens, 0, num_rows)])[0].shape == rows.shape


def test_a_copied_beginning_goes_on_as_the_original() -> None:
    model = bitwise(LANGUAGE, NO_SINGLE, (2, 4), num_sequences=2)
    model.decode([Span(0, (0, 1, 2, 3), 0, 4)])
    model.copy(0, 1, 3)
    model.truncate(0, 3)
    rows = model.decode([Span(0, (1, 2), 3, 2), Span(1, (1, 2), 3, 2)])
    assert (rows[0] == rows[1]).all()
    with pytest.raises(BackendError, match="not empty"):
        model.copy(0, 1, 1)
    with pytest.raises(BackendError, match="does not hold"):
        model.copy(0, 1, 9)


def test_a_call_that_fails_stores_nothing() -> None:
    lanes: list[FakeModel] = []

    def open_lane(length: int) -> FakeModel:
        lanes.append(rounded(NO_SINGLE, length))
        return lanes[-1]

    model = BitwiseModel(open_lane, EqualSizes((2, 4)), context_length=64, max_sequences=2)
    model.decode([Span(0, (0, 1), 0, 1), Span(1, (0,), 0, 1)])
    lanes[1].fail_at_call = len(lanes[1].calls) + 2  # the second part of its span
    with pytest.raises(BackendError, match="failure was planned"):
        model.decode([Span(0, (2, 3), 2, 2), Span(1, (1,) * 7, 1, 7)])
    assert [model.length(0), model.length(1)] == [2, 1]
    assert [lane.length(0) for lane in lanes] == [2, 1]


def test_a_context_is_filled_to_its_last_token() -> None:
    model = bitwise(LANGUAGE, NO_SINGLE, (2, 8))
    assert model.context_length == 256
    for start in range(256):
        model.decode([Span(0, (0,), start, 1)])
    with pytest.raises(BackendError, match="not fit a context"):
        model.decode([Span(0, (0,), 256, 1)])


def test_what_breaks_the_contract_is_refused_before_any_call() -> None:
    model = bitwise(LANGUAGE, NO_SINGLE, (2, 4), num_sequences=2)
    good = Span(0, (0, 1), 0, 2)
    for wrong in (
        Span(1, (0,), 5, 1),
        Span(1, (0,), 0, 2),
        Span(7, (0,), 0, 1),
        Span(1, (0,) * 127, 0, 0),
        Span(1, (0,) * 100, 0, 127),
    ):
        with pytest.raises(BackendError):
            model.decode([good, wrong])
        assert model.length(0) == 0
    with pytest.raises(BackendError, match="no calls of 200"):
        bitwise(LANGUAGE, NO_SINGLE, (2, 200))


def test_lanes_are_closed_when_one_cannot_be_opened() -> None:
    opened: list[FakeModel] = []

    class Closing(FakeModel):
        closed = False

        def close(self) -> None:
            self.closed = True

    def open_lane(length: int) -> FakeModel:
        if opened:
            raise BackendError("lane", "there is no room for another")
        opened.append(Closing(VOCABULARY, random_logits(VOCABULARY.size), context_length=length))
        return opened[0]

    with pytest.raises(BackendError, match="no room"):
        BitwiseModel(open_lane, EqualSizes((1, 2)), context_length=64, max_sequences=2)
    assert opened[0].closed  # type: ignore[attr-defined]


def test_sequences_share_a_call_and_nothing_else() -> None:
    model = bitwise(LANGUAGE, NO_SINGLE, (2, 4), num_sequences=3)
    alone = bitwise(LANGUAGE, NO_SINGLE, (2, 4))
    first = alone.decode([Span(0, (0, 1, 2), 0, 3)])[0].copy()
    last = alone.decode([Span(0, (3,), 3, 1)])[0].copy()
    rows = model.decode([Span(2, (3, 3), 0, 1), Span(1, (0, 1, 2), 0, 3)])
    assert (rows[1] == first).all()
    rows = model.decode([Span(0, (1,), 0, 1), Span(1, (3,), 3, 1)])
    assert (rows[1] == last).all()
    assert [model.length(i) for i in range(3)] == [1, 4, 2]


def test_without_it_they_do() -> None:
    model, text = rounded(NO_SINGLE), [0, 1, 2, 3, 0, 1, 2, 3]
    assert rows_of(model, text, [8]) != rows_of(model, text, [1])


# By default: where they find the memory, and never why a model cannot be opened


HUGE = 2_000_000_000


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Weights]:
    found = Equality(EqualSizes((1, 16)), price=Price(0.01, 0.0))
    monkeypatch.setattr(tuning, "known_equality", lambda *_, **__: found)
    with closing(Weights(write_tiny(tmp_path / "tiny.gguf"), LoadOptions(threads=1))) as opened:
        yield opened


def test_where_they_are_nearly_free_they_are_the_default(weights: Weights) -> None:
    model, found = open_target(weights, 64)
    assert isinstance(model, BitwiseModel) and found is not None


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
    monkeypatch.setattr(tuning, "known_equality", lambda *_, **__: found)
    model, none = open_target(weights, 64)
    assert not isinstance(model, BitwiseModel) and none is None


def test_without_the_memory_for_them_a_model_is_opened_without(
    weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> BitwiseModel:
        raise OutOfMemory("target", "there is no room", "Give a smaller context.")

    monkeypatch.setattr(tuning, "_lanes", no_room)
    model, found = open_target(weights, 64)
    assert not isinstance(model, BitwiseModel) and found is None
    with pytest.raises(OutOfMemory):
        open_target(weights, 64, bitwise=True)


def test_an_impossible_context_is_named_as_it_was_asked_for(weights: Weights) -> None:
    with pytest.raises(OutOfMemory) as caught:
        open_target(weights, HUGE)
    assert f"context of {HUGE} tokens" in caught.value.what


def test_what_is_found_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    found = [Equality(EqualSizes((1, 16)), flash_attention="on", price=Price(0.01, 0.0))]
    monkeypatch.setattr(tuning, "_find", lambda *_, **__: found.pop())
    expected = found[0]
    with closing(Weights(write_tiny(tmp_path / "tiny.gguf"), LoadOptions(threads=1))) as weights:
        for measure in (True, True, False):
            known = tuning.known_equality(weights, lambda _part: None, measure=measure)
            assert known == expected


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_every_library_opens_what_it_runs(
    name: str, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both kinds of attention are tried; over a sliding window ik_llama.cpp is right with one of them."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(tuning, "find_equality", lambda *_, **__: Equality(None, "padding"))
    path = write_tiny(tmp_path / "tiny.gguf", arch=arch)
    tokens = tuple(range(40, 72))  # past the window
    with closing(Weights(path, LoadOptions(threads=1, library=str(FILES[name].path)))) as weights:
        with closing(open_target(weights, 64)[0]) as model:
            assert (model.context_length, model.max_sequences) == (64, 1)
            rows = model.decode([Span(0, tokens, 0, len(tokens))])[0].copy()
        with closing(weights.open(64)) as plain:
            [expected] = plain.decode([Span(0, tokens, 0, len(tokens))])
            np.testing.assert_allclose(rows, expected, atol=1e-2)


# Texts: without equal calls they part from plain decoding's, with them they never do

STABLE = SamplingParams(temperature=1.0, seed=5)
CONTEXT = 160

KNOWN = cache(lambda last: LANGUAGE(last))


def language(tokens: Sequence[int]) -> Row:
    """`LANGUAGE`, each row worked out once."""
    return KNOWN(tuple(tokens[-3:]))


KERNELS = [
    (Rounding((1,)), (2, 3, 4, 8, 16)),
    (Rounding((7, 63)), (1, 2, 4, 7)),
    (Rounding((31,)), (1, 4, 31)),
]
"""Models, and calls that are equal for them."""

DRAFTERS: dict[str, Callable[[], list[Drafter]]] = {
    "lookup": lambda: [SuffixDrafter(), EarlierDrafter(), PredictionDrafter()],
    "model": lambda: [model_drafter(random_logits(VOCABULARY.size, seed=11, order=2), max_sequences=9)],
    "other vocabulary": lambda: [other_vocabulary_drafter(max_sequences=9)],
    "reduced": lambda: [reduced_drafter(max_sequences=9)],
    "right": lambda: [ScriptedDrafter(oracle(language, 3))],
    "any": lambda: [ScriptedDrafter(random_guess(3))],
}


def shared(rounding: Rounding, num_sequences: int) -> FakeModel:
    return RoundedModel(VOCABULARY, language, rounding, context_length=CONTEXT, max_sequences=num_sequences)


def texts(engine: Engine, requests: Sequence[Request], steps: Sequence[int]) -> list[tuple[int, ...]]:
    """The answers of requests that come at these steps; one for which there is no room waits."""
    found: dict[int, list[int]] = {}
    places: dict[int, int] = {}
    waiting = sorted(range(len(requests)), key=steps.__getitem__)
    step = 0
    while waiting or engine.num_running:
        while waiting and steps[waiting[0]] <= step and engine.has_room(requests[waiting[0]]):
            place = waiting.pop(0)
            places[engine.submit(requests[place])] = place
        for update in engine.step() if engine.num_running else ():
            assert update.error is None
            found.setdefault(places[update.record.request], []).extend(update.record.tokens)
        step += 1
    return [tuple(found[i]) for i in range(len(requests))]


def plain(make: Callable[[int], Model], request: Request) -> tuple[int, ...]:
    """The answer of a request alone, token by token, on a model of its own."""
    return Engine(make(1)).generate(request).tokens


PROMPTS = st.lists(st.integers(0, VOCABULARY.size - 2), min_size=1, max_size=60)
TREE = st.lists(st.tuples(st.booleans(), PROMPTS), min_size=1, max_size=8)


def requests_of(tree: Sequence[tuple[bool, Sequence[int]]], *, stable: bool) -> list[Request]:
    """Requests of which some go on from the one before, so that what it stored is reused."""
    requests: list[Request] = []
    for goes_on, tokens in tree:
        before = requests[-1].prompt if goes_on and requests and len(requests[-1].prompt) < 60 else ()
        prompt = (*before, *tokens)
        request = Request(
            prompt,
            STABLE if stable else GREEDY,
            max_tokens=12 + 3 * len(requests),
            verification=Verification("stable" if stable else "auto"),
            prediction=prompt[:8],
            ignore_end=True,
        )
        requests.append(request)
    return requests


@pytest.mark.parametrize(
    ("policy", "num_sequences"),
    [("fixed", 1), ("fixed", 8), pytest.param("auto", 1, marks=pytest.mark.slow), ("auto", 8)],
)
@pytest.mark.parametrize("who", DRAFTERS)
@settings(max_examples=examples(8))
@given(tree=TREE, data=st.data())
def test_a_text_is_that_of_plain_decoding_whatever_else_happens(
    policy: str, num_sequences: int, who: str, tree: list[tuple[bool, list[int]]], data: st.DataObject
) -> None:
    rounding, sizes = data.draw(st.sampled_from(KERNELS))
    requests = requests_of(tree, stable=data.draw(st.booleans()))
    steps = data.draw(st.lists(st.integers(0, 30), min_size=len(tree), max_size=len(tree)))
    chosen: Policy = AutoPolicy() if policy == "auto" else FixedPolicy(p_min=0)
    engine = Engine(bitwise(language, rounding, sizes, num_sequences), DRAFTERS[who](), chosen)
    said = texts(engine, requests, steps)
    assert said == [plain(lambda n: bitwise(language, rounding, sizes, n), request) for request in requests]


@pytest.mark.parametrize(
    ("rounding", "num_sequences"),
    [
        (Rounding((1,)), 1),
        (Rounding((7, 63)), 1),
        *((rounding, 8) for rounding, _ in KERNELS),
        (Rounding((), mixes=True), 8),  # equal calls, and other sequences in the same cache
    ],
)
def test_without_equal_calls_texts_part(rounding: Rounding, num_sequences: int) -> None:
    tree = [(False, [(i * 7 + j * j) % 4 for j in range(40)]) for i in range(8)]
    requests = requests_of(tree, stable=False)
    engine = Engine(shared(rounding, num_sequences), DRAFTERS["right"](), FixedPolicy(p_min=0))
    said = texts(engine, requests, range(8))
    assert said != [plain(lambda n: shared(rounding, n), request) for request in requests]
