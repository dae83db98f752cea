"""Rows of which the backend hands out the most likely tokens alone: the same tokens come of them."""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import sampler
from llama_cpp_models import SMALL, TEXT, Load, tiny
from outrider.backends.gguf import guard
from outrider.backends.gguf.library import Library
from outrider.backends.gguf.model import GgufModel, Weights
from outrider.backends.gguf.top_logits import TopSampling
from outrider.core.contracts import Model
from outrider.core.data import Completion, Logits, Request, Span, TopLogits
from outrider.core.notices import collect_notices
from outrider.core.params import SamplingParams, Verification
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.models.vocab import align
from outrider.policy.fixed import FixedPolicy
from outrider.sampling import argmax, most_likely
from outrider.sampling.chain import ranked

__all__ = ["tiny"]  # pytest finds the fixture by its name

MAINLINE = replace(SMALL, backend="llama.cpp")
GREEDY = SamplingParams(temperature=0)


@given(
    seed=st.integers(0, 2**32),
    steps=st.sampled_from([5, 10**6]),
    params=st.sampled_from(
        [
            GREEDY,
            SamplingParams(),
            SamplingParams(top_k=1),
            SamplingParams(temperature=1.3, top_k=5, top_p=1, min_p=0),
            SamplingParams(top_k=12, typical_p=0.5, xtc_probability=0.5, xtc_threshold=0.05),
            SamplingParams(top_k=40, dynatemp_range=0.5),
        ]
    ),
)
def test_a_distribution_of_the_top_is_that_of_the_row(seed: int, steps: int, params: SamplingParams) -> None:
    rng = np.random.default_rng(seed)
    row = (rng.integers(0, steps, 6000) * (12 / steps)).astype(np.float32)
    tokens = ranked(row, 64 if steps > 5 else 3000)
    top = TopLogits(tokens, row[tokens])
    ours, expected = sampler(params).distribution(top, ()), sampler(params).distribution(row, ())
    assert ours.tokens.tolist() == expected.tokens.tolist()
    assert ours.probs.tolist() == expected.probs.tolist()
    assert argmax(top) == argmax(row) == most_likely(top)[0]
    assert most_likely(top)[1] >= most_likely(row)[1] * (1 - 1e-5)


# From llama.cpp's samplers. On a processor they are off: sorting takes longer there than the copy.


@pytest.fixture
def weights(tiny: Load, monkeypatch: pytest.MonkeyPatch) -> Weights:
    monkeypatch.setattr(Library, "samples", lambda *_: True)
    return tiny(options=MAINLINE)


@pytest.fixture
def model(weights: Weights) -> Iterator[GgufModel]:
    with closing(weights.open(128, max_sequences=2)) as model:
        yield model


def rows(model: Model, top: int, *sizes: int) -> list[list[TopLogits | np.ndarray]]:
    """Those of a call over sequences that are empty before it and after."""
    spans = [Span(i, TEXT[20 * i : 20 * i + 12], 0, size, top=top) for i, size in enumerate(sizes)]
    found = [[row if top else row.copy() for row in each] for each in model.decode(spans)]
    for span in spans:
        model.truncate(span.sequence, 0)
    return found


def test_a_call_hands_out_the_most_likely_tokens_of_its_rows(model: GgufModel) -> None:
    whole = rows(model, 0, 3, 1)
    for _ in range(3):  # the first is compared with whole rows, and so gives these
        found = rows(model, 40, 3, 1)
    for tops, expected in zip(found, whole, strict=True):
        assert len(tops) == len(expected)
        for top, row in zip(tops, expected, strict=True):
            assert isinstance(top, TopLogits) and isinstance(row, np.ndarray)
            assert top.tokens.tolist() == ranked(row, 64).tolist()
            assert top.logits.tolist() == pytest.approx(row[top.tokens].tolist(), abs=1e-5)
    assert not isinstance(rows(model, 60, 1)[0][0], TopLogits), "more than it picks"
    again = rows(model, 0, 3, 1)
    assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(again[0], whole[0], strict=True))


def test_one_sequence_that_needs_whole_rows_gets_them(model: GgufModel) -> None:
    whole = rows(model, 0, 1, 1)
    for _ in range(2):
        rows(model, 2, 1, 1)
    spans = [Span(i, TEXT[20 * i : 20 * i + 12], 0, 1, top=2 * i) for i in range(2)]
    for found, expected in zip(model.decode(spans), whole, strict=True):
        assert np.allclose(found[0], expected[0], atol=1e-5)


