"""Cost curves: what they say between measured points, and how real calls mend them."""

import json
import math
import random
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.backends.gguf.model import Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.tuning import measure_side_by_side
from outrider.core.data import Logits, Span
from outrider.core.errors import SettingError
from outrider.costs import CallCosts, CallPoint
from outrider.costs.calibrate import calibrate
from outrider.costs.expected_speed import StepCosts, best_call, expected_tokens
from timed_models import TimedModel, noise, stairs_s
from tiny_gguf import write_tiny

GRID = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 64)
Truth = Callable[[int], float]


def curve(seconds: Truth, sizes: Sequence[int] = GRID) -> CallCosts:
    return CallCosts([CallPoint(n, seconds(n), spread_ratio=0.02) for n in sizes])


def feed(
    costs: CallCosts, truth: Truth, calls: int, sizes: Sequence[int] = (1, 2, 4, 8), seed: int = 1
) -> None:
    """Real calls of random sizes, with the noise of a shared machine."""
    factor, rng = noise(seed), random.Random(seed)
    for _ in range(calls):
        size = rng.choice(sizes)
        costs.observe(size, truth(size) * factor(), context=100)


def off(costs: CallCosts, truth: Truth, sizes: Sequence[int]) -> float:
    """The largest error of a prediction, as a factor of 1 or more."""
    return max(math.exp(abs(math.log(costs.call_s(n, context=100) / truth(n)))) for n in sizes)


# The curve itself


def test_measured_points_are_met_and_straight_lines_join_them() -> None:
    costs = curve(stairs_s)
    asked = costs.calls_s(64, context=0)
    assert [asked[n - 1] for n in GRID] == pytest.approx([stairs_s(n) for n in GRID])
    assert asked[9] == pytest.approx(stairs_s(9) + (stairs_s(12) - stairs_s(9)) / 3)
    assert asked[3] < asked[2], "stairs are not smoothed over"


def test_tokens_of_other_sequences_shift_the_curve_which_goes_on_as_it_ended() -> None:
    alone = (costs := curve(stairs_s)).calls_s(40, context=0)
    assert costs.calls_s(8, context=0, others=24).tolist() == alone[24:32].tolist()
    assert costs.call_s(7, context=0) == alone[6]
    costs = curve(lambda n: 0.1 + 0.01 * n)
    assert costs.call_s(200, context=0) == pytest.approx(2.1)
    assert costs.calls_s(30, context=0, others=60)[-1] == pytest.approx(1.0)


def test_context_adds_what_was_measured_and_noise_never_makes_it_pay() -> None:
    costs = CallCosts([CallPoint(n, stairs_s(n, c), c) for n in (1, 4, 16) for c in (0, 1000, 2000)])
    assert costs.call_s(4, context=64 * 50) == pytest.approx(stairs_s(4, 64 * 50))
    assert costs.call_s(16, context=640) == pytest.approx(stairs_s(16, 640))
    costs = CallCosts([CallPoint(1, 0.1, 0), CallPoint(1, 0.09, 4096), CallPoint(2, 0.12)])
    assert costs.call_s(1, context=8192) >= costs.call_s(1, context=0)


@pytest.mark.parametrize(
    "call",
    [
        {"num_tokens": 0, "seconds": 1.0},
        {"num_tokens": 65, "seconds": 1.0},
        {"num_tokens": 2, "seconds": 0.0},
        {"num_tokens": 2, "seconds": math.nan},
        {"num_tokens": 2, "seconds": 1.0, "context_tokens": -1},
        {"num_tokens": 2, "seconds": 1.0, "spread_ratio": math.inf},
    ],
)
def test_what_no_call_can_be_is_refused(call: dict[str, float]) -> None:
    with pytest.raises(SettingError, match="a call over"):
        CallPoint(**call)  # type: ignore[arg-type]


# Learning

