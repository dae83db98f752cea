"""The figures of a report, each against rows whose answer is known; intervals and verdicts: known answers,
coverage, and how often pure noise is called a result."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from outrider.core.errors import InputError
from outrider.core.numbers import Interval
from outrider.lab.bench import figures
from outrider.lab.bench.figures import outcome, verdicts
from outrider.lab.bench.results import Cell, Results, Store
from outrider.lab.rows import BlockRow, CaseOutcome, HeadRow, PredictionRow, Row, RunRow
from outrider.lab.statistics import estimate, self_ratio, t_tail

Floats = npt.NDArray[np.float64]
CERTAIN = ("faster", "slower")
HEAD = HeadRow(started="2026-01-01T00:00:00Z", machine={}, plan={"repetitions": 3})


def run(setting: str, decode_s: float, **fields: Any) -> RunRow:
    values: dict[str, Any] = {
        "block": "w/0",
        "target": "t",
        "draft": "d" if setting.startswith(("model", "auto")) else None,
        "setting": setting,
        "workload": "w",
        "case": "1",
        "repetition": 0,
        "order": 0,
        "tokens": 100,
        "prefill_s": 1.0,
        "decode_s": decode_s,
        "target_calls": 100,
        "draft_calls": 0,
        "drafted": (),
        "accepted": (),
    }
    return RunRow(**(values | fields))


def block(name: str = "w/0", workload: str = "w", **fields: Any) -> BlockRow:
    values: dict[str, Any] = {"target": "t", "repetition": 0}
    return BlockRow(block=name, workload=workload, **(values | fields))


def prediction(
    setting: str, seconds: Mapping[str, float], plain_s: float = 10.0, **fields: Any
) -> PredictionRow:
    cases = tuple(
        CaseOutcome(
            case=case,
            tokens=100,
            seconds=took,
            plain_s=plain_s,
            target_calls=40,
            draft_calls=50,
            drafted=(40, 20),
            accepted=(30, 10),
            draft_s=0.2 * took,
            verify_s=0.7 * took,
        )
        for case, took in seconds.items()
    )
    values: dict[str, Any] = {"target": "t", "draft": "d", "workload": "w"}
    return PredictionRow(setting=setting, cases=cases, **(values | fields))


def results(*rows: Row) -> Results:
    return Results.of([HEAD, *rows])


def two_settings(ratios: Mapping[str, Sequence[float]], workload: str = "w") -> list[Row]:
    """Plain decoding at 0.1 s a token and `model 3`, so much faster in each repetition of each case."""
    rows: list[Row] = []
    for repetition in range(len(next(iter(ratios.values())))):
        name = f"{workload}/{repetition}"
        for case, found in ratios.items():
            where = {"case": case, "block": name, "repetition": repetition, "workload": workload}
            rows += [run("plain", 10.0, **where), run("model 3", 10.0 / found[repetition], **where)]
        rows.append(block(name, workload, repetition=repetition))
    return rows


# Which rows count


def test_only_complete_blocks_count() -> None:
    rows: list[Row] = [run("plain", 10.0), block(), run("plain", 99.0, block="w/1")]
    assert [row.decode_s for row in results(*rows).runs] == [10.0]
    assert results(run("plain", 10.0)).runs == ()


def test_what_ran_in_a_first_beginning_alone_does_not_count() -> None:
    """The block's clock tells where it began again."""
    first = [run("lookup 8", 9.0, started_s=0.1), run("plain", 99.0, started_s=5.0)]
    again = [run("plain", 10.0, started_s=0.1), run("model 3", 5.0, started_s=11.0)]
    found = results(*first, *again, block())
    assert [(row.setting, row.decode_s) for row in found.runs] == [("plain", 10.0), ("model 3", 5.0)]


def test_the_later_of_two_rows_about_the_same_counts() -> None:
    found = results(prediction("auto", {"1": 9.0}), prediction("auto", {"1": 4.0}))
    assert [row.cases[0].seconds for row in found.predictions] == [4.0]


def test_a_run_is_read_from_its_folder(tmp_path: Path) -> None:
    with Store.open(tmp_path / "run", HEAD) as store:
        for row in two_settings({"1": [2.0, 2.0]}):
            store.append(row)
    found = Results.read(tmp_path / "run")
    assert found.workloads == ("w",)
    assert len(found.runs) == 4 and len(found.blocks) == 2
    with pytest.raises(InputError):
        Results.read(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="do not say what was measured"):
        Results.of([])


# Speed


def test_a_speed_up_is_the_geometric_mean_of_the_cases_medians() -> None:
    found = results(*two_settings({"1": [2.0, 2.0, 9.0], "2": [8.0, 8.0, 8.0]}))
    interval = figures.measured_speedup(found, Cell("t", "d", "model 3", "w"))
    assert interval is not None and interval.value == pytest.approx(4.0)
    assert (interval.cases, interval.repetitions) == (2, 3)
    speed = figures.measured_speed(found, Cell("t", "d", "model 3", "w"))
    plain = figures.measured_speed(found, Cell("t", None, "plain", "w"))
    assert speed is not None and plain is not None
    assert [speed.value, plain.value] == pytest.approx([40.0, 10.0])


def test_only_blocks_that_have_both_are_compared() -> None:
    rows = two_settings({"1": [2.0, 2.0]})
    rows += [run("plain", 1000.0, block="w/9"), block("w/9")]
    interval = figures.measured_speedup(results(*rows), Cell("t", "d", "model 3", "w"))
    assert interval is not None and interval.value == pytest.approx(2.0) and interval.repetitions == 2


