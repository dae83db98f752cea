"""Sweeps on real clusters of several raylets, over exact models: killed, resumed, refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from bench_models import FakeLoader, plan
from clusters import TESTS, cluster, kill_node
from outrider.core.errors import BackendError, SettingError
from outrider.lab.bench.results import read_rows
from outrider.lab.bench.sweep import run_sweep
from outrider.lab.loaded import LoadedTarget
from outrider.lab.models import ModelFile
from outrider.lab.rows import BlockRow, CostsRow, ModelRow, PredictionRow, Row, RunRow
from outrider.lab.subject import Progress
from test_bench_sweep import signature
from test_cluster_pieces import without_places

ray = pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = [
    pytest.mark.slow,
    # Ray leaves pipes and files open when it ends.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

from outrider.fleet.ray.joining import joined  # noqa: E402
from outrider.fleet.ray.sweeping import RaySweep  # noqa: E402

TARGETS = ("target", "second")
CONTROLS = {"targets": TARGETS, "finalists": 0, "controls": ["model 3", "lookup 4"]}
"""What runs for real does not depend on the time that choosing takes."""


class SlowLoader(FakeLoader):
    """Loading takes a while, so that something is under way when a node is killed."""

    def target(self, file: ModelFile) -> tuple[LoadedTarget, ModelRow]:
        time.sleep(0.5)
        return super().target(file)


@pytest.fixture(scope="module")
def three() -> Iterator[Any]:
    with cluster(("alpha", "alpha", "beta")) as made:
        yield made


def sweep(folder: Path, address: str, **given: Any) -> list[Row]:
    loader, made = given.pop("loader", SlowLoader()), plan(folder, **CONTROLS)
    machine = given.pop("machine", "alpha")
    with joined(address):
        ray = RaySweep("auto", loader.check_backend, machine, has_files=False)
        run_sweep(made, folder / "run", loader=loader, elsewhere=ray, facts=ray.facts, **given)
    return read_rows(folder / "run")


def timings(rows: Sequence[Row]) -> dict[tuple[str, str], tuple[float, float]]:
    """When every piece of timing was at work, by its host and name."""
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for row in rows:
        if isinstance(row, CostsRow | RunRow | BlockRow) and row.ran is not None:
            key = (row.ran.host, row.ran.target)
            began, ended = found.get(key, (row.ran.began_unix_s, row.ran.ended_unix_s))
            found[key] = (min(began, row.ran.began_unix_s), max(ended, row.ran.ended_unix_s))
    return found


def check(rows: list[Row], one: list[Row], targets: Sequence[str] = TARGETS) -> None:
    assert signature(without_places(rows)) == signature(without_places(one))
    named = Counter((r.target, r.draft, r.workload, r.setting) for r in rows if isinstance(r, PredictionRow))
    assert set(named.values()) == {1}
    at_work = timings(rows)
    assert len(at_work) == len(targets)
    for ((host, _), (began, ended)), ((other, _), (later, end)) in combinations(at_work.items(), 2):
        assert host != other or ended <= later or end <= began


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    folder = tmp_path_factory.mktemp("one")
    run_sweep(plan(folder, **CONTROLS), folder / "run", loader=FakeLoader())
    return read_rows(folder / "run")


def test_three_nodes_find_out_what_one_process_does(three: Any, one: list[Row], tmp_path: Path) -> None:
    said: list[Progress] = []
    rows = sweep(tmp_path, three.address, progress=said.append)
    check(rows, one)
    assert {step.detail.partition(": ")[2].partition(":")[0] for step in said} >= {*TARGETS}
    before = (tmp_path / "run" / "rows.jsonl").read_bytes()
    sweep(tmp_path, three.address)
    assert (tmp_path / "run" / "rows.jsonl").read_bytes() == before


def test_a_kind_that_no_node_has_is_refused(three: Any, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="--machine delta: no node of the cluster is such a machine"):
        sweep(tmp_path, three.address, machine="delta")
    with pytest.raises(SettingError, match=r"machines differ. Name the kind .* There are: alpha; beta"):
        sweep(tmp_path, three.address, machine=None)
    assert not (tmp_path / "run").exists()


def test_nodes_without_the_backend_are_refused(three: Any, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"none of its nodes can work .*: backend .* not installed"):
        sweep(tmp_path, three.address, loader=FakeLoader(missing=["auto"]))
    assert not (tmp_path / "run").exists()


def test_a_driver_that_is_killed_is_gone_on_with(three: Any, one: list[Row], tmp_path: Path) -> None:
    program = (
        "import sys, conftest; from pathlib import Path; import test_cluster_ray as t; "
        "t.sweep(Path(sys.argv[1]), sys.argv[2])"
    )
    command = [sys.executable, "-c", program, str(tmp_path), three.address]
    driver = subprocess.Popen(command, cwd=TESTS, env={**os.environ, "PYTHONPATH": str(TESTS)})
    rows = tmp_path / "run" / "rows.jsonl"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and (not rows.exists() or rows.read_bytes().count(b"\n") < 40):
        assert driver.poll() is None, "it ended before it was killed"
        time.sleep(0.05)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    check(sweep(tmp_path, three.address), one)


def test_a_node_that_is_killed_costs_its_running_work_alone(one: list[Row], tmp_path: Path) -> None:
    with cluster(("alpha", "alpha", "alpha")) as made:
        killed: list[str] = []

        def progress(now: Progress) -> None:
            if now.stage in ("recording", "scoring") and not killed:
                for node in made.worker_nodes:
                    if f"({node.node_id[:6]})" in now.detail:
                        killed.append(now.detail)
                        kill_node(node)

        rows = sweep(tmp_path, made.address, progress=progress)
        check(rows, one)
        answers = Counter((r.target, r.case, r.workload) for r in rows if r.kind == "answer")
        assert set(answers.values()) == {1}


def test_nodes_without_the_memory_are_refused(tmp_path: Path) -> None:
    with (
        cluster(("small",), memory=2000) as made,
        pytest.raises(BackendError, match=r"no node is left that can do it \(it needs"),
    ):
        sweep(tmp_path, made.address, machine="small")


def test_an_address_without_a_cluster_is_refused() -> None:
    def refused(address: str) -> str:
        with pytest.raises(SettingError) as error, joined(address):
            pass
        return str(error.value)

    assert "--ray 127.0.0.1:9: nothing answers there" in refused("127.0.0.1:9")
    assert "it is not an address" in refused("127.0.0.1:99999")


def test_a_cluster_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "Version mismatch: The cluster was started with:\n    Ray: 2.55.0\n    Python: 3.12.1\nThis process"

    def init(**_: Any) -> None:
        raise RuntimeError(why)

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(SettingError) as error, joined("auto"):
        pass
    assert "The cluster was started with: Ray: 2.55.0 Python: 3.12.1" in str(error.value)
    assert str(error.value).endswith(f"Use Ray {ray.__version__} and the same Python on every machine.")