WRONG: dict[str, Truth] = {
    "double": lambda n: 2 * stairs_s(n),
    "half": lambda n: 0.5 * stairs_s(n),
    "flat": lambda n: 0.06 * (1 + 0.05 * (n - 1)),
    "steep": lambda n: 0.06 * (1 + 1.2 * (n - 1)),
    "inverted": lambda n: stairs_s(n) * (2.0 if n == 4 else 0.6 if n == 3 else 1.0),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_wrong_curve_is_right_again_after_twenty_calls_of_each_size(wrong: Truth, seed: int) -> None:
    costs, sizes = curve(wrong), (1, 2, 3, 4, 6, 8)
    assert off(costs, stairs_s, sizes) > 1.5
    feed(costs, stairs_s, 120, sizes, seed)
    assert off(costs, stairs_s, sizes) < 1.12


def test_without_calibration_the_first_call_sets_the_unit_and_the_rest_is_learned() -> None:
    costs = CallCosts()
    assert not costs.is_known and not costs.is_measured and costs.call_s(8, context=0) > 0
    costs.observe(1, 2.0, context=0)
    assert costs.is_known and costs.call_s(1, context=0) == pytest.approx(2.0, rel=0.01)
    assert costs.call_s(8, context=0) / costs.call_s(1, context=0) == pytest.approx(1 + 0.35 * 7, rel=0.01)
    other = CallCosts()
    feed(other, stairs_s, 60)
    assert off(other, stairs_s, (1, 2, 4, 8)) < 1.12
    assert off(other, stairs_s, (6, 12)) < 1.6, "what was not seen follows its neighbours"
    assert other.drift == 1.0
    other = CallCosts()
    other.observe(8, 3.45, context=0)
    assert other.call_s(1, context=0) == pytest.approx(1.0, rel=0.05), "the unit can come from any call"


@given(st.floats(0.33, 3.0), st.sampled_from([(1,), (1, 4), (1, 2, 3, 4, 5, 6, 7, 8)]), st.integers(0, 99))
def test_a_lasting_change_is_followed_within_eight_calls(
    factor: float, sizes: tuple[int, ...], seed: int
) -> None:
    costs = curve(stairs_s)
    feed(costs, stairs_s, 40, sizes, seed)
    feed(costs, lambda n: factor * stairs_s(n), 8, sizes, seed + 100)
    change = abs(math.log(factor))
    assert abs(math.log(costs.drift / factor)) < max(0.2, 0.35 * change)


@given(st.floats(3.0, 1e6), st.booleans(), st.sampled_from((1, 4, 8)), st.integers(0, 99))
def test_one_outlier_moves_little(factor: float, slower: bool, size: int, seed: int) -> None:
    costs = curve(stairs_s)
    feed(costs, stairs_s, 40, seed=seed)
    before = costs.calls_s(64, context=100).copy()
    costs.observe(size, stairs_s(size) * (factor if slower else 1 / factor), context=100)
    assert np.allclose(costs.calls_s(64, context=100), before, rtol=0.04)


@given(
    st.lists(
        st.tuples(st.integers(1, 200), st.floats(1e-6, 1e4), st.integers(0, 100_000)),
        max_size=60,
    ),
    st.booleans(),
)
def test_whatever_is_observed_times_stay_times(calls: list[tuple[int, float, int]], measured: bool) -> None:
    costs = curve(stairs_s) if measured else CallCosts()
    for size, seconds, context in calls:
        costs.observe(size, seconds, context=context)
    for context in (0, 1000, 50_000):
        table = costs.calls_s(100, context=context)
        assert np.all(np.isfinite(table)) and np.all(table > 0)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_time_is_passed_over(seconds: float) -> None:
    costs = curve(stairs_s)
    costs.observe(1, seconds, context=0)
    costs.observe_prefill(100, seconds)
    assert costs.num_observed == 0 and costs.call_s(1, context=0) == pytest.approx(stairs_s(1))
    assert costs.prefill_s(64) == pytest.approx(stairs_s(64), rel=0.02)


def test_the_drift_is_what_calls_take_now() -> None:
    costs = curve(stairs_s)
    for truth, drift in ((stairs_s, 1.0), (WRONG["double"], 2.0), (stairs_s, 1.0)):
        feed(costs, truth, 40)
        assert costs.drift == pytest.approx(drift, rel=0.1)


def grown(n: int, context: int) -> float:
    """Stored tokens add a seventh of what is assumed where nothing was measured."""
    return stairs_s(n) * (1 + context / 60_000)


def test_calls_at_long_contexts_are_learned_from_and_say_nothing_of_short_ones() -> None:
    costs, factor, rng = curve(stairs_s), noise(1), random.Random(1)
    for i in range(120):
        context, size = (200, 8_000, 32_000)[i // 20 % 3], rng.choice((1, 2, 4, 8))
        costs.observe(size, grown(size, context) * factor(), context=context)
    assert costs.drift == pytest.approx(1.0, rel=0.1)
    for found in (costs, costs.refined(), costs.refined(0.3)):
        for size, context in product((1, 2, 4, 8), (200, 8_000, 32_000)):
            expected = pytest.approx(grown(size, context), rel=0.2)
            assert found.call_s(size, context=context) == expected


def test_what_drafts_cost_after_many_tokens_is_learned_from_few_of_any_length() -> None:
    """Where attention takes most of the time, each token of a call costs as much as the first."""
    costs = curve(stairs_s)
    for size in (1, 9, 1, 14, 1, 22, 1, 17, 1, 11, 1, 20):
        costs.observe(size, stairs_s(size) + size * stairs_s(1), context=16_000)
    for size in (10, 16, 24):
        expected = stairs_s(size) + size * stairs_s(1)
        assert costs.call_s(size, context=16_000) == pytest.approx(expected, rel=0.35)


def test_until_a_long_context_was_seen_a_curve_grows_as_the_targets() -> None:
    target, draft = curve(stairs_s), CallCosts([CallPoint(1, 0.01)])
    for _ in range(60):
        target.observe(1, 2 * stairs_s(1), context=32_000)
    draft.follow(target, 32_000)
    assert draft.call_s(1, context=32_000) == pytest.approx(0.02, rel=0.1)
    assert draft.call_s(1, context=0) == pytest.approx(0.01, rel=0.01)
    for _ in range(60):
        draft.observe(1, 0.04, context=32_000)
    draft.follow(target, 32_000)
    assert draft.call_s(1, context=32_000) == pytest.approx(0.04, rel=0.1)


def test_a_prompt_takes_longer_to_read_after_many_tokens() -> None:
    costs = CallCosts([CallPoint(1, 0.06), CallPoint(1, 0.12, 8_000)], prefill_token_s=0.006)
    assert costs.prefill_s(10, context=8_000) == pytest.approx(0.12, rel=0.1)
    for _ in range(20):
        costs.observe_prefill(100, 2.4, context=8_000)
    assert costs.prefill_s(10) == pytest.approx(0.12, rel=0.1), "twice as slow as measured"


def test_the_prompts_own_speed_is_followed_and_forgotten_where_nobody_reads() -> None:
    costs = CallCosts([CallPoint(1, 0.06)], prefill_token_s=0.006)
    assert costs.prefill_s(100) == pytest.approx(0.6, rel=0.03)
    costs.observe_prefill(2, 1.0)
    costs.observe_prefill(256, 256 * 0.6)
    assert costs.prefill_s(100) < 31, "one slow read is not all"
    for _ in range(20):
        costs.observe_prefill(256, 256 * 0.012)
    assert costs.prefill_s(100) == pytest.approx(1.2, rel=0.03)
    for _ in range(40):
        costs.follow(curve(stairs_s), 0)
    assert costs.prefill_s(100) == pytest.approx(0.6, rel=0.03)


def test_a_prompt_is_paid_for_as_far_as_it_is_read() -> None:
    costs = CallCosts([CallPoint(1, 0.06)], prefill_token_s=0.006, window=50)
    assert [costs.read_tokens(n) for n in (20, 50, 400)] == [20, 50, 50]
    assert costs.prefill_s(20) == pytest.approx(0.12, rel=0.03)
    assert costs.prefill_s(400) == pytest.approx(0.3, rel=0.03)
    for _ in range(20):
        costs.observe_prefill(40, 40 * 0.012)
    assert costs.prefill_s(400) == pytest.approx(0.6, rel=0.03)
    assert costs.refined().window == 50
    costs.observe(1, 0.06, context=0)
    assert costs.refined().prefill_s(400) == pytest.approx(0.6, rel=0.03)


# What is kept


def test_what_was_learned_becomes_part_of_the_points() -> None:
    costs = curve(WRONG["double"])
    feed(costs, stairs_s, 100)
    again = costs.refined()
    assert off(again, stairs_s, (1, 2, 4, 8)) < 1.1 and again.num_observed == 0
    assert again.drift == 1.0


def test_sizes_that_were_seen_often_become_points() -> None:
    costs = curve(stairs_s)
    feed(costs, lambda n: stairs_s(n) * (0.7 if n == 20 else 1), 80, (1, 20))
    again = costs.refined()
    assert 20 in {point.num_tokens for point in again.points}
    assert again.call_s(20, context=0) == pytest.approx(0.7 * stairs_s(20), rel=0.1)


def test_an_unmeasured_curve_is_kept_by_what_it_saw() -> None:
    costs = CallCosts()
    feed(costs, stairs_s, 80)
    again = costs.refined(0.3)
    assert again.is_measured and off(again, stairs_s, (1, 2, 4, 8)) < 1.15
    assert not CallCosts().refined().is_measured


_POINTS = st.builds(
    CallPoint, st.integers(1, 64), st.floats(1e-6, 1e3), st.integers(0, 40_000), st.floats(0, 2)
)


@given(
    st.lists(_POINTS, max_size=20), st.floats(1e-5, 1), st.none() | st.floats(1e-6, 1), st.integers(0, 9999)
)
def test_json_carries_a_curve_unchanged(
    points: list[CallPoint], unit: float, prefill_token_s: float | None, window: int
) -> None:
    costs = CallCosts([CallPoint(1, unit), *points], prefill_token_s=prefill_token_s, window=window)
    again = CallCosts.from_json(json.loads(json.dumps(costs.as_json())))
    assert again.points == costs.points and again.prefill_token_s == prefill_token_s
    assert again.window == window
    for context in (0, 5000):
        asked = [c.calls_s(64, context=context) for c in (costs, again)]
        assert asked[0].tolist() == asked[1].tolist()


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        ({"schema": "outrider.costs/9"}, "schema"),
        ({"calls": None}, "damaged"),
        ({"calls": [{"tokens": 1}]}, "damaged"),
        ({"calls": [{"tokens": 1, "seconds": "soon"}]}, "damaged"),
        ({"calls": [[1, 2]]}, "damaged"),
        ({"calls": [{"tokens": 1, "seconds": -1}]}, "damaged"),
        ({"calls": [{"tokens": 4, "seconds": 1}]}, "single token"),
        ({"prefill_token_s": -3}, "damaged"),
        ({"window_tokens": -1}, "damaged"),
    ],
)
def test_damaged_data_is_refused_by_name(damage: dict[str, object], complaint: str) -> None:
    with pytest.raises(SettingError, match=complaint) as caught:
        CallCosts.from_json(curve(stairs_s).as_json() | damage, "mine.json")
    assert str(caught.value).startswith("mine.json")


