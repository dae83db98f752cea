"""A sweep and a distillation's answers with the embedded model: in one process, and on three raylets of this
machine; a node killed in the middle; the driver killed and gone on with. Appends a row for each to --out.

    python benchmarks/cluster/sweep.py --out benchmarks/cluster/sweep.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import append, describe
from outrider.lab.bench.results import Results
from outrider.models import cache_dir
from outrider.models.embedded import EMBEDDED_NAME

MODEL = cache_dir() / "models" / EMBEDDED_NAME
HERE = Path(__file__).parent
OUTRIDER = Path(sys.executable).with_name("outrider")
ONE_CORE = ("-t", "1", "-fa", "on", "--backend", "llama.cpp")
SWEEP = (
    *ONE_CORE, "-c", "512", "-n", "24", "--workload", str(HERE / "prompts.jsonl"), "--finalists", "0",
    "--control", "lookup 4", "--repetitions", "2-2", "--draft-lengths", "2,4", "--seed", "1",
)  # fmt: skip
COUNTS = {
    "answers": ("target", "workload", "case", "prompt", "tokens"),
    "predictions": ("target", "draft", "workload", "setting", "cases"),
    "runs": ("target", "draft", "workload", "case", "setting", "repetition", "tokens", "target_calls",
             "draft_calls", "drafted", "accepted", "equal"),
}  # fmt: skip
"""What does not depend on a clock; the automatic choice does, but for its tokens."""
_OF_CASES = ("case", "tokens", "target_calls", "draft_calls", "drafted", "accepted")


@contextmanager
def cluster(labels: Sequence[str]) -> Iterator[Any]:
    """Raylets of one CPU each, with these labels."""
    from ray.cluster_utils import Cluster

    common: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 200 * 2**20, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args={**common, "labels": {"outrider-machine": labels[0]}})
    try:
        for label in labels[1:]:
            made.add_node(**common, labels={"outrider-machine": label})
        yield made
    finally:
        made.shutdown()


def rows_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "rows.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def said(results: Results) -> Counter[str]:
    """Tokens and counts of each row that a report is made of."""
    found: Counter[str] = Counter()
    for kind, names in COUNTS.items():
        for row in getattr(results, kind):
            data = row.model_dump()
            if "cases" in names:
                data["cases"] = [{name: case[name] for name in _OF_CASES} for case in data["cases"]]
            if "auto" not in data.get("setting", ""):
                found[json.dumps({"kind": kind, **{name: data[name] for name in names}}, default=str)] += 1
    return found


def overlaps(rows: Sequence[dict[str, Any]]) -> int:
    """Pairs of timing pieces that were at work on one host at once."""
    spans: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if row["kind"] in ("costs", "run", "block") and (ran := row.get("ran")):
            span = spans.setdefault((ran["host"], ran["node"], ran["job"]), [])
            span += [ran["began_unix_s"], ran["ended_unix_s"]]
    assert spans, "nothing was timed"
    return sum(
        a[0] == b[0] and min(spans[a]) < max(spans[b]) and min(spans[b]) < max(spans[a])
        for a, b in combinations(spans, 2)
    )


def bench(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [str(OUTRIDER), "bench", *SWEEP, "-o", str(folder), *more]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=(folder.parent / "log").open("ab"))


def until(folder: Path, count: int, program: subprocess.Popen[bytes]) -> None:
    """Wait for so many rows."""
    while len(rows_of(folder)) < count:
        assert program.poll() is None, f"it ended before, with {program.returncode}"
        time.sleep(0.1)


def ended(program: subprocess.Popen[bytes], folder: Path) -> None:
    if status := program.wait(timeout=400):
        raise SystemExit(f"status {status}: {(folder.parent / 'log').read_text()[-2000:]}")


def sweep_row(case: str, folder: Path, one: Counter[str], kinds: Sequence[str]) -> dict[str, Any]:
    rows, results = rows_of(folder), Results.read(folder)
    assert {*results.sheets} == {*kinds}
    found = [said(sheet) for sheet in results.sheets.values()]
    return {
        "case": case, "kinds": len(kinds), "rows": len(rows), "compared": one.total() * len(kinds),
        "lost": sum((one - mine).total() for mine in found),
        "doubled_or_other": sum((mine - one).total() for mine in found),
        "overlapping_timings": overlaps(rows),
        "nodes": len({row["ran"]["node"] for row in rows if row.get("ran")}),
    }  # fmt: skip


def kill(node: Any) -> None:
    for infos in node.all_processes.values():
        for info in infos:
            os.kill(info.process.pid, signal.SIGKILL)


def sweeps(work: Path) -> Iterator[dict[str, Any]]:
    ended(bench(work / "one"), work / "one")
    one = said(Results.read(work / "one"))
    yield {"case": "one process", "rows": len(rows_of(work / "one")), "counted": one.total()}
    kinds = ("alpha", "beta", "gamma")
    with cluster(kinds) as made:
        ended(bench(work / "three", "--ray", made.address), work / "three")
        yield sweep_row("three nodes", work / "three", one, kinds)
        first = bench(work / "driver", "--ray", made.address)
        until(work / "driver", 25, first)
        first.kill()
        first.wait()
        before = len(rows_of(work / "driver"))
        ended(bench(work / "driver", "--ray", made.address), work / "driver")
        yield sweep_row("driver killed", work / "driver", one, kinds) | {"rows_at_the_kill": before}


def at_work(made: Any, rows: Sequence[dict[str, Any]]) -> Any:
    """The node that made the last row, unless it is the head."""
    made_there = [row["ran"]["node"] for row in rows if row.get("ran")][-1:]
    return next((node for node in made.worker_nodes for name in made_there if node.node_id[:6] in name), None)


def node_killed(work: Path) -> Iterator[dict[str, Any]]:
    if not (work / "one").exists():
        ended(bench(work / "one"), work / "one")
    one = said(Results.read(work / "one"))
    with cluster(("alpha",) * 3) as made:
        running = bench(work / "node", "--ray", made.address)
        until(work / "node", 2, running)
        while (victim := at_work(made, rows_of(work / "node"))) is None:
            assert running.poll() is None, "it ended before a node but the head had worked"
            time.sleep(0.05)
        kill(victim)
        before = len(rows_of(work / "node"))
        ended(running, work / "node")
        yield sweep_row("node killed", work / "node", one, ("alpha",)) | {"rows_at_the_kill": before}


def content(file: Path) -> str:
    """Of all arrays of an answer, its tokens and probabilities; a file has the time of its writing, too."""
    digest = hashlib.sha256()
    with np.load(file) as arrays:
        for name in sorted(arrays):
            digest.update(name.encode() + arrays[name].tobytes())
    return digest.hexdigest()


def answers(work: Path) -> Iterator[dict[str, Any]]:
    def made_by(name: str, *more: str) -> dict[str, str]:
        folder = work / name
        command = [
            str(OUTRIDER), "distill", "--answers-only", "-t", "1", "-c", "512", "-o", str(folder),
            "--prompts", str(HERE / "prompts.jsonl"), "--max-tokens", "24", "--seed", "1", *more,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
        if done.returncode:
            raise SystemExit(f"distill {name}: {done.returncode} {done.stderr[-2000:]}")
        files = sorted(folder.rglob("*.npz"))
        return {file.name: content(file) for file in files}

    one = made_by("answers-one", "--parallel", "1")
    with cluster(("alpha", "beta", "gamma")) as made:
        three = made_by("answers-three", "--parallel", "1", "--ray", made.address)
    both = one.keys() & three.keys()
    yield {
        "case": "answers", "one": len(one), "three": len(three),
        "equal": sum(one[n] == three[n] for n in both),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=("sweep", "node", "answers"))
    options = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if not options.out.exists():
        append(options.out, describe(MODEL))
    with TemporaryDirectory() as folder:
        for name, part in {"sweep": sweeps, "node": node_killed, "answers": answers}.items():
            if options.only in (None, name):
                for row in part(Path(folder)):
                    print(json.dumps(row), flush=True)
                    append(options.out, row)


if __name__ == "__main__":
    main()
