"""Intervals and verdicts: known answers, coverage, and how often pure noise is called a result."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from outrider.core.numbers import Interval
from outrider.lab.bench.results import Results
from outrider.lab.bench.summary.speeds import outcome, verdicts
from outrider.lab.rows import BlockRow, HeadRow, Row, RunRow
from outrider.lab.statistics import estimate, self_ratio, t_tail

Floats = npt.NDArray[np.float64]
CERTAIN = ("faster", "slower")


def constant(plain: float, ratio: float, repetitions: int = 3) -> tuple[Floats, Floats]:
    return np.full(repetitions, plain), np.full(repetitions, plain / ratio)


def measured(
    rng: np.random.Generator, cases: int, repetitions: int, ratio: float, between: float, within: float
) -> list[tuple[Floats, Floats]]:
    """Cases whose speed-ups spread by `between` around `ratio`, requests with noise `within` (both log)."""
    found = []
    for _ in range(cases):
        own = ratio * math.exp(between * rng.standard_normal())
        noise = np.exp(within * rng.standard_normal((2, repetitions)))
        found.append((0.05 * noise[0], 0.05 / own * noise[1]))
    return found


def test_the_figure_is_the_geometric_mean_of_the_cases_ratios() -> None:
    interval = estimate([[constant(0.05, 2.0), constant(0.1, 8.0)]]).interval
    assert interval.value == pytest.approx(4.0)
    assert interval.low >= 2.0 - 1e-9 and interval.high <= 8.0 + 1e-9
    assert (interval.cases, interval.repetitions) == (2, 3)


def test_workloads_count_the_same_however_many_cases_they_have() -> None:
    strata = [[constant(0.05, 1.0)] * 9, [constant(0.05, 4.0)] * 2]
    assert estimate(strata).interval.value == pytest.approx(2.0)


def test_repetitions_are_drawn_in_pairs() -> None:
    """A machine that changes its pace between blocks does so for both."""
    pace = np.array([1.0, 1.5, 0.7, 2.0, 0.9])
    together = [(0.05 * pace, 0.025 * pace)] * 6
    pairs, apart = estimate([together]).interval, estimate([together], paired=False).interval
    assert pairs.high - pairs.low < 1e-9 and apart.high - apart.low > 0.2


@pytest.mark.parametrize(
    ("cases", "repetitions", "caveat"),
    [(1, 1, "one case, run once"), (1, 4, "one case: other"), (4, 1, "run once: the machine"), (4, 4, None)],
)
def test_what_an_interval_cannot_know_is_said(cases: int, repetitions: int, caveat: str | None) -> None:
    rng = np.random.default_rng(2)
    found = estimate([measured(rng, cases, repetitions, 1.5, 0.1, 0.02)])
    shown = found.interval.caveat
    assert shown is None if caveat is None else shown is not None and shown.startswith(caveat)
    if cases == repetitions == 1:
        assert found.interval.low == found.interval.value == found.interval.high and found.p_value == 1


@pytest.mark.parametrize(("cases", "between", "within"), [(6, 0.2, 0.03), (8, 0.02, 0.05), (16, 0.2, 0.02)])
def test_intervals_hold_the_truth_as_often_as_they_say(cases: int, between: float, within: float) -> None:
    rng = np.random.default_rng(3)
    inside = 0
    for _ in range(400):
        interval = estimate([measured(rng, cases, 4, 1.3, between, within)]).interval
        inside += interval.low <= 1.3 <= interval.high
    assert inside / 400 >= 0.925  # more where repetitions' noise is most of it: it is drawn on both levels


def test_p_values_of_nothing_are_spread_and_no_smaller_than_that() -> None:
    rng = np.random.default_rng(4)
    found = np.array([estimate([measured(rng, 8, 4, 1.0, 0.1, 0.02)]).p_value for _ in range(400)])
    assert (found < 0.05).mean() <= 0.075 and (found < 0.5).mean() > 0.35


def test_students_t() -> None:
    known = {(12.706, 1): 0.05, (4.303, 2): 0.05, (2.365, 7): 0.05, (2.228, 10): 0.05, (1.0, 1): 0.5}
    for (statistic, degrees), tail in known.items():
        assert t_tail(statistic, degrees) == pytest.approx(tail, abs=2e-4)


def test_plain_against_itself() -> None:
    rng = np.random.default_rng(5)
    quiet = [[0.05 * np.exp(0.001 * rng.standard_normal(4)) for _ in range(8)]]
    loud = [[0.05 * np.exp(0.1 * rng.standard_normal(4)) for _ in range(8)]]
    narrow, wide = self_ratio(quiet), self_ratio(loud)
    assert narrow is not None and wide is not None
    assert narrow.value == 1 and narrow.low * narrow.high == pytest.approx(1)
    assert narrow.high < 1.002 and 1.01 < wide.high < 1.2
    assert self_ratio([[np.array([0.05])]]) is None and self_ratio([]) is None


@pytest.mark.parametrize(
    ("speedup", "noise", "said"),
    [
        ((1.5, 1.4, 1.6), None, "faster"),
        ((0.8, 0.7, 0.9), (1.0, 0.98, 1.02), "slower"),
        ((1.1, 0.99, 1.2), None, "unsettled"),
        ((1.04, 0.99, 1.1), None, "tie"),
        ((1.03, 1.02, 1.04), (1.0, 0.95, 1.05), "tie"),
        ((1.06, 1.02, 1.1), (1.0, 0.95, 1.05), "faster"),
    ],
)
def test_a_result_is_a_tie_within_the_noise_or_near_1(
    speedup: tuple[float, float, float], noise: tuple[float, float, float] | None, said: str
) -> None:
    assert outcome(Interval(*speedup), Interval(*noise) if noise else None) == said


SETTINGS = [f"model {n}" for n in range(1, 11)]


def noisy_table(
    seed: int,
    true_ratio: float = 1.0,
    between: float = 0.0,
    within: float = 0.03,
    cases: int = 6,
    repetitions: int = 3,
) -> Results:
    """Ten settings under two workloads, all as fast as plain decoding but the first, and noise:
    of each case `between`, of each request `within` (log)."""
    rng = np.random.default_rng(seed)
    rows: list[Row] = [HeadRow(started="2026-01-01T00:00:00Z", machine={}, plan={})]
    for workload in ("a", "b"):
        own = between * rng.standard_normal((cases, len(SETTINGS)))
        for repetition in range(repetitions):
            block = f"{workload}/{repetition}"
            for case in range(cases):
                for setting in ("plain", *SETTINGS):
                    ratio = true_ratio if setting == SETTINGS[0] else 1.0
                    offset = own[case, SETTINGS.index(setting)] if setting != "plain" else 0.0
                    seconds = 5 / ratio * math.exp(offset + within * rng.standard_normal())
                    rows.append(run_row(block, setting, workload, str(case), repetition, seconds))
            rows.append(
                BlockRow(
                    block=block, target="t", workload=workload, repetition=repetition, hiccups=0, calls=1
                )
            )
    return Results.of(rows)


def run_row(
    block: str, setting: str, workload: str, case: str, repetition: int, decode_s: float, tokens: int = 100
) -> RunRow:
    return RunRow(
        block=block, target="t", draft=None if setting == "plain" else "d", setting=setting,
        workload=workload, case=case, repetition=repetition, order=0, tokens=tokens, prefill_s=0.5,
        decode_s=decode_s, target_calls=tokens, draft_calls=0, drafted=(), accepted=(),
    )  # fmt: skip


@pytest.mark.parametrize(("tables", "within"), [pytest.param(100, 0.01, marks=pytest.mark.slow), (30, 0.05)])
def test_tables_of_nothing_but_noise_are_called_ties(tables: int, within: float) -> None:
    found = [verdicts(noisy_table(seed, within=within)) for seed in range(tables)]
    assert sum(any(v.outcome in CERTAIN for v in table) for table in found) / tables <= 0.07


def test_a_result_that_other_prompts_could_turn_round_is_not_certain() -> None:
    """Prompts differ, the machine hardly: every figure is firm on these prompts, few are on others."""
    cells = [v for seed in range(20) for v in verdicts(noisy_table(seed, between=0.1, within=0.002))]
    assert sum(v.p_value < 1e-4 for v in cells) / len(cells) > 0.7
    assert sum(v.outcome in CERTAIN for v in cells) / len(cells) < 0.08
    assert not any(v.outcome in CERTAIN for v in cells if v.speedup.low <= 1 <= v.speedup.high)


@pytest.mark.parametrize("cases", [1, 2])
def test_few_prompts_and_repetitions_are_enough_for_a_large_difference(cases: int) -> None:
    """The noise is known from all cells of a table, not from two numbers."""
    table = verdicts(noisy_table(7, within=0.03, true_ratio=2.0, cases=cases, repetitions=2))
    assert {v.outcome for v in table if v.cell.setting == "model 1"} == {"faster"}
    assert {v.outcome for v in table if v.cell.setting != "model 1"} == {"tie"}


def test_what_ran_once_is_not_certain() -> None:
    table = verdicts(noisy_table(7, within=0.03, true_ratio=2.0, repetitions=1))
    assert {v.p_value for v in table} == {1.0}
    assert {v.outcome for v in table if v.cell.setting == "model 1"} == {"unsettled"}
    assert {v.outcome for v in table if v.cell.setting != "model 1"} == {"tie"}


def test_a_true_difference_is_found_among_nineteen_ties() -> None:
    shown = [(v.cell.setting, v.outcome) for v in verdicts(noisy_table(1000, true_ratio=1.5))]
    assert shown.count(("model 1", "faster")) == 2 and sum(said == "tie" for _, said in shown) == 18
    [slow] = {v.outcome for v in verdicts(noisy_table(1001, true_ratio=0.7)) if v.cell.setting == "model 1"}
    assert slow == "slower"
