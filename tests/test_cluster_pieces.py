"""A sweep in pieces, as other machines do them: the same rows as in one process, and each stamped."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench_models import FakeLoader, plan
from counted_time import counted_time
from outrider.core.errors import BackendError
from outrider.fleet.ray.pieces import (
    MissingFile,
    Piece,
    Where,
    at_hand,
    facts_here,
    host_id,
    kind_name,
    same_kind,
    work,
)
from outrider.lab.bench.results import read_rows
from outrider.lab.bench.sweep import Sweep, run_sweep
from outrider.lab.models import ModelFile, find_models
from outrider.lab.rows import ModelRow, Row
from outrider.lab.subject import Progress
from outrider.models.cache import fingerprint
from outrider.models.embedded import embedded_default
from outrider.models.hub import HubOptions
from test_bench_sweep import signature
from tiny_gguf import write_tiny


class InPieces:
    """Every piece of work on fresh models, as on as many machines; each is cut off after so many rows."""

    def __init__(self, cuts: Sequence[int] = ()) -> None:
        self.cuts = cuts

    def __call__(self, sweep: Sweep, targets: Sequence[ModelFile], drafts: Sequence[ModelFile]) -> None:
        given = sweep.plan, tuple(sweep.workloads), sweep.loader, False
        piece = Piece(targets[0], tuple(drafts), *given)
        for cut in (*self.cuts, None):
            for number, item in enumerate(work(piece, sweep.store.rows, Where("host", "node"))):
                if not isinstance(item, Progress):
                    sweep.store.append(item)
                if number == cut:
                    break


@pytest.fixture(scope="module", autouse=True)
def _the_same_times() -> Iterator[None]:
    with counted_time():
        yield


def swept(folder: Path, elsewhere: InPieces | None = None) -> list[Row]:
    """What runs for real is given: it does not depend on the time that choosing takes."""
    given = plan(folder, finalists=0, controls=["model 3", "lookup 4"])
    run_sweep(given, folder / "run", loader=FakeLoader(), elsewhere=elsewhere)
    return read_rows(folder / "run")


def without_places(rows: Sequence[Row]) -> list[Row]:
    """Without where they were made; load options and loading are each machine's own."""
    kept = (row for row in rows if not isinstance(row, ModelRow))
    return [row.model_copy(update={"ran": None}) for row in kept]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Counter[str]:
    return signature(without_places(swept(tmp_path_factory.mktemp("one"))))


@pytest.mark.parametrize("cuts", [(), (2, 9, 20, 40, 70)], ids=["whole", "cut off and gone on with"])
def test_pieces_find_out_what_a_sweep_in_one_process_does(
    one: Counter[str], tmp_path: Path, cuts: Sequence[int]
) -> None:
    rows = swept(tmp_path, InPieces(cuts))
    assert signature(without_places(rows)) == one
    for row in rows[1:]:
        assert row.ran is not None and row.ran.began_unix_s <= row.ran.ended_unix_s
        assert (row.ran.host, row.ran.node, row.ran.target) == ("host", "node", "target")


def test_what_goes_wrong_in_a_piece_is_raised_where_its_rows_are_taken(tmp_path: Path) -> None:
    class Broken(FakeLoader):
        def target(self, file: ModelFile) -> Any:
            raise BackendError(file.name, "it does not fit")

    sweep = plan(tmp_path)
    [target] = FakeLoader().find(["target"])
    with pytest.raises(BackendError, match="does not fit"):
        list(work(Piece(target, (), sweep, (), Broken(), False), [], Where("a", "b")))


# Machines


def test_a_machine_says_what_it_is_and_which_backends_it_lacks() -> None:
    def check(backend: str) -> None:
        if backend == "ik":
            raise BackendError("backend ik", "it is not installed")

    assert facts_here("ik", check)["refused"] == "backend ik: it is not installed"
    said = facts_here("llama.cpp", check)
    assert said["refused"] == "" and said["host"] == host_id() != ""
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