# What a curve means for drafts, against plain enumeration

CURVES = st.lists(st.floats(0.5, 8.0), min_size=9, max_size=9).map(lambda rest: [1.0, *rest])


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("num_drafted", [0, 1, 3, 5])
def test_expected_tokens_by_enumeration(acceptance: float, num_drafted: int) -> None:
    expected = 0.0
    for right in product((True, False), repeat=num_drafted):
        probability = 1.0
        for one in right:
            probability *= acceptance if one else 1 - acceptance
        accepted = right.index(False) if False in right else num_drafted
        expected += probability * (accepted + 1)
    assert expected_tokens(num_drafted, acceptance) == pytest.approx(expected)


@given(CURVES, st.integers(1, 9), st.floats(0, 3), st.none() | st.floats(0, 3))
def test_at_break_even_a_draft_is_as_fast_as_plain_decoding(
    calls_s: list[float], num_drafted: int, draft_s: float, first_s: float | None
) -> None:
    costs = StepCosts(calls_s, draft_s, first_s)
    found = costs.break_even(num_drafted)
    needed = calls_s[num_drafted] + (draft_s if first_s is None else first_s) + (num_drafted - 1) * draft_s
    if found is None:
        assert needed > num_drafted + 1
    elif found == 0:
        assert needed <= 1
    else:
        assert expected_tokens(num_drafted, found) == pytest.approx(needed)
        assert costs.speedup(num_drafted, found) == pytest.approx(1)


