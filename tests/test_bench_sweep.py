"""A sweep over exact models: what it runs, what it says, and that a broken one ends like one left alone."""

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench_models import FakeLoader, plan
from cli_helpers import TEMPLATE
from counted_time import counted_time
from full_disk import file_size_limit
from outrider.backends.gguf.libraries import candidates
from outrider.backends.gguf.options import LoadOptions
from outrider.core.data import Completion
from outrider.core.errors import BackendError, ConstraintError, InputError, ModelFileError, SettingError
from outrider.costs.store import PairCosts, export_costs
from outrider.fleet.ray.pieces import (
    MissingFile,
    Node,
    Piece,
    at_hand,
    check_alike,
    facts_here,
    host_id,
    work,
)
from outrider.lab.bench.plan import SweepPlan
from outrider.lab.bench.results import ROWS, Results, Store, read_rows
from outrider.lab.bench.sweep import Sweep, run_sweep
from outrider.lab.bench.target import _Runner
from outrider.lab.loaded import Loader
from outrider.lab.models import ModelFile, find_models
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
from outrider.models.cache import fingerprint
from outrider.models.embedded import embedded_default
from outrider.models.hub import HubOptions
from recordings import FLAT, SMALL, curve
from tiny_gguf import write_tiny


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
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, list[Row], Path]:
    folder = tmp_path_factory.mktemp("sweep")
    results = run_sweep(plan(folder), folder / "run", loader=FakeLoader())
    return results, read_rows(folder / "run"), folder


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
    some = {(None, "plain"), (None, "lookup 6/0.5"), ("twin", "model 4"), ("stranger", "both 2/0.5")}
    assert some <= predicted
    assert ("twin", "plain") not in predicted and (None, "model 4") not in predicted
    assert len(predicted) == 2 + 2 * 3 + 1 + 2 * (2 * 3 * 2 + 3)
    run = {(row.draft, row.setting) for row in results.runs}
    assert run < predicted and len(run) < len(predicted) / 2
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
        for name in ("tokens", "target_calls", "draft_calls", "drafted", "accepted"):
            assert getattr(run, name) == getattr(case, name)
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
    complete = {row.block for row in of(rows, BlockRow)}
    runs = {(r.block, r.draft, r.setting, r.case): r for r in of(rows, RunRow) if r.block in complete}
    others = [row for row in rows if not isinstance(row, HeadRow | RunRow)]
    return Counter(repr(_timeless(row)) for row in (*others, *runs.values()))


def _timeless(row: Row) -> dict[str, Any]:
    data = row.model_dump()
    auto = "setting" in data and Setting.of(data["setting"]).is_auto
    drop = {"calls", "own_s", "own_token_s", "curve", "seconds"}
    if auto:
        drop |= {"target_calls", "draft_calls", "drafted", "accepted", "forced"}
    counts = ("case", "tokens") if auto else ("case", "tokens", "target_calls", "draft_calls")
    if "cases" in data:
        data["cases"] = [{key: case[key] for key in counts} for case in data["cases"]]
    return {k: v for k, v in data.items() if not k.endswith("_s") and k not in drop}