def test_a_tie_that_leaves_open_which_are_the_most_likely_is_looked_at_whole(
    model: GgufModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = TopSampling._values

    def tied(self: TopSampling, name: str, kind: type, num_rows: int) -> np.ndarray:
        values: np.ndarray = read(self, name, kind, num_rows).copy()
        if "logits" in name:  # the 40th to the last of the second row
            order = np.argsort(-values[1])
            values[1, order[39:]] = values[1, order[39]]
        return values

    for _ in range(2):
        rows(model, 40, 2)
    monkeypatch.setattr(TopSampling, "_values", tied)
    assert isinstance(rows(model, 39, 2)[0][1], TopLogits)
    found = rows(model, 40, 2)[0]
    assert np.allclose(found, rows(model, 0, 2)[0], atol=1e-5) and model.length(0) == 0


def generations(weights: Weights, requests: Sequence[Request]) -> list[tuple[int, ...]]:
    with closing(weights.open(128)) as target, closing(weights.open(128)) as draft:
        alignment = align(weights.vocabulary, weights.vocabulary)
        engine = Engine(target, [ModelDrafter(draft, alignment)], FixedPolicy(4, 0.0))
        return [engine.generate(request).tokens for request in requests]


REQUESTS = [
    Request(TEXT[:20], sampling, max_tokens=30, ignore_end=True, **settings)
    for sampling, settings in (
        (GREEDY, {}),
        (SamplingParams(seed=1), {}),
        (SamplingParams(seed=1), {"verification": Verification("stable")}),
        (SamplingParams(seed=1), {"verification": Verification("block", "sampled")}),
        (SamplingParams(seed=2, top_k=0), {}),
        (replace(GREEDY, logit_bias=((5, 50.0),), presence_penalty=60.0), {}),
        (GREEDY, {"logprobs": 2}),
        (SamplingParams(seed=3, min_tokens=10), {}),
    )
]


def test_the_texts_are_those_of_whole_rows(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    with_tops = generations(weights, REQUESTS)
    monkeypatch.setattr(Library, "samples", lambda *_: False)
    assert with_tops == generations(weights, REQUESTS)


def test_sampled_steps_copy_no_whole_row_and_greedy_ones_do(
    weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied, copy = [0], GgufModel._rows

    def counted(self: GgufModel, context: int, spans: Sequence[Span]) -> list[Logits]:
        copied[0] += sum(span.rows for span in spans)
        return copy(self, context, spans)

    monkeypatch.setattr(GgufModel, "_rows", counted)

    def copies(request: Request, num_tokens: int) -> int:
        with closing(weights.open(128)) as target:
            Engine(target).generate(replace(request, max_tokens=num_tokens))
        before, copied[0] = copied[0], 0
        return before

    assert copies(REQUESTS[1], 20) == copies(REQUESTS[1], 60) > 0, "to compare them"
    assert copies(REQUESTS[0], 60) == 60, "a copy and an argmax take less than picking"


def test_a_sampler_that_picks_other_tokens_is_left_alone(
    weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = TopSampling._values

    def wrong(self: TopSampling, name: str, kind: type, num_rows: int) -> np.ndarray:
        values: np.ndarray = read(self, name, kind, num_rows)
        return (values + 1) % 200 if "candidates" in name else values

    monkeypatch.setattr(TopSampling, "_values", wrong)
    with collect_notices() as notices:
        found = generations(weights, REQUESTS[:2])
    assert len(notices) == 1 and "picks other tokens" in notices[0] and "whole rows" in notices[0]
    monkeypatch.setattr(Library, "samples", lambda *_: False)
    assert found == generations(weights, REQUESTS[:2])


def test_the_child_that_tries_a_build_out_runs_its_samplers(
    weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that the build cannot compute ends the child, not this process."""
    read, calls = TopSampling.read, list[int]()

    def noted(self: TopSampling, spans: Sequence[Span]) -> list[list[TopLogits]] | None:
        calls.append(spans[0].rows)
        return read(self, spans)

    monkeypatch.setattr(TopSampling, "read", noted)
    assert guard.main(str(weights.path), json.dumps(asdict(weights.options))) == 0
    assert calls == [1, 1, 4, 4]


def test_completions_of_many_requests_are_alike(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside one that needs whole rows, in one batch."""

    def batch() -> list[Completion | None]:
        with closing(weights.open(128, max_sequences=3)) as target:
            engine = Engine(target)
            for request in (REQUESTS[0], REQUESTS[6], REQUESTS[1]):
                engine.submit(request)
            updates = []
            while engine.num_running:
                updates += engine.step()
            return [update.completion for update in updates if update.completion]

    with_tops = batch()
    monkeypatch.setattr(Library, "samples", lambda *_: False)
    for ours, expected in zip(with_tops, batch(), strict=True):
        assert ours is not None and expected is not None and ours.tokens == expected.tokens
