"""Speculation against plain decoding: equal, or where and how closely not."""

from dataclasses import replace

import numpy as np
import pytest

from engines import GREEDY, VOCABULARY, ScriptedDrafter, greedy_continuation, oracle
from outrider.backends.fake import FakeModel, random_logits
from outrider.core.data import Request
from outrider.core.errors import SettingError
from outrider.core.params import SamplingParams, Verification
from outrider.engine import Engine
from outrider.lab.comparison import compare, find_divergence
from outrider.policy.fixed import FixedPolicy
from outrider.session.readout import read_out
from rounded import NearTie

LANGUAGE = random_logits(VOCABULARY.size, seed=11, order=3)
REQUEST = Request((0, 1, 2), GREEDY, max_tokens=20, ignore_end=True)


def engine_of(model: FakeModel, num_right: int = 2) -> Engine:
    return Engine(model, [ScriptedDrafter(oracle(LANGUAGE, num_right))], FixedPolicy(draft_max=4))


def near_tie(at: int, **options: int) -> NearTie:
    return NearTie(VOCABULARY, LANGUAGE, at, **options)


def test_equal_outputs() -> None:
    seen: list[tuple[int, int]] = []
    model = FakeModel(VOCABULARY, LANGUAGE)
    comparison = compare(engine_of(model), REQUEST, repetitions=3, progress=lambda *n: seen.append(n))
    assert comparison.equal and comparison.divergence is None
    assert comparison.plain.tokens_per_target_call == 1
    assert comparison.speculative.tokens_per_target_call > 2
    assert list(comparison.speculative_completion.tokens) == greedy_continuation(LANGUAGE, REQUEST.prompt, 20)
    assert read_out(comparison.speculative_completion) == comparison.speculative
    assert seen == [(i, 6) for i in range(1, 7)]
    assert model.length(0) == 0


def test_every_run_starts_cold_and_they_take_turns() -> None:
    model = FakeModel(VOCABULARY, LANGUAGE)
    comparison = compare(engine_of(model), REQUEST, repetitions=2)
    prompts = [i for i, call in enumerate(model.calls) if call[0].start == 0]
    assert len(prompts) == 4 and all(model.calls[i][0].tokens[:3] == (0, 1, 2) for i in prompts)
    assert [len(model.calls[i][0].tokens) for i in prompts] == [3 + 4, 3, 3 + 4, 3]
    calls = np.diff([*prompts, len(model.calls)]).tolist()
    assert calls == [calls[0], 20, calls[0], 20] and calls[0] < 20
    assert comparison.plain.reused_tokens == comparison.speculative.reused_tokens == 0


def test_the_speedup_is_a_ratio_of_times_per_token() -> None:
    comparison = compare(engine_of(FakeModel(VOCABULARY, LANGUAGE)), REQUEST, repetitions=1)
    plain, speculative, speedup = comparison.plain, comparison.speculative, comparison.speedup
    assert speedup.decode_median == pytest.approx(plain.decode_s / speculative.decode_s)
    total = (plain.decode_s + plain.prefill_s) / (speculative.decode_s + speculative.prefill_s)
    assert (speedup.low, speedup.median, speedup.high) == pytest.approx((total,) * 3)
    assert (speedup.decode_low, speedup.decode_high) == (speedup.decode_median,) * 2
    three = compare(engine_of(FakeModel(VOCABULARY, LANGUAGE)), REQUEST, repetitions=3).speedup
    assert three.low <= three.median <= three.high and three.repetitions == 3


def test_a_first_run_that_was_made_already_counts() -> None:
    model = FakeModel(VOCABULARY, LANGUAGE)
    engine = engine_of(model)
    first = engine.generate(REQUEST)
    num_calls = len(model.calls)
    comparison = compare(engine, REQUEST, first, repetitions=1)
    assert comparison.speculative_completion is first
    assert len(model.calls) == num_calls + 20


def test_a_near_tie_is_shown_with_its_margin() -> None:
    at = 10
    comparison = compare(engine_of(near_tie(at)), REQUEST)
    position = at - len(REQUEST.prompt)
    text = greedy_continuation(LANGUAGE, REQUEST.prompt, position)
    best, second = np.argsort(LANGUAGE([*REQUEST.prompt, *text]))[[-1, -2]]
    divergence = comparison.divergence
    assert not comparison.equal and divergence is not None
    assert (divergence.position, divergence.plain_token) == (position, int(best))
    assert divergence.speculative_token == int(second)
    assert divergence.margin == pytest.approx(NearTie.MARGIN)


