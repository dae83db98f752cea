"""A sweep over exact models: what it runs, what it says, and that a broken one ends like one left alone."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench_models import FakeLoader, plan
from outrider.bench.progress import Progress
from outrider.bench.results import Results
from outrider.bench.rows import (
    AnswerRow,
    BlockRow,
    ChoiceRow,
    HeadRow,
    OffersRow,
    PairRow,
    PredictionRow,
    Row,
    RunRow,
)
from outrider.bench.settings import Setting
from outrider.bench.store import ROWS, Store, read_rows
from outrider.bench.sweep import run_sweep
from outrider.core.errors import InputError, SettingError


def of(rows: list[Row], kind: type[Any]) -> list[Any]:
    return [row for row in rows if isinstance(row, kind)]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, list[Row], list[Progress]]:
    folder = tmp_path_factory.mktemp("sweep")
    told: list[Progress] = []
    results = run_sweep(plan(folder), folder / "run", progress=told.append, loader=FakeLoader())
    return results, read_rows(folder / "run"), told


def test_answers_are_recorded_once_and_drafts_are_scored_along_them(swept: Any) -> None:
    _, rows, _ = swept
    answers = of(rows, AnswerRow)
    assert len(answers) == 4
    assert {len(answer.tokens) for answer in answers} == {24}
    by_case = {(answer.workload, answer.case): answer for answer in answers}
    for offers in of(rows, OffersRow):
        right = offers.tokens == by_case[offers.workload, offers.case].tokens
        assert right == (offers.draft == "twin")
    assert {offers.draft for offers in of(rows, OffersRow)} == {"twin", "stranger"}
    assert {pair.draft: pair.usable for pair in of(rows, PairRow)} == {
        "twin": True,
        "stranger": True,
        "foreign": False,
    }


def test_every_setting_is_predicted_and_few_are_run(swept: Any) -> None:
    results, rows, _ = swept
    predicted = {(row.draft, row.setting) for row in of(rows, PredictionRow)}
    assert {
        (None, "plain"),
        (None, "lookup 6/0.5"),
        ("twin", "model 4"),
        ("stranger", "both 1/0.5"),
    } <= predicted
    assert ("twin", "plain") not in predicted and (None, "model 4") not in predicted
    assert len(predicted) == 2 + 2 * 6 + 1 + 2 * (2 * 6 * 2 + 2)
    run = {(row.draft, row.setting) for row in results.runs}
    assert run < predicted and len(run) < len(predicted) / 3
    for choice in of(rows, ChoiceRow):
        assert ("auto lookup" if choice.draft is None else "auto") in (*choice.finalists, *choice.controls)


def test_predicted_and_real_runs_of_fixed_settings_make_the_same_calls(swept: Any) -> None:
    results, rows, _ = swept
    predicted = {
        (row.draft, row.setting, row.workload, case.case): case
        for row in of(rows, PredictionRow)
        for case in row.cases
    }
    compared = 0
    for run in results.runs:
        assert run.equal and run.divergence is None
        if Setting.of(run.setting).is_auto:
            continue
        case = predicted[run.draft, run.setting, run.workload, run.case]
        assert (run.tokens, run.target_calls, run.draft_calls) == (
            case.tokens,
            case.target_calls,
            case.draft_calls,
        )
        assert (run.drafted, run.accepted) == (case.drafted, case.accepted)
        compared += 1
    assert compared > 20


def test_blocks_are_complete_and_shuffled(swept: Any) -> None:
    results, rows, _ = swept
    assert {(b.workload, b.repetition) for b in of(rows, BlockRow)} == {
        (w, r) for w in ("letters", "words") for r in (0, 1)
    }
    orders = set()
    for block in of(rows, BlockRow):
        runs = [run for run in results.runs if run.block == block.block]
        by_case = Counter(run.case for run in runs)
        assert len(set(by_case.values())) == 1
        for case in by_case:
            mine = [(run.draft, run.setting) for run in runs if run.case == case]
            assert len(set(mine)) == len(mine)
            orders.add(tuple(mine))
    assert len(orders) == 8


def test_progress_goes_up_and_tells_the_time_left(swept: Any) -> None:
    _, _, told = swept
    assert told[-1].done > 0.9
    assert told[-1].left_s is not None and told[-1].left_s < 5
    assert {"recording", "scoring", "replaying", "running"} <= {step.stage for step in told}


# Broken and gone on with


class Broken(Exception):
    pass


def signature(rows: list[Row]) -> Counter[str]:
    """What rows say, without times, and without the counts of the automatic choice, which listens to the
    clock."""
    kept: Counter[str] = Counter()
    complete = {row.block for row in of(rows, BlockRow)}
    runs: dict[object, Row] = {}
    for row in rows:
        if isinstance(row, RunRow):
            if row.block in complete:
                runs[row.block, row.draft, row.setting, row.case] = row
        elif not isinstance(row, HeadRow):
            kept[repr(_timeless(row))] += 1
    for run in runs.values():
        kept[repr(_timeless(run))] += 1
    return kept


def _timeless(row: Row) -> dict[str, Any]:
    data = row.model_dump()
    auto = "setting" in data and Setting.of(data["setting"]).is_auto
    drop = {"calls", "own_s", "own_token_s", "curve", "hiccups", "bound_s"}
    if auto:
        drop |= {"target_calls", "draft_calls", "drafted", "accepted", "forced"}
    data = {k: v for k, v in data.items() if not k.endswith("_s") and k not in drop and k != "seconds"}
    if "cases" in data:
        counts = ("case", "tokens") if auto else ("case", "tokens", "target_calls", "draft_calls")
        data["cases"] = [{key: case[key] for key in counts} for case in row.model_dump()["cases"]]
    return data


@pytest.mark.parametrize("first", [1, 2, 5, 13, 40, 90, 150, 185])
def test_a_sweep_that_is_killed_ends_with_the_same_rows(
    swept: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    _, whole, _ = swept
    append = Store.append
    left = [first]

    def dying(store: Store, row: Row) -> None:
        left[0] -= 1
        if left[0] == 0:
            left[0] = 60  # and again, but not within every block
            data = row.model_dump_json()
            os.write(store._file.fileno(), data[: len(data) // 2].encode())  # a torn line
            raise Broken
        append(store, row)

    monkeypatch.setattr(Store, "append", dying)
    for _ in range(400):
        try:
            run_sweep(plan(tmp_path), tmp_path / "run", loader=FakeLoader())
            break
        except Broken:
            continue
    monkeypatch.undo()
    assert signature(read_rows(tmp_path / "run")) == signature(whole)


def test_a_finished_sweep_loads_nothing_again(tmp_path: Path) -> None:
    run_sweep(plan(tmp_path), tmp_path / "run", loader=FakeLoader())
    before = (tmp_path / "run" / ROWS).read_bytes()
    loader = FakeLoader()
    run_sweep(plan(tmp_path), tmp_path / "run", loader=loader)
    assert loader.loaded == []
    assert (tmp_path / "run" / ROWS).read_bytes() == before


def test_another_plan_needs_another_folder(tmp_path: Path) -> None:
    run_sweep(plan(tmp_path, drafts=()), tmp_path / "run", loader=FakeLoader())
    with pytest.raises(SettingError, match="another plan: draft_lengths"):
        run_sweep(plan(tmp_path, drafts=(), draft_lengths="0-3"), tmp_path / "run", loader=FakeLoader())


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    head = HeadRow(started="now", machine={}, plan={})
    with Store.open(tmp_path / "run", head), pytest.raises(SettingError, match="another process"):
        Store.open(tmp_path / "run", head)


def test_a_full_disk_leaves_whole_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = HeadRow(started="now", machine={}, plan={})
    with Store.open(tmp_path, head) as store:
        before = (tmp_path / ROWS).read_bytes()

        class Full:
            def __getattr__(self, name: str) -> Any:
                return getattr(store_file, name)

            def write(self, data: bytes) -> int:
                store_file.write(data[:5])
                raise OSError(28, "No space left on device")

        store_file = store._file
        monkeypatch.setattr(store, "_file", Full())
        with pytest.raises(SettingError, match="no space left"):
            store.append(head)
        assert (tmp_path / ROWS).read_bytes() == before
        assert len(store.rows) == 1


def test_rows_that_are_none_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_rows(tmp_path / "nothing")
    with Store.open(tmp_path, HeadRow(started="now", machine={}, plan={})):
        pass
    with (tmp_path / ROWS).open("a") as file:
        file.write('{"kind": "answer"}\n')
    with pytest.raises(InputError, match="line 2"):
        read_rows(tmp_path)
