"""A sweep over exact models: what it runs, what it says, and that a broken one ends like one left alone."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench_models import SPOKEN, VOCABULARY, FakeLoader, plan
from bench_models import row as model_row
from counted_time import counted_time
from outrider.backends.fake import FakeModel
from outrider.backends.gguf.libraries import candidates
from outrider.backends.gguf.options import LoadOptions
from outrider.core.data import Completion
from outrider.core.errors import ConstraintError, InputError, ModelFileError, SettingError
from outrider.lab.bench.results import ROWS, Results, Store, read_rows
from outrider.lab.bench.sweep import run_sweep
from outrider.lab.bench.target import _Runner
from outrider.lab.loaded import LoadedDraft, LoadedTarget
from outrider.lab.models import ModelFile
from outrider.lab.record import Case
from outrider.lab.rows import (
    AnswerRow,
    BlockRow,
    HeadRow,
    ModelRow,
    OffersRow,
    PairRow,
    PredictionRow,
    Row,
    RunRow,
)
from outrider.lab.settings import Setting
from outrider.lab.subject import Progress


def of(rows: list[Row], kind: type[Any]) -> list[Any]:
    return [row for row in rows if isinstance(row, kind)]


@pytest.fixture(scope="module", autouse=True)
def _the_same_times() -> Iterator[None]:
    """Which settings become finalists depends on the time that the choosing takes; a run's head names the
    libraries that are open."""
    next(candidates(LoadOptions()))
    with counted_time():
        yield


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, list[Row], list[Progress]]:
    folder = tmp_path_factory.mktemp("sweep")
    said: list[Progress] = []
    results = run_sweep(plan(folder), folder / "run", progress=said.append, loader=FakeLoader())
    return results, read_rows(folder / "run"), said


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
    assert {(None, "auto lookup"), ("twin", "auto"), ("stranger", "auto"), ("twin", "model 3")} < run


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
    drop = {"calls", "own_s", "own_token_s", "curve"}
    if auto:
        drop |= {"target_calls", "draft_calls", "drafted", "accepted", "forced"}
    data = {k: v for k, v in data.items() if not k.endswith("_s") and k not in drop and k != "seconds"}
    if "cases" in data:
        counts = ("case", "tokens") if auto else ("case", "tokens", "target_calls", "draft_calls")
        data["cases"] = [{key: case[key] for key in counts} for case in row.model_dump()["cases"]]
    return data


@pytest.mark.parametrize(
    "first", [1, 90, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 5, 13, 40, 150, 185))]
)
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
            data = row.model_dump_json(exclude={"ran"})
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
    run_sweep(plan(tmp_path, drafts=[]), tmp_path / "run", loader=FakeLoader())
    with pytest.raises(SettingError, match="another plan: draft_lengths"):
        run_sweep(plan(tmp_path, drafts=[], draft_lengths="0-3"), tmp_path / "run", loader=FakeLoader())


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


def test_other_prompts_or_another_file_need_another_folder(tmp_path: Path) -> None:
    small = {"drafts": [], "finalists": 0, "repetitions": 1}
    first = plan(tmp_path, **small)
    run_sweep(first, tmp_path / "run", loader=FakeLoader())

    class Replaced(FakeLoader):
        def find(self, references: Sequence[str], taken: Sequence[ModelFile] = ()) -> list[ModelFile]:
            found = super().find(references, taken)
            return [ModelFile(file.name, file.path, file.card, "new") for file in found]

    with pytest.raises(SettingError, match="not the target that this run began with"):
        run_sweep(first, tmp_path / "run", loader=Replaced())
    (tmp_path / "words.jsonl").write_text('{"prompt": "a.b.c."}\n')
    with pytest.raises(SettingError, match="prompts: words"):
        run_sweep(first, tmp_path / "run", loader=FakeLoader())


# How long it may take


def test_with_little_time_the_automatic_choice_runs_and_later_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both times the blocks hold the same settings under each workload, so that figures are over all."""
    asked = plan(tmp_path, minutes=60)
    monkeypatch.setattr("outrider.lab.bench.sweep.Sweep.left_s", lambda _: 25.0)
    results = run_sweep(asked, tmp_path / "run", loader=FakeLoader())
    ran = {
        name: {(r.draft, r.setting) for r in results.runs if r.workload == name}
        for name in ("letters", "words")
    }
    assert ran["letters"] == ran["words"] > {(None, "plain")} and not results.done
    assert all(Setting.of(setting).is_auto or setting == "plain" for _, setting in ran["words"])
    monkeypatch.undo()
    results = run_sweep(asked, tmp_path / "run", loader=FakeLoader())
    assert results.done and {("twin", "model 3"), (None, "lookup 8")} < {
        (r.draft, r.setting) for r in results.runs
    }