def test_a_difference_in_any_repetition_is_shown() -> None:
    for chosen in range(8):  # whichever of the runs happens to be the one of median time
        comparison = compare(engine_of(near_tie(10, times=1), 1000), REQUEST, repetitions=5)
        assert not comparison.equal and comparison.divergence is not None, chosen
        assert comparison.divergence.position == 7


def test_a_divergence_is_found_by_hand_too() -> None:
    model = FakeModel(VOCABULARY, LANGUAGE)
    done = engine_of(model).generate(REQUEST)
    changed = (done.tokens[19] + 1) % VOCABULARY.size
    other = replace(done, tokens=(*done.tokens[:19], changed))
    divergence = find_divergence(model, REQUEST, done, other)
    row = LANGUAGE([*REQUEST.prompt, *done.tokens[:19]])
    assert divergence is not None and divergence.position == 19
    assert divergence.margin == pytest.approx(float(row[done.tokens[19]] - row[changed]))
    assert find_divergence(model, REQUEST, done, done) is None


@pytest.mark.parametrize(
    ("num_tokens", "sizes"),
    [(1, [1]), (9, [9]), (80, [16] * 5), (81, [*[16] * 5, 1])],
    ids=["one", "short", "its end in the last chunk", "its end alone where the last chunk is full"],
)
def test_a_prompt_is_evaluated_anew_in_the_same_calls(num_tokens: int, sizes: list[int]) -> None:
    model = FakeModel(VOCABULARY, LANGUAGE, context_length=200, max_batch_tokens=16)
    request = Request(((0, 1, 2, 3) * 21)[:num_tokens], GREEDY, max_tokens=6, ignore_end=True)
    done = Engine(model).generate(request)
    other = replace(done, tokens=(*done.tokens[:-1], (done.tokens[-1] + 1) % VOCABULARY.size))
    before = len(model.calls)
    assert find_divergence(model, request, done, other) is not None
    plainly = [[(s.tokens, s.start) for s in call] for call in model.calls[:before]]
    assert [len(tokens) for [(tokens, _)] in plainly] == [*sizes, *[1] * 5]
    assert [[(s.tokens, s.start) for s in call] for call in model.calls[before:]] == plainly


@pytest.mark.parametrize("seed", [None, 5])
def test_sampled_runs_share_one_seed(seed: int | None) -> None:
    sampling = SamplingParams(temperature=1.0, top_k=0, top_p=1, min_p=0, seed=seed)
    request = replace(REQUEST, sampling=sampling)
    engine = Engine(FakeModel(VOCABULARY, LANGUAGE), [ScriptedDrafter(lambda _text, _n: [])])
    comparison = compare(engine, request, repetitions=3)
    assert comparison.equal  # nothing is drafted, so the same uniforms make the same text
    assert seed in (None, comparison.speculative_completion.seed)


def test_less_than_one_repetition_is_refused() -> None:
    with pytest.raises(SettingError, match="repetitions"):
        compare(engine_of(FakeModel(VOCABULARY, LANGUAGE)), REQUEST, repetitions=0)


def test_the_margin_of_a_seed_stable_difference_is_that_of_the_draw() -> None:
    sampling = SamplingParams(temperature=1.0, top_k=3, top_p=1, min_p=0, seed=4)
    request = replace(REQUEST, sampling=sampling, verification=Verification(rule="stable"))
    model = FakeModel(VOCABULARY, LANGUAGE)
    done = Engine(model).generate(request)
    margins = []
    for token in range(VOCABULARY.size):
        found = find_divergence(model, request, done, replace(done, tokens=(*done.tokens[:9], token)))
        margins.append(0.0 if found is None else found.margin)
    # The token that was drawn leads each of the others that passed top-k; the rest are out.
    assert margins[done.tokens[9]] == 0.0
    assert sum(margin is None for margin in margins) == VOCABULARY.size - 3
    assert all(margin is None or margin >= 0 for margin in margins)
