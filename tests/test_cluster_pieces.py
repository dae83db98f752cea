"""A sweep in pieces, as other machines do them: the same rows as in one process, and each stamped."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from bench_models import FakeLoader, plan
from counted_time import counted_time
from outrider.cli.bench import print_report
from outrider.cli.screen import Screen
from outrider.core.errors import BackendError
from outrider.fleet.ray.machines import MissingFile, at_hand, facts_here, host_id, kind_name, same_kind
from outrider.fleet.ray.pieces import Kit, Piece, Where, work
from outrider.lab.bench.report.words import winners
from outrider.lab.bench.results import Results, read_rows
from outrider.lab.bench.sweep import Sweep, run_sweep
from outrider.lab.models import ModelFile, find_models
from outrider.lab.rows import CostsRow, DoneRow, MachineRow, PredictionRow, Row, RunRow
from outrider.lab.subject import Progress
from outrider.models.cache import fingerprint
from outrider.models.embedded import embedded_default
from outrider.models.hub import HubOptions
from test_bench_sweep import signature
from tiny_gguf import write_tiny

KINDS = ("small", "large")


class InPieces:
    """Every piece of work on fresh models, as on as many machines; each is cut off after so many rows."""

    def __init__(self, kinds: Sequence[str] = KINDS, cuts: Sequence[int] = ()) -> None:
        self.kinds, self.cuts = kinds, cuts

    def __call__(self, sweep: Sweep, targets: Sequence[ModelFile], drafts: Sequence[ModelFile]) -> None:
        kit = Kit(sweep.plan, tuple(sweep.workloads), sweep.loader, HubOptions(), has_files=False)
        for kind in self.kinds:
            sweep.store.append(MachineRow(machine=kind, facts={"cpu": kind}, hosts=(kind,)))
        for kind in self.kinds:
            piece = Piece(targets[0], tuple(drafts), kind)
            for cut in (*self.cuts, None):
                for number, item in enumerate(work(piece, kit, sweep.store.rows, Where(kind, kind, "node"))):
                    if not isinstance(item, Progress):
                        sweep.store.append(item)
                    if number == cut:
                        break


@pytest.fixture(scope="module", autouse=True)
def _the_same_times() -> Iterator[None]:
    with counted_time():
        yield


def of_kind(rows: Sequence[Row], kind: str) -> list[Row]:
    """The rows that a sweep on this kind of machine alone would have written."""
    kept: list[Row] = []
    for row in rows:
        if getattr(row, "machine", kind) in ("", kind) and not isinstance(row, MachineRow):
            changed = {"machine": ""} if hasattr(row, "machine") and isinstance(row.machine, str) else {}
            kept.append(row.model_copy(update={"ran": None, **changed}))
    return kept


def swept(folder: Path, elsewhere: InPieces | None = None) -> tuple[Results, list[Row]]:
    """What runs for real is given: it does not depend on the time that choosing takes."""
    given = plan(folder, finalists=0, controls=["model 3", "lookup 4"])
    results = run_sweep(given, folder / "run", loader=FakeLoader(), elsewhere=elsewhere)
    return results, read_rows(folder / "run")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, list[Row]]:
    return swept(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, list[Row]]:
    return swept(tmp_path_factory.mktemp("many"), InPieces())


def check(many: Sequence[Row], one: Sequence[Row]) -> None:
    """Load options and loading are each machine's own."""
    wanted = {row: n for row, n in signature([*one]).items() if "'kind': 'model'" not in row}
    for kind in KINDS:
        mine = signature(of_kind(many, kind))
        assert {row: n for row, n in mine.items() if "'kind': 'model'" not in row} == wanted


def test_pieces_find_out_what_a_sweep_in_one_process_does(
    one: tuple[Results, list[Row]], many: tuple[Results, list[Row]]
) -> None:
    check(many[1], one[1])


def test_pieces_that_are_cut_off_are_gone_on_with(one: tuple[Results, list[Row]], tmp_path: Path) -> None:
    check(swept(tmp_path, InPieces(cuts=(2, 9, 20, 40, 70)))[1], one[1])


def test_rows_say_where_and_when_they_were_made(many: tuple[Results, list[Row]]) -> None:
    for row in many[1][1:]:
        if isinstance(row, MachineRow):
            continue
        assert row.ran is not None and row.ran.began_unix_s <= row.ran.ended_unix_s
        if isinstance(row, CostsRow | PredictionRow | RunRow | DoneRow):
            assert row.machine == row.ran.machine in KINDS


def test_results_have_a_sheet_for_each_kind_of_machine(
    one: tuple[Results, list[Row]], many: tuple[Results, list[Row]]
) -> None:
    alone, results = one[0], many[0]
    assert tuple(results.sheets) == KINDS
    assert not alone.sheets
    for kind, sheet in results.sheets.items():
        assert sheet.head.machine["cpu"] == kind
        assert {row.machine for row in sheet.runs} == {kind}
        assert len(sheet.runs) == len(alone.runs) and len(sheet.predictions) == len(alone.predictions)


def test_the_report_ends_in_what_wins_on_each_machine(many: tuple[Results, list[Row]]) -> None:
    said = winners(many[0])
    assert [kind for kind, _ in said] == [kind for kind in KINDS for _ in many[0].targets]
    for _, what in said:
        assert re.match("On this machine, (decode target plainly|target is .* with|target gains)", what)
    console = Screen(width=80, file=StringIO())
    print_report(many[0], console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.index("What wins on each machine") > max(text.index(f"On {kind}\n") for kind in KINDS)


def test_what_goes_wrong_in_a_piece_is_raised_where_its_rows_are_taken(tmp_path: Path) -> None:
    class Broken(FakeLoader):
        def target(self, file: ModelFile) -> Any:
            raise BackendError(file.name, "it does not fit")

    sweep = plan(tmp_path)
    [target] = FakeLoader().find(["target"])
    kit = Kit(sweep, (), Broken(), HubOptions(), has_files=False)
    with pytest.raises(BackendError, match="does not fit"):
        list(work(Piece(target, (), "a"), kit, [], Where("a", "b", "c")))


# Machines


def test_a_machine_says_what_it_is_and_which_backends_it_lacks() -> None:
    def check(backend: str) -> None:
        if backend == "ik":
            raise BackendError("backend ik", "it is not installed")

    said = facts_here(("llama.cpp", "ik"), check)
    assert said["refused"] == {"ik": "it is not installed"}
    assert said["host"] == host_id() != ""
    assert said["facts"]["cpu"] in kind_name(said["facts"], None)
    assert kind_name(said["facts"], "big") == "big"
    assert same_kind(said["facts"]) != same_kind(said["facts"] | {"physical_cores": 99})


# Files


def test_a_model_is_found_by_its_content(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "model.gguf")
    [file] = find_models([str(path)], hub=HubOptions())
    assert at_hand(file, (), HubOptions()) is file
    elsewhere = replace(file, path=tmp_path / "gone.gguf", fingerprint=fingerprint(embedded_default()))
    assert at_hand(elsewhere, ["default"], HubOptions()).path == embedded_default()
    path.write_bytes(b"GGUF and nothing else")
    with pytest.raises(MissingFile, match="does not have it"):
        at_hand(file, ["default"], HubOptions())