@given(CURVES, st.floats(0, 1))
def test_the_best_call_is_the_best_of_all(calls_s: list[float], acceptance: float) -> None:
    best = best_call(calls_s, acceptance)
    every = [calls_s[n - 1] / expected_tokens(n - 1, acceptance) for n in range(1, 11)]
    assert every[best - 1] == pytest.approx(min(every))
    found = [StepCosts(calls_s).speedup(n, acceptance) for n in StepCosts(calls_s).lengths]
    assert found == pytest.approx([calls_s[0] / cost for cost in every[1:]])


# Calibration finds the curve that a scripted clock hides, within its time, and leaves no trace


def measured(costs: CallCosts, context: int = 0) -> dict[int, float]:
    """Seconds by size of the points at a context."""
    return {p.num_tokens: p.seconds for p in costs.points if p.context_tokens == context}


def test_every_measured_size_is_exact_and_others_lie_on_the_line_between_them() -> None:
    model = TimedModel()
    costs = calibrate(model, seconds=200, clock=model.clock)
    found = measured(costs)
    assert found == {n: pytest.approx(stairs_s(n)) for n in found}
    assert set(found) >= {*range(1, 18), 24, 25, 32, 33, 64} and not {26, 27} & set(found)
    assert found[4] < found[3] and found[16] < found[15], "stairs are kept"
    middle = (stairs_s(25) * 1 + stairs_s(28) * 2) / 3
    assert costs.call_s(27, context=0) == pytest.approx(middle)


