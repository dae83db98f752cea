"""Clusters of several raylets on this machine, small ones, which are gone afterwards whatever happens."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
STORE_BYTES = 200 * 2**20


@contextmanager
def cluster(labels: Sequence[str], **resources: Any) -> Iterator[Any]:
    """A cluster with a raylet of one CPU, and these resources, for each label; its first is the head.
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
        first = {**common, "labels": {"outrider-machine": labels[0]}}
        made = Cluster(initialize_head=True, head_node_args=first)
        for label in labels[1:]:
            made.add_node(**common, labels={"outrider-machine": label})
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