@pytest.mark.parametrize(
    "first", [1, 90, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 5, 13, 40, 150, 185))]
)
def test_a_sweep_that_is_killed_ends_with_the_same_rows(
    swept: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    _, whole, _ = swept
    append, left = Store.append, [first]

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


def test_a_finished_sweep_loads_nothing_again_and_repetitions_can_be_added(swept: Any) -> None:
    _, rows, folder = swept
    for repetitions in (2, 3):
        loader = FakeLoader()
        results = run_sweep(plan(folder, repetitions=repetitions), folder / "run", loader=loader)
        assert (loader.loaded == []) == (repetitions == 2) == (read_rows(folder / "run") == rows)
        blocks = Counter(row.workload for row in of(read_rows(folder / "run"), BlockRow))
        assert blocks == dict.fromkeys(("letters", "words"), repetitions) and results.done


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    head = HeadRow(started="now", machine={}, plan={})
    with closing(Store.open(tmp_path / "run", head)), pytest.raises(SettingError, match="another process"):
        Store.open(tmp_path / "run", head)


def test_a_full_disk_leaves_whole_rows(tmp_path: Path) -> None:
    head = HeadRow(started="now", machine={}, plan={})
    with closing(Store.open(tmp_path, head)) as store:
        before = (tmp_path / ROWS).read_bytes()
        with file_size_limit(len(before) + 5), pytest.raises(SettingError, match="could not be written"):
            store.append(head)
        assert (tmp_path / ROWS).read_bytes() == before and len(store.rows) == 1


def test_rows_that_are_none_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_rows(tmp_path / "nothing")
    Store.open(tmp_path, HeadRow(started="now", machine={}, plan={})).close()
    with (tmp_path / ROWS).open("a") as file:
        file.write('{"kind": "answer"}\n')
    with pytest.raises(InputError, match="line 2"):
        read_rows(tmp_path)


def test_another_plan_other_prompts_or_another_file_need_another_folder(tmp_path: Path) -> None:
    small = {"drafts": [], "finalists": 0, "repetitions": 1}
    first = plan(tmp_path, **small)
    run_sweep(first, tmp_path / "run", loader=FakeLoader())

    class Replaced(FakeLoader):
        def find(self, references: Sequence[str], taken: Sequence[ModelFile] = ()) -> list[ModelFile]:
            return [replace(file, fingerprint="new") for file in super().find(references, taken)]

    with pytest.raises(SettingError, match="not the target that this run began with"):
        run_sweep(first, tmp_path / "run", loader=Replaced())
    with pytest.raises(SettingError, match="another plan: draft_lengths"):
        run_sweep(plan(tmp_path, **small, draft_lengths="0-3"), tmp_path / "run", loader=FakeLoader())
    (tmp_path / "words.jsonl").write_text('{"prompt": "a.b.c."}\n')
    with pytest.raises(SettingError, match="prompts: words"):
        run_sweep(first, tmp_path / "run", loader=FakeLoader())


# How long it may take


def test_with_little_time_the_automatic_choice_runs_and_later_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both times the blocks hold the same settings under each workload, so that figures are over all."""
    asked = plan(tmp_path, minutes=60, drafts=["twin"])
    monkeypatch.setattr("outrider.lab.bench.sweep.Sweep.left_s", lambda _: 14.0)
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
    assert len(autos) == 2 * 3


def test_a_target_that_cannot_rewind_only_decodes_plainly(tmp_path: Path) -> None:
    loader = FakeLoader(rewind="none")
    results = run_sweep(plan(tmp_path), tmp_path / "run", loader=loader)
    assert loader.loaded == ["target"], "no draft is loaded for it"
    assert {row.setting for row in results.predictions} == {"plain"}
    assert {(run.draft, run.setting, run.equal) for run in results.runs} == {(None, "plain", True)}
    assert [row.what for row in results.skipped] == ["drafts and lookup for target"]


def test_a_model_that_cannot_be_loaded_is_left_out(tmp_path: Path) -> None:
    loader = FakeLoader(damaged=("bad", "twin"))
    some = plan(tmp_path, targets=["bad", "target"], drafts=["twin", "stranger"])
    results = run_sweep(some, tmp_path / "run", loader=loader)
    assert [row.target for row in results.done] == ["target"]
    assert {run.draft for run in results.runs} == {None, "stranger"}
    assert {row.what: row.why for row in results.skipped} == {
        "bad": "it could not be loaded: it is damaged",
        "twin for target": "it could not be loaded: it is damaged",
    }
    with pytest.raises(ModelFileError, match="damaged"):
        run_sweep(plan(tmp_path, targets=["bad"]), tmp_path / "other", loader=loader)


# Real files through llama.cpp


def test_conversations_and_forced_text_of_real_files(tmp_path: Path) -> None:
    for name, noise in (("big", 0.0), ("draft", 0.3)):
        write_tiny(tmp_path / f"{name}.gguf", chat_template=TEMPLATE, noise=noise)
    schema = {"type": "object", "properties": {"a": {"enum": ["the", "and"]}}, "required": ["a"]}
    prompts: list[dict[str, Any]] = [
        {"turns": ["the re and the re", "and on"]},
        {"prompt": "def the(re): return the", "json_schema": schema, "max_tokens": 40},
    ]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    export_costs(tmp_path / "costs.json", PairCosts(curve(FLAT, 0.01), curve(SMALL, 0.002)))
    found, options = [], LoadOptions(threads=1)
    for temperature in (0.0, 0.9):
        asked = SweepPlan(
            targets=[str(tmp_path / "big.gguf")],
            drafts=[str(tmp_path / "draft.gguf")],
            workload=[str(tmp_path / "mine.jsonl")],
            max_tokens=16,
            draft_lengths="2,4",
            p_mins="0",
            repetitions=1,
            temperature=temperature,
            prompts=1 if temperature else None,
        )
        loader = Loader(options, options, HubOptions(offline=True), 512, tmp_path / "costs.json")
        found.append(run_sweep(asked, tmp_path / f"run {temperature}", loader))
    greedy, sampled = found
    first, second, limited = greedy.answers
    assert second.prompt[: len(first.prompt) - 1] == first.prompt[:-1], "behind the target's own answer"
    assert len(second.prompt) > len(first.prompt) + len(first.tokens) / 2
    assert json.loads(limited.text)["a"] in ("the", "and")
    assert any(run.forced > 3 for run in greedy.runs if run.case == limited.case)
    assert sum(bool(run.equal) for run in greedy.runs) / len(greedy.runs) > 0.9  # near-ties may part
    assert all(run.divergence is not None for run in greedy.runs if not run.equal)
    assert {run.draft for run in greedy.runs} == {None, "draft"}
    assert {run.equal for run in sampled.runs} == {None}


# In pieces, as other machines do them: the same rows as in one process


def in_pieces(sweep: Sweep, targets: Sequence[ModelFile], drafts: Sequence[ModelFile]) -> None:
    """Every piece of work on fresh models, as on as many machines; each is cut off after so many rows."""
    piece = Piece(targets[0], tuple(drafts), sweep.plan, tuple(sweep.workloads), sweep.loader)
    for cut in (2, 9, 20, 40, 70, None):
        for number, item in enumerate(work(piece, sweep.store.rows)):
            if not isinstance(item, tuple):
                sweep.store.append(item)
            if number == cut:
                break


def without_models(rows: Sequence[Row]) -> list[Row]:
    """Without load options and loading, which are each machine's own."""
    return [row for row in rows if not isinstance(row, ModelRow)]


def test_pieces_find_out_what_a_sweep_in_one_process_does(tmp_path: Path) -> None:
    # What runs for real is given: it does not depend on the time that choosing takes.
    given, found = plan(tmp_path, finalists=0, controls=["model 3", "lookup 4"]), []
    for name, elsewhere in (("one", None), ("pieces", in_pieces)):
        run_sweep(given, tmp_path / name, loader=FakeLoader(), elsewhere=elsewhere)
        found.append(signature(without_models(read_rows(tmp_path / name))))
    assert found[0] == found[1]


def test_what_goes_wrong_in_a_piece_is_raised_where_its_rows_are_taken(tmp_path: Path) -> None:
    loader = FakeLoader(damaged=["target"])
    with pytest.raises(ModelFileError, match="damaged"):
        list(work(Piece(loader.find(["target"])[0], (), plan(tmp_path), (), loader), []))


# Machines


def test_a_machine_says_what_it_is_and_which_backends_it_lacks() -> None:
    def check(backend: str) -> None:
        if backend == "ik":
            raise BackendError("backend ik", "it is not installed")

    assert facts_here("ik", check)["refused"] == "backend ik: it is not installed"
    said = facts_here("llama.cpp", check)
    assert said["refused"] == "" and said["host"] == host_id() != ""
    one = Node("a", "one", "host", 1, 0, 1, said["facts"])
    check_alike([one, replace(one, name="two")])
    with pytest.raises(SettingError, match=r"its machines differ \(one: .*; two: .*, 99 cores, "):
        check_alike([one, replace(one, name="two", facts=said["facts"] | {"physical_cores": 99})])


# Files


def test_a_model_is_found_by_its_content(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "model.gguf")
    [file] = find_models([str(path)], hub=HubOptions())
    loader = Loader(LoadOptions(), LoadOptions(), HubOptions())
    assert at_hand(file, (), loader) is file
    elsewhere = replace(file, path=tmp_path / "gone.gguf", fingerprint=fingerprint(embedded_default()))
    assert at_hand(elsewhere, ["default"], loader).path == embedded_default()
    path.write_bytes(b"GGUF and nothing else")
    with pytest.raises(MissingFile, match="does not have it"):
        at_hand(file, ["default"], loader)