def test_short_drafts_are_measured_first_when_time_is_short() -> None:
    model = TimedModel()
    found = measured(calibrate(model, seconds=6, clock=model.clock))
    assert set(found) >= set(range(1, 9)) | {16} and 64 not in found


@pytest.mark.parametrize("seconds", [0.0, 0.1, 1.0, 6.0, 40.0])
@pytest.mark.parametrize("max_sequences", [1, 4])
def test_the_time_is_kept(seconds: float, max_sequences: int) -> None:
    model = TimedModel(max_sequences=max_sequences)
    costs = calibrate(model, seconds=seconds, clock=model.clock)
    assert measured(costs)[1] == pytest.approx(stairs_s(1))
    warm_up_s = 2 * stairs_s(1) + stairs_s(4)
    assert model.now <= max(seconds, 3 * stairs_s(1)) + warm_up_s + 1e-9


def test_firm_medians_end_it_early() -> None:
    model = TimedModel()
    calibrate(model, seconds=10_000, clock=model.clock)
    at_start = [len(call[0].tokens) for call in model.calls if call[0].start == 0 and call[0].rows]
    assert at_start.count(5) == at_start.count(64) == 5


def test_the_context_slope_is_found() -> None:
    model = TimedModel()
    costs = calibrate(model, seconds=400, clock=model.clock)
    assert measured(costs, 512) and measured(costs, 8192)
    for n in (1, 2, 4, 8, 16, 32):
        assert costs.call_s(n, context=4096) == pytest.approx(stairs_s(n, 4096), rel=0.01)
    assert costs.prefill_token_s == pytest.approx(stairs_s(128, 8064) / 128, rel=0.05)


def test_outliers_do_not_show() -> None:
    model = TimedModel(disturb=noise(seed=3, spread=0.05, outliers=0.08))
    found = measured(calibrate(model, seconds=150, clock=model.clock))
    assert found == {n: pytest.approx(stairs_s(n), rel=0.15) for n in found if n <= 16} | {
        n: pytest.approx(stairs_s(n), rel=0.4) for n in found if n > 16
    }


@pytest.mark.parametrize("rows", ["all", "last"])
def test_the_rows_are_those_that_the_engine_asks_for(rows: str) -> None:
    model = TimedModel()
    calibrate(model, seconds=5, clock=model.clock, rows="all" if rows == "all" else "last")
    asked = {(len(span.tokens), span.rows) for call in model.calls for span in call if span.rows}
    assert asked and all(given == (size if rows == "all" else 1) for size, given in asked)


def test_the_models_limits_are_kept() -> None:
    # The fake model raises where a call leaves its batch, its rows or its context.
    model = TimedModel(context_length=20, max_batch_tokens=12, max_rows=10)
    assert max(measured(calibrate(model, seconds=50, clock=model.clock))) == 10


def test_a_model_that_cannot_rewind_is_measured_at_an_empty_context() -> None:
    model = TimedModel(rewind="none")
    costs = calibrate(model, seconds=50, clock=model.clock)
    assert {point.context_tokens for point in costs.points} == {0} and len(costs.points) > 8


