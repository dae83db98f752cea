"""The figures of a report: each against rows whose answer is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from outrider.core.errors import InputError
from outrider.lab.bench.results import Cell, Results
from outrider.lab.bench.store import Store
from outrider.lab.bench.summary import counts, speeds
from outrider.lab.rows import (
    BlockRow,
    CaseOutcome,
    HeadRow,
    PredictionRow,
    QualityRow,
    Row,
    RunRow,
)

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
    values: dict[str, Any] = {"target": "t", "repetition": 0, "hiccups": 1, "calls": 200}
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
    assert (found.targets, found.drafts, found.workloads) == (("t",), ("d",), ("w",))
    assert len(found.runs) == 4 and len(found.blocks) == 2
    with pytest.raises(InputError):
        Results.read(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="do not say what was measured"):
        Results.of([])


# Speed


def test_a_speed_up_is_the_geometric_mean_of_the_cases_medians() -> None:
    found = results(*two_settings({"1": [2.0, 2.0, 9.0], "2": [8.0, 8.0, 8.0]}))
    interval = speeds.measured_speedup(found, Cell("t", "d", "model 3", "w"))
    assert interval is not None and interval.value == pytest.approx(4.0)
    assert (interval.cases, interval.repetitions) == (2, 3)
    speed = speeds.measured_speed(found, Cell("t", "d", "model 3", "w"))
    plain = speeds.plain_speed(found, "t", "w")
    assert speed is not None and plain is not None
    assert [speed.value, plain.value] == pytest.approx([40.0, 10.0])


def test_only_blocks_that_have_both_are_compared() -> None:
    rows = two_settings({"1": [2.0, 2.0]})
    rows += [run("plain", 1000.0, block="w/9"), block("w/9")]
    interval = speeds.measured_speedup(results(*rows), Cell("t", "d", "model 3", "w"))
    assert interval is not None and interval.value == pytest.approx(2.0) and interval.repetitions == 2


def test_over_all_workloads_is_over_each_of_them_or_nothing() -> None:
    both = results(*two_settings({"1": [1.0], "2": [1.0], "3": [1.0]}, "a"), *two_settings({"1": [4.0]}, "b"))
    pooled = speeds.measured_speedup(both, Cell("t", "d", "model 3", None))
    assert pooled is not None and pooled.value == pytest.approx(2.0)
    half = results(
        *two_settings({"1": [4.0]}, "b"), run("plain", 10.0, block="a/0", workload="a"), block("a/0", "a")
    )
    assert speeds.measured_speedup(half, Cell("t", "d", "model 3", None)) is None
    assert speeds.measured_speedup(half, Cell("t", "d", "model 3", "b")) is not None


def test_the_best_setting_is_measured_before_predicted() -> None:
    measured = two_settings({"1": [2.0], "2": [2.0]})
    promising = prediction("auto", {"1": 1.0, "2": 1.0})
    assert speeds.best_setting(results(*measured, promising), "t", "d", "w") == "model 3"
    assert speeds.best_setting(results(promising), "t", "d", "w") == "auto"
    assert speeds.best_setting(results(*two_settings({"1": [0.5]})), "t", "d", "w") == "plain"


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
    found = speeds.prediction_error(results(*rows))
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
    acceptance = counts.acceptance_by_position(found, Cell("t", "d", "model 3", None))
    assert acceptance is not None and acceptance.is_measured
    assert acceptance.ratios == (0.5, 0.5, 0.0)
    assert counts.tokens_per_target_call(found, Cell("t", "d", "model 3", None)) == 2.0
    assert counts.hiccups(found).ratio == 1 / 200


def test_counts_of_what_did_not_run_are_replays() -> None:
    found = results(prediction("auto", {"1": 5.0}))
    acceptance = counts.acceptance_by_position(found, Cell("t", "d", "auto", "w"))
    assert acceptance is not None and acceptance.ratios == (0.75, 0.5) and not acceptance.is_measured
    assert counts.tokens_per_target_call(found, Cell("t", "d", "auto", "w")) == 2.5


def test_quality_is_over_tokens() -> None:
    rows = [
        QualityRow(
            target="t",
            reference="r",
            workload="w",
            case=case,
            num_tokens=n,
            mean_kl=kl,
            top1_agreement=1 - kl,
        )
        for case, n, kl in (("1", 100, 0.1), ("2", 300, 0.5))
    ]
    found = counts.quality_of(results(*rows), "t")
    assert found is not None and found.num_tokens == 400
    assert (found.mean_kl, found.top1_agreement) == pytest.approx((0.4, 0.6))


# The time
