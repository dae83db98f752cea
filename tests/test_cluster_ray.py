"""Sweeps on real clusters of several raylets, over exact models: killed, resumed, refused."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import combinations
from pathlib import Path
from threading import Thread
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
from outrider.models.hub import HubOptions
from test_bench_sweep import signature
from test_cluster_pieces import of_kind

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

LABELS = ("alpha", "beta", "gamma")
CONTROLS = {"finalists": 0, "controls": ["model 3", "lookup 4"]}
"""What runs for real does not depend on the time that choosing takes."""


class SlowLoader(FakeLoader):
    """Loading takes a while, so that something is under way when a node is killed."""

    def target(self, file: ModelFile) -> tuple[LoadedTarget, ModelRow]:
        time.sleep(0.5)
        return super().target(file)


@pytest.fixture(scope="module")
def three() -> Iterator[Any]:
    with cluster(LABELS) as made:
        yield made


def sweep(folder: Path, address: str, **given: Any) -> list[Row]:
    loader, made = given.pop("loader", SlowLoader()), plan(folder, **CONTROLS)
    machines = given.pop("machines", ())
    with joined(address):
        elsewhere = RaySweep("auto", loader.check_backend, HubOptions(), machines, has_files=False)
        run_sweep(made, folder / "run", loader=loader, elsewhere=elsewhere, **given)
    return read_rows(folder / "run")


def timings(rows: Sequence[Row]) -> dict[tuple[str, str], tuple[float, float]]:
    """When every piece of timing was at work, by its host and name."""
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for row in rows:
        if isinstance(row, CostsRow | RunRow | BlockRow) and row.ran is not None:
            key = (row.ran.host, row.ran.job)
            began, ended = found.get(key, (row.ran.began_unix_s, row.ran.ended_unix_s))
            found[key] = (min(began, row.ran.began_unix_s), max(ended, row.ran.ended_unix_s))
    return found


def without_models(rows: list[Row]) -> Counter[str]:
    """Load options and loading are each machine's own; what a setting with the clock decides is left out."""
    return Counter({row: n for row, n in signature(rows).items() if "'kind': 'model'" not in row})


def check(rows: list[Row], one: list[Row], kinds: Sequence[str] = LABELS) -> None:
    for kind in kinds:
        assert without_models(of_kind(rows, kind)) == without_models(one)
    named = Counter(
        (r.machine, r.target, r.draft, r.workload, r.setting) for r in rows if isinstance(r, PredictionRow)
    )
    assert set(named.values()) == {1}
    at_work = timings(rows)
    assert len(at_work) == len(kinds)
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
    assert any("alpha: " in step.detail for step in said)
    before = (tmp_path / "run" / "rows.jsonl").read_bytes()
    sweep(tmp_path, three.address)
    assert (tmp_path / "run" / "rows.jsonl").read_bytes() == before


def test_a_kind_that_no_node_has_is_refused(three: Any, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="--machines delta: no node of the cluster is such a machine"):
        sweep(tmp_path, three.address, machines=("delta",))
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
        check(rows, one, ("alpha",))
        answers = Counter((r.case, r.workload) for r in rows if r.kind == "answer")
        assert set(answers.values()) == {1}


def test_nodes_without_the_memory_are_refused(tmp_path: Path) -> None:
    with (
        cluster(("small",), memory=2000) as made,
        pytest.raises(BackendError, match=r"no node of the kind small is left that can do it \(it needs"),
    ):
        sweep(tmp_path, made.address)


def test_an_address_without_a_cluster_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(address: str) -> str:
        with pytest.raises(SettingError) as error, joined(address):
            pass
        return str(error.value)

    assert "--ray 127.0.0.1:9: nothing answers there" in refused("127.0.0.1:9")
    assert "it is not an address" in refused("127.0.0.1:99999")
    with serving_http() as port:
        assert "what answers there is not a Ray cluster" in refused(f"127.0.0.1:{port}")
    monkeypatch.setattr("outrider.fleet.ray.joining._ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "nothing answers there (timed out)" in refused(f"127.0.0.1:{silent.getsockname()[1]}")


@contextmanager
def serving_http() -> Iterator[int]:
    """A port where another server answers."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_a_cluster_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "Version mismatch: The cluster was started with:\n    Ray: 2.55.0\n    Python: 3.12.1\nThis process"

    def init(**_: Any) -> None:
        raise RuntimeError(why)

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(SettingError) as error, joined("auto"):
        pass
    assert "The cluster was started with: Ray: 2.55.0 Python: 3.12.1" in str(error.value)
    assert str(error.value).endswith(f"Use Ray {ray.__version__} and the same Python on every machine.")
