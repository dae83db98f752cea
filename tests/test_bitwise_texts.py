"""Texts on a model whose logits depend on the sizes of calls and on other sequences: without equal calls they
part from plain decoding's, with them they never do."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from outrider.backends.bitwise import BitwiseModel, EqualSizes
from outrider.backends.fake import FakeModel, random_logits
from outrider.core.contracts import Drafter, Model, Policy
from outrider.core.data import Request, Row
from outrider.core.params import SamplingParams, Verification
from outrider.drafters.earlier import EarlierDrafter
from outrider.drafters.lookup import SuffixDrafter
from outrider.drafters.prediction import PredictionDrafter
from outrider.engine import Engine
from outrider.policy.auto import AutoPolicy
from outrider.policy.fixed import FixedPolicy
from rounded import RoundedModel, Rounding

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


def equal(rounding: Rounding, sizes: Sequence[int], num_sequences: int) -> BitwiseModel:
    return BitwiseModel(
        lambda length: RoundedModel(VOCABULARY, language, rounding, context_length=length, max_sequences=1),
        EqualSizes(tuple(sizes)),
        context_length=CONTEXT,
        max_sequences=num_sequences,
    )


@dataclass(frozen=True)
class Arrival:
    """A request, and the step at which it comes."""

    request: Request
    step: int


def texts(engine: Engine, arrivals: Sequence[Arrival]) -> list[tuple[int, ...]]:
    """The answers of requests that come while others run; one for which there is no room waits."""
    found: dict[int, list[int]] = {}
    places: dict[int, int] = {}
    waiting = sorted(range(len(arrivals)), key=lambda i: arrivals[i].step)
    step = 0
    while waiting or engine.num_running:
        while waiting and arrivals[waiting[0]].step <= step and engine.has_room(arrivals[waiting[0]].request):
            place = waiting.pop(0)
            places[engine.submit(arrivals[place].request)] = place
        for update in engine.step() if engine.num_running else ():
            assert update.error is None
            found.setdefault(places[update.record.request], []).extend(update.record.tokens)
        step += 1
    return [tuple(found[i]) for i in range(len(arrivals))]


def plain(make: Callable[[int], Model], request: Request) -> tuple[int, ...]:
    """The answer of a request alone, token by token, on a model of its own."""
    return Engine(make(1)).generate(request).tokens


def arrivals_of(prompts: Sequence[Sequence[int]], steps: Sequence[int], stable: bool) -> list[Arrival]:
    return [
        Arrival(
            Request(
                tuple(prompt),
                STABLE if stable else GREEDY,
                max_tokens=12 + 3 * i,
                verification=Verification("stable" if stable else "auto"),
                prediction=tuple(prompt[:8]),
                ignore_end=True,
            ),
            step,
        )
        for i, (prompt, step) in enumerate(zip(prompts, steps, strict=True))
    ]


PROMPTS = st.lists(st.integers(0, VOCABULARY.size - 2), min_size=1, max_size=60)
TREE = st.lists(st.tuples(st.booleans(), PROMPTS), min_size=1, max_size=8)


def prompts_of(tree: Sequence[tuple[bool, Sequence[int]]]) -> list[list[int]]:
    """Prompts of which some go on from the one before, so that what it stored is reused."""
    prompts: list[list[int]] = []
    for goes_on, tokens in tree:
        start = prompts[-1] if goes_on and prompts and len(prompts[-1]) < 60 else []
        prompts.append([*start, *tokens])
    return prompts


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
    prompts = prompts_of(tree)
    steps = data.draw(st.lists(st.integers(0, 30), min_size=len(prompts), max_size=len(prompts)))
    arrivals = arrivals_of(prompts, steps, data.draw(st.booleans()))
    chosen: Policy = AutoPolicy() if policy == "auto" else FixedPolicy(p_min=0)
    engine = Engine(equal(rounding, sizes, num_sequences), DRAFTERS[who](), chosen)
    said = texts(engine, arrivals)
    assert said == [plain(lambda n: equal(rounding, sizes, n), a.request) for a in arrivals]


@pytest.mark.parametrize(
    ("rounding", "num_sequences"),
    [
        (Rounding((1,)), 1),
        (Rounding((7, 63)), 1),
        *((rounding, 8) for rounding, _ in KERNELS),
        (Rounding((), mixes=True), 8),  # other sequences in the same cache alone
    ],
)
def test_without_equal_calls_texts_part(rounding: Rounding, num_sequences: int) -> None:
    prompts = [[(i * 7 + j * j) % 4 for j in range(40)] for i in range(8)]
    arrivals = arrivals_of(prompts, range(8), stable=False)
    engine = Engine(shared(rounding, num_sequences), DRAFTERS["right"](), FixedPolicy(p_min=0))
    said = texts(engine, arrivals)
    assert said != [plain(lambda n: shared(rounding, n), arrival.request) for arrival in arrivals]


def test_other_sequences_alone_make_texts_part() -> None:
    """Calls of equal sizes in a cache that all sequences share are not enough."""
    exact = Rounding((), mixes=True)
    prompts = [[(i * 7 + j * j) % 4 for j in range(40)] for i in range(8)]
    arrivals = arrivals_of(prompts, range(8), stable=False)
    said = texts(Engine(shared(exact, 8)), arrivals)
    assert said != [plain(lambda n: shared(exact, n), arrival.request) for arrival in arrivals]
