"""Sweeps on real clusters of several raylets, over exact models: killed, resumed, refused."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench_models import FakeLoader, plan
from outrider.core.errors import BackendError, SettingError
from outrider.lab.bench.results import read_rows
from outrider.lab.bench.sweep import run_sweep
from outrider.lab.loaded import LoadedTarget
from outrider.lab.models import ModelFile
from outrider.lab.rows import ModelRow, PredictionRow, Row, SkippedRow
from test_bench_sweep import signature, without_models

ray = pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = [
    pytest.mark.slow,
    # Ray leaves pipes and files open when it ends.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

from outrider.fleet.ray.sweeping import RaySweep, joined  # noqa: E402

TARGETS = ("target", "second")
CONTROLS = {"targets": TARGETS, "finalists": 0, "controls": ["model 3", "lookup 4"]}
"""What runs for real does not depend on the time that choosing takes."""


class SlowLoader(FakeLoader):
    """Loading takes a while, so that something is under way when a node is killed, and fails while another
    target is at work on the same host."""

    def __init__(self, lock: Path) -> None:
        super().__init__()
        self._lock = lock

    def target(self, file: ModelFile) -> tuple[LoadedTarget, ModelRow]:
        time.sleep(0.5)
        target, row = super().target(file)
        held, close = self._lock.open("w"), target.close
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)

        def release() -> None:
            close()
            held.close()

        vars(target)["close"] = release
        return target, row


@pytest.fixture(scope="module")
def three() -> Iterator[Any]:
    with cluster(3) as made:
        yield made


def sweep(folder: Path, address: str, *, lock: str = "lock", **given: Any) -> list[Row]:
    loader, made = given.pop("loader", SlowLoader(folder / lock)), plan(folder, **CONTROLS)
    with joined(address):
        ray = RaySweep("auto", loader.check_backend)
        run_sweep(made, folder / "run", loader=loader, elsewhere=ray, facts=ray.facts, **given)
    return read_rows(folder / "run")


def check(rows: list[Row], one: list[Row]) -> None:
    assert signature(without_models(rows)) == signature(without_models(one))
    named = Counter((r.target, r.draft, r.workload, r.setting) for r in rows if isinstance(r, PredictionRow))
    assert set(named.values()) == {1}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    folder = tmp_path_factory.mktemp("one")
    run_sweep(plan(folder, **CONTROLS), folder / "run", loader=FakeLoader())
    return read_rows(folder / "run")


def test_three_nodes_find_out_what_one_process_does(three: Any, one: list[Row], tmp_path: Path) -> None:
    said: list[str] = []
    rows = sweep(tmp_path, three.address, progress=lambda what, _part: said.append(what))
    check(rows, one)
    assert all(any(f": recording, {target}: " in what for what in said) for target in TARGETS)
    before = (tmp_path / "run" / "rows.jsonl").read_bytes()
    sweep(tmp_path, three.address)
    assert (tmp_path / "run" / "rows.jsonl").read_bytes() == before


def test_a_target_that_cannot_be_loaded_is_left_out(three: Any, tmp_path: Path) -> None:
    rows = sweep(tmp_path, three.address, loader=FakeLoader(damaged=["second"]))
    assert "it could not be loaded: it is damaged" in [row.why for row in rows if isinstance(row, SkippedRow)]


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
    driver = subprocess.Popen(command, cwd=TESTS)
    rows = tmp_path / "run" / "rows.jsonl"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and (not rows.exists() or rows.read_bytes().count(b"\n") < 40):
        assert driver.poll() is None, "it ended before it was killed"
        time.sleep(0.05)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    check(sweep(tmp_path, three.address, lock="another"), one)  # what was under way may still end


def test_a_node_that_is_killed_costs_its_running_work_alone(one: list[Row], tmp_path: Path) -> None:
    with cluster(3) as made:
        killed: list[str] = []

        def progress(what: str, _part: float | None) -> None:
            for node in made.worker_nodes:
                if f"({node.node_id[:6]}): recording" in what and not killed:
                    killed.append(what)
                    kill_node(node)

        rows = sweep(tmp_path, made.address, progress=progress)
        check(rows, one)
        answers = Counter((r.target, r.case, r.workload) for r in rows if r.kind == "answer")
        assert set(answers.values()) == {1}


def test_nodes_without_the_memory_are_refused(tmp_path: Path) -> None:
    with (
        cluster(1, memory=2000) as made,
        pytest.raises(BackendError, match=r"no node is left that can do it \(it needs"),
    ):
        sweep(tmp_path, made.address)


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


# Clusters

TESTS = Path(__file__).parent
STORE_BYTES = 200 * 2**20


@contextmanager
def cluster(num_nodes: int, **resources: Any) -> Iterator[Any]:
    """A cluster with a raylet of one CPU, and these resources, for each node; its first is the head.
    `address` is where it is."""
    import ray
    from ray.cluster_utils import Cluster

    changed = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    common = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "include_dashboard": False, **resources}
    made = None
    try:
        made = Cluster(initialize_head=True, head_node_args=common)
        for _ in range(num_nodes - 1):
            made.add_node(**common)
        yield made
    finally:
        ray.shutdown()
        if made is not None:
            made.shutdown()
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


def kill_node(node: Any) -> None:
    """SIGKILL to everything of a raylet's."""
    for infos in node.all_processes.values():
        for info in infos:
            os.kill(info.process.pid, signal.SIGKILL)
