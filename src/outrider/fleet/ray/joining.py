"""Into a cluster and out of it again, and which of its nodes can work."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from outrider.core.errors import SettingError
from outrider.fleet.ray.pieces import LABEL, Node, facts_here, kind_name, same_kind

_ANSWER_S = 5.0
"""for an address to take a connection"""
_FACTS_S = 120.0
"""for a node to say what it is; its first worker imports everything"""
ENVIRONMENT = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""of every task: a node's GPUs are there for all of them"""


@contextmanager
def joined(address: str) -> Iterator[None]:
    """In the cluster at `address`: HOST:PORT, ray://HOST:PORT, or auto (one that runs on this machine).
    Raises SettingError where there is none, or one that this program cannot work with."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    _check_address(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # ray raises whatever its parts do
        ray.shutdown()
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = " ".join(lines[:3])[:300].rstrip(".") or type(error).__name__
        raise SettingError(f"--ray {address}", why, _way_out(why)) from None
    try:
        yield
    finally:
        ray.shutdown()


def _way_out(why: str) -> str:
    if "ersion" in why:
        return f"Use Ray {ray.__version__} and the same Python on every machine."
    return (
        "Name the HOST:PORT of a cluster's head; `ray start --head` begins a cluster. "
        "One that asks for a token needs RAY_AUTH_MODE=token here, too."
    )


def _check_address(address: str) -> None:
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise SettingError(f"--ray {address}", "it is not an address", "Give HOST:PORT, or auto.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
    except OSError as error:
        why = f"nothing answers there ({error.strerror or error})".lower()
        raise SettingError(f"--ray {address}", why, "Is `ray start --head` running there?") from None
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "1")  # else it tries for minutes


def nodes_alive() -> dict[str, dict[str, Any]]:
    """The nodes that live, by their ids, as Ray describes them."""
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}


def on_node(node: str) -> NodeAffinitySchedulingStrategy:
    """On this node, or not at all."""
    return NodeAffinitySchedulingStrategy(node, soft=False)


def find_nodes(
    backend: str, check: Callable[[str], None], wanted: str | None = None
) -> tuple[list[Node], dict[str, str]]:
    """The nodes that can work, all of one kind (`wanted`, where there are several), and why others cannot, by
    their names. Raises SettingError where none is left, and where it is open which kind is meant."""
    ask = ray.remote(num_cpus=0, max_retries=1, runtime_env={"env_vars": ENVIRONMENT})(facts_here)
    alive = {id: node for id, node in nodes_alive().items() if node["Resources"].get("CPU", 0) >= 1}
    asked = {id: ask.options(scheduling_strategy=on_node(id)).remote(backend, check) for id in alive}
    found, reasons = [], dict[str, str]()
    for id, answer in asked.items():
        name = f"{alive[id]['NodeManagerAddress']} ({id[:6]})"
        said, why = _answer(answer)
        if said is None:
            reasons[f"node {name}"] = why
            continue
        labels: Mapping[str, str] = alive[id].get("Labels") or {}
        resources = alive[id]["Resources"]
        kind = kind_name(said["facts"], labels.get(LABEL))
        cpus, gpus, memory = (float(resources.get(what, 0)) for what in ("CPU", "GPU", "memory"))
        found.append(Node(id, name, said["host"], kind, cpus, gpus, memory, said["facts"]))
    if not found:
        why = next((f"{name}: {why}" for name, why in reasons.items()), "it has no node with a CPU")
        raise SettingError("the cluster", f"none of its nodes can work ({why})", "Set the nodes up for it.")
    return _of_one_kind(found, wanted), reasons


def _of_one_kind(nodes: Sequence[Node], wanted: str | None) -> list[Node]:
    kinds = dict.fromkeys(node.kind for node in nodes)
    there = f"There are: {'; '.join(kinds)}."
    if wanted is None and len(kinds) > 1:
        raise SettingError(
            "the cluster", "its machines differ", f"Name the kind to measure on (--machine). {there}"
        )
    if wanted is not None and wanted not in kinds:
        raise SettingError(f"--machine {wanted}", "no node of the cluster is such a machine", there)
    mine = [node for node in nodes if wanted in (None, node.kind)]
    if len({same_kind(node.facts) for node in mine}) > 1:
        why = "nodes with this label are different machines"
        raise SettingError(f"{LABEL}={mine[0].kind}", why, "Give each kind of machine a label of its own.")
    return mine


def _answer(answer: Any) -> tuple[dict[str, Any] | None, str]:
    try:
        said: dict[str, Any] = ray.get(answer, timeout=_FACTS_S)
    except ray.exceptions.GetTimeoutError:
        ray.cancel(answer, force=True)
        return None, f"it did not answer within {_FACTS_S:g} s"
    except ray.exceptions.RayError as error:
        last = next((line for line in reversed(str(error).splitlines()) if line.strip()), "no reason")
        return None, last.strip().rstrip(".")
    other, own = said["facts"]["outrider"], version("outrider")
    if other != own:
        return None, f"it has Outrider {other}, and this is {own}"
    return (None, said["refused"]) if said["refused"] else (said, "")