class Card(TimedModel):
    """A GPU of stairs after 8 tokens: the first of equal calls takes 1.3 times as long as those that repeat
    it, the second three times."""

    def __init__(self) -> None:
        super().__init__(lambda n, c, _m: (0.008 if n <= 8 else 0.012) + 1e-7 * c)
        self._row = (0, 0)

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        tokens, before = sum(len(span.tokens) for span in spans), self.now
        self._row = (tokens, self._row[1] + 1 if tokens == self._row[0] else 0)
        rows = super().decode(spans)
        self.now += (self.now - before) * (0.3, 2.0, 0.0)[min(self._row[1], 2)]
        return rows


def test_on_a_gpu_calls_are_timed_after_equal_ones_and_a_switch_by_itself() -> None:
    model = Card()
    costs = calibrate(model, seconds=4.5, on_gpu=True, clock=model.clock)
    assert model.now <= 5.0
    assert set(measured(costs)) >= {1, 2, 3, 4, 8, 9, 16}
    assert costs.calls_s(9, context=0).tolist() == pytest.approx([*[0.008] * 8, 0.012], rel=0.01)
    assert costs.switch_s == pytest.approx(0.3 * 0.008)
    assert CallCosts.from_json(costs.refined().as_json()).switch_s == costs.switch_s
    assert calibrate(model, seconds=0.1, on_gpu=True, clock=model.clock).switch_s == 0.0, "no time for it"


class Interrupted(TimedModel):
    """Raises in its 40th call."""

    error: type[BaseException] = KeyboardInterrupt

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        rows = super().decode(spans)
        if len(self.calls) == 40:
            raise self.error("now")
        return rows


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_the_model_is_left_empty(error: type[BaseException]) -> None:
    model = Interrupted(max_sequences=3)
    model.error = error
    model.decode([Span(1, (0, 1, 2), 0, 0)])
    with pytest.raises(error):
        calibrate(model, seconds=100, clock=model.clock)
    assert [model.length(sequence) for sequence in range(3)] == [0, 0, 0]
    calibrate(model, seconds=20, clock=model.clock)
    assert [model.length(sequence) for sequence in range(3)] == [0, 0, 0]


def test_progress_runs_from_nothing_to_one() -> None:
    model, parts = TimedModel(), list[float]()
    calibrate(model, seconds=5, clock=model.clock, progress=parts.append)
    assert parts == sorted(parts) and 0 <= parts[0] < 0.1 and 0.8 < parts[-1] <= 1


def test_models_side_by_side_share_what_slows_them() -> None:
    clock = TimedModel()

    class Shared(TimedModel):
        """A model that moves the common clock."""

        def decode(self, spans: Sequence[Span]) -> list[Logits]:
            before = self.now
            rows = super().decode(spans)
            clock.now += (self.now - before) * (1 + clock.now / 60)  # it grows ever slower
            return rows

    models = [Shared(), Shared(lambda n, c, m: 0.9 * stairs_s(n, c, m))]
    slow, fast = measure_side_by_side(models, seconds=600, clock=clock.clock)
    for n in (1, 2, 4, 16, 32):
        assert fast.call_s(n, context=0) / slow.call_s(n, context=0) == pytest.approx(0.9, rel=0.02)
    assert fast.prefill_s(100) / slow.prefill_s(100) == pytest.approx(0.9, rel=0.05)
    assert [model.length(0) for model in models] == [0, 0]


def test_side_by_side_at_a_context_that_the_time_allows() -> None:
    models = [TimedModel(), TimedModel()]
    measure_side_by_side(models, seconds=1000, context=300, clock=lambda: models[0].now + models[1].now)
    starts = {span.start for call in models[0].calls for span in call if span.rows}
    assert starts == {0, 300}  # the warm-up, and all that counts


def test_a_tiny_model_of_the_real_backend(tmp_path: Path) -> None:
    weights = Weights(write_tiny(tmp_path / "tiny.gguf"), LoadOptions(threads=1))
    model = weights.open(512, max_sequences=2)
    costs = calibrate(model, seconds=0.2)
    assert costs.is_measured and measured(costs)[1] > 0
    assert [model.length(sequence) for sequence in range(2)] == [0, 0]
    weights.close()