def test_repetitions_can_be_added_to_a_run(tmp_path: Path) -> None:
    run_sweep(plan(tmp_path, drafts=[], repetitions=1), tmp_path / "run", loader=FakeLoader())
    results = run_sweep(plan(tmp_path, drafts=[], repetitions=3), tmp_path / "run", loader=FakeLoader())
    assert Counter(block.workload for block in results.blocks) == {"letters": 3, "words": 3}


# What takes no part, or not to the end


def test_a_text_that_cannot_go_on_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _Runner.run

    def stuck(runner: _Runner, case: Case, answer: AnswerRow, seed: int) -> Completion:
        if (runner.setting.name, case.workload.name, case.id) == ("auto lookup", "words", "2"):
            raise ConstraintError("grammar", "no token is allowed")
        return run(runner, case, answer, seed)

    monkeypatch.setattr(_Runner, "run", stuck)
    results = run_sweep(plan(tmp_path, drafts=[]), tmp_path / "run", loader=FakeLoader())
    assert [(row.what, row.why) for row in results.skipped] == [
        ("auto lookup for target: words 2", "round 1: no token is allowed")
    ]
    autos = [run for run in results.runs if run.setting == "auto lookup"]
    assert len(autos) == 2 * 3 and len(results.blocks) == 4


def test_a_target_that_cannot_rewind_only_decodes_plainly(tmp_path: Path) -> None:
    class Recurrent(FakeLoader):
        def target(self, file: ModelFile) -> tuple[LoadedTarget, ModelRow]:
            self.loaded.append(file.name)
            model = FakeModel(VOCABULARY, SPOKEN["target"], rewind="none")
            return LoadedTarget(file.name, model), model_row(file, "target")

    loader = Recurrent()
    results = run_sweep(plan(tmp_path), tmp_path / "run", loader=loader)
    assert loader.loaded == ["target"], "no draft is loaded for it"
    assert {row.setting for row in results.predictions} == {"plain"}
    assert {(run.draft, run.setting, run.equal) for run in results.runs} == {(None, "plain", True)}
    assert [row.what for row in results.skipped] == ["drafts and lookup for target"]


def test_a_model_that_cannot_be_loaded_is_left_out(tmp_path: Path) -> None:
    class Broke(FakeLoader):
        def target(self, file: ModelFile) -> tuple[LoadedTarget, ModelRow]:
            if file.name == "bad":
                raise ModelFileError("bad.gguf", "it is truncated")
            return super().target(file)

        def draft(self, file: ModelFile, target: LoadedTarget) -> tuple[LoadedDraft, ModelRow] | PairRow:
            if file.name == "twin":
                raise ModelFileError("twin.gguf", "it is damaged")
            return super().draft(file, target)

    some = plan(tmp_path, targets=["bad", "target"], drafts=["twin", "stranger"])
    results = run_sweep(some, tmp_path / "run", loader=Broke())
    assert [row.target for row in results.done] == ["target"]
    assert {run.draft for run in results.runs} == {None, "stranger"}
    assert {row.what: row.why for row in results.skipped} == {
        "bad": "it could not be loaded: it is truncated",
        "twin for target": "it could not be loaded: it is damaged",
    }
    with pytest.raises(ModelFileError, match="truncated"):
        run_sweep(plan(tmp_path, targets=["bad"]), tmp_path / "other", loader=Broke())