def test_over_all_workloads_is_over_each_of_them_or_nothing() -> None:
    both = results(*two_settings({"1": [1.0], "2": [1.0], "3": [1.0]}, "a"), *two_settings({"1": [4.0]}, "b"))
    pooled = figures.measured_speedup(both, Cell("t", "d", "model 3", None))
    assert pooled is not None and pooled.value == pytest.approx(2.0)
    half = results(
        *two_settings({"1": [4.0]}, "b"), run("plain", 10.0, block="a/0", workload="a"), block("a/0", "a")
    )
    assert figures.measured_speedup(half, Cell("t", "d", "model 3", None)) is None
    assert figures.measured_speedup(half, Cell("t", "d", "model 3", "b")) is not None


def test_the_best_setting_is_measured_before_predicted() -> None:
    measured = two_settings({"1": [2.0], "2": [2.0]})
    promising = prediction("auto", {"1": 1.0, "2": 1.0})
    ran, interval, is_measured = figures.fastest(results(*measured, promising), "t", "d", "w")
    assert (ran, is_measured) == ("model 3", True) and interval is not None and interval.value == 2.0
    assert figures.fastest(results(promising), "t", "d", "w")[::2] == ("auto", False)
    assert figures.fastest(results(promising), "t", None, "w") == ("", None, False)


# Prediction


def test_the_error_of_predicted_speed_ups() -> None:
    """The machine is a quarter slower than its curve; one of two speed-ups is predicted right."""
    rows: list[Row] = [
        run("plain", 12.5),
        run("model 3", 6.25),
        run("model 4", 5.0),
        block(),
        prediction("model 3", {"1": 5.0}),
        prediction("model 4", {"1": 5.0}),
    ]
    found = figures.prediction_error(results(*rows))
    assert found is not None and found.settings == 2
    assert found.median_error == pytest.approx(0.1)
    assert (found.within_10_ratio, found.within_5_ratio) == (0.5, 0.5)


# Counts


def test_counts_are_sums_over_requests() -> None:
    rows: list[Row] = [
        run("model 3", 5.0, drafted=(10, 8, 6), accepted=(9, 4), target_calls=20, verify_s=3.0, draft_s=1.0),
        run(
            "model 3", 5.0, case="2", drafted=(10,), accepted=(1,), target_calls=80, verify_s=4.0, draft_s=0.5
        ),
        block(),
    ]
    found = results(*rows)
    acceptance = figures.acceptance_by_position(found, Cell("t", "d", "model 3", None))
    assert acceptance is not None and acceptance.ratios == (0.5, 0.5, 0.0)
    assert figures.tokens_per_target_call(found, Cell("t", "d", "model 3", None)) == 2.0


def test_counts_of_what_did_not_run_are_replays() -> None:
    found = results(prediction("auto", {"1": 5.0}))
    acceptance = figures.acceptance_by_position(found, Cell("t", "d", "auto", "w"))
    assert acceptance is not None and acceptance.ratios == (0.75, 0.5)
    assert figures.tokens_per_target_call(found, Cell("t", "d", "auto", "w")) == 2.5


# Intervals


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
    interval = estimate([[constant(0.05, 2.0), constant(0.1, 8.0)]])
    assert interval.value == pytest.approx(4.0)
    assert interval.low >= 2.0 - 1e-9 and interval.high <= 8.0 + 1e-9
    assert (interval.cases, interval.repetitions) == (2, 3)


def test_workloads_count_the_same_however_many_cases_they_have() -> None:
    strata = [[constant(0.05, 1.0)] * 9, [constant(0.05, 4.0)] * 2]
    assert estimate(strata).value == pytest.approx(2.0)


def test_repetitions_are_drawn_in_pairs() -> None:
    """A machine that changes its pace between blocks does so for both."""
    pace = np.array([1.0, 1.5, 0.7, 2.0, 0.9])
    together = [(0.05 * pace, 0.025 * pace)] * 6
    pairs = estimate([together])
    assert pairs.high - pairs.low < 1e-9


@pytest.mark.parametrize(("cases", "between", "within"), [(6, 0.2, 0.03), (8, 0.02, 0.05), (16, 0.2, 0.02)])
def test_intervals_hold_the_truth_as_often_as_they_say(cases: int, between: float, within: float) -> None:
    rng = np.random.default_rng(3)
    inside = 0
    for _ in range(400):
        interval = estimate([measured(rng, cases, 4, 1.3, between, within)])
        inside += interval.low <= 1.3 <= interval.high
    assert inside / 400 >= 0.925  # more where repetitions' noise is most of it: it is drawn on both levels


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
    rows: list[Row] = []
    for workload in ("a", "b"):
        own = between * rng.standard_normal((cases, len(SETTINGS)))
        for repetition in range(repetitions):
            where: dict[str, Any] = {
                "block": f"{workload}/{repetition}",
                "workload": workload,
                "repetition": repetition,
            }
            for case in range(cases):
                for setting in ("plain", *SETTINGS):
                    ratio = true_ratio if setting == SETTINGS[0] else 1.0
                    offset = own[case, SETTINGS.index(setting)] if setting != "plain" else 0.0
                    seconds = 5 / ratio * math.exp(offset + within * rng.standard_normal())
                    rows.append(run(setting, seconds, case=str(case), **where))
            rows.append(block(where["block"], workload, repetition=repetition))
    return results(*rows)


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
