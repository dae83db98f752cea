"""A sweep on a cluster: into it and out of it again, which of its nodes can work, its pieces as Ray tasks
(timings alone on their physical host), and rows in the driver."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from outrider.core.errors import BackendError, ModelFileError, OutOfMemory, OutriderError, SettingError
from outrider.fleet.ray.pieces import Item, MissingFile, Node, Piece, check_alike, facts_here, work
from outrider.lab.bench.sweep import Sweep
from outrider.lab.models import ModelFile
from outrider.lab.rows import AnswerRow

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


def find_nodes(backend: str, check: Callable[[str], None]) -> tuple[list[Node], dict[str, str]]:
    """The nodes that can work, and why others cannot, by their names. Raises SettingError where none is left,
    and where they are different machines."""
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
        resources = alive[id]["Resources"]
        cpus, gpus, memory = (float(resources.get(what, 0)) for what in ("CPU", "GPU", "memory"))
        found.append(Node(id, name, said["host"], cpus, gpus, memory, said["facts"]))
    if not found:
        why = next((f"{name}: {why}" for name, why in reasons.items()), "it has no node with a CPU")
        raise SettingError("the cluster", f"none of its nodes can work ({why})", "Set the nodes up for it.")
    check_alike(found)
    return found, reasons


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


# The work

_MAX_ATTEMPTS = 5
"""of a piece whose process or node died"""
_WAIT_S = 1.0


class RaySweep:
    """Does the work of a sweep on the cluster that this process is in; `check` raises BackendError where a
    node lacks the `backend`. Raises SettingError where no node can work, before anything is written."""

    def __init__(self, backend: str, check: Callable[[str], None]) -> None:
        self._nodes, self._left_out = find_nodes(backend, check)
        self.facts = self._nodes[0].facts
        """what the machines are that it measures on"""

    def __call__(self, sweep: Sweep, targets: Sequence[ModelFile], drafts: Sequence[ModelFile]) -> None:
        """All that has no row yet; rows are added to the sweep's store in the calling thread alone."""
        for node, why in self._left_out.items():
            sweep.skip(node, why)
        given = sweep.plan, tuple(sweep.workloads), sweep.loader
        pieces = [Piece(file, tuple(sweep.drafts_of(file, drafts)), *given) for file in targets]
        _Driver(sweep, self._nodes, pieces).run()


class _Running(NamedTuple):
    piece: Piece
    node: Node
    items: Any
    """the stream of what it finds out"""


class _Driver:
    """Hands out what can be done next, and adds what comes back to the store."""

    def __init__(self, sweep: Sweep, nodes: list[Node], pieces: Sequence[Piece]) -> None:
        self.sweep, self.nodes = sweep, nodes
        self.num_nodes, self.num_pieces = len(nodes), len(pieces)
        self.waiting = {piece.name: piece for piece in pieces if not sweep.is_done(piece.target)}
        """pieces that are not over; those that were given up are"""
        self.errors: dict[str, OutriderError] = {}
        """why a target could not be measured"""
        self.running: dict[str, _Running] = {}
        self.attempts: Counter[str] = Counter()
        self.unfit: set[tuple[str, str]] = set()
        """pieces, and hosts without the memory or a file for them"""
        task = ray.remote(num_returns="streaming", max_retries=0, runtime_env={"env_vars": ENVIRONMENT})
        self._task = task(work)

    def run(self) -> None:
        while self.waiting:
            for piece in [*self.waiting.values()]:
                if piece.name not in self.running:
                    self._start(piece)
            if self.running:
                self._wait()
        answered = {row.target for row in self.sweep.store.rows if isinstance(row, AnswerRow)}
        self.sweep.failures += [error for name, error in self.errors.items() if name not in answered]

    def _start(self, piece: Piece) -> None:
        """On all CPUs of a node, of which one works at a time on each host: then nothing that Ray runs on
        that node shares it, whoever's it is."""
        fitting = [node for node in self.nodes if self._fits(piece, node)]
        if not fitting:
            why = f"no node is left that can do it (it needs {piece.file_bytes / 1e9:.1f} GB at least)"
            self._give_up(piece, why)
            return
        busy = {other.node.host for other in self.running.values()}
        node = next((node for node in fitting if node.host not in busy), None)
        if node is None:
            return
        options: dict[str, Any] = {"num_cpus": node.cpus, "scheduling_strategy": on_node(node.id)}
        options |= {"num_gpus": node.gpus} if node.gpus else {}
        rows = ray.put(self.sweep.store.rows)
        turns = -(-len(self.waiting) // len({node.host for node in self.nodes}))
        share_s = max(self.sweep.left_s(), 0.0) / turns
        items = self._task.options(**options).remote(piece, rows, share_s)
        self.running[piece.name] = _Running(piece, node, items)

    def _fits(self, piece: Piece, node: Node) -> bool:
        return (piece.name, node.host) not in self.unfit and node.memory_bytes >= piece.file_bytes

    def _wait(self) -> None:
        by_ref = {running.items: running for running in self.running.values()}
        ready, _ = ray.wait([*by_ref], timeout=_WAIT_S)
        if not ready:
            self._forget_dead_nodes()
        for ref in ready:
            self._take(by_ref[ref])

    def _take(self, running: _Running) -> None:
        piece = running.piece
        try:
            item: Item = ray.get(next(running.items))
        except StopIteration:
            del self.running[piece.name], self.waiting[piece.name]
        except ray.exceptions.RayTaskError as error:
            del self.running[piece.name]
            self._failed(piece, running.node.host, error.cause)
        except ray.exceptions.RayError as error:  # the process or the node died
            del self.running[piece.name]
            self._forget_dead_nodes()
            self._again(piece, f"{type(error).__name__}: {str(error).splitlines()[0]}")
        else:
            if isinstance(item, tuple):
                self._say(*item, running.node)
            else:
                self.sweep.store.append(item)

    def _forget_dead_nodes(self) -> None:
        alive = nodes_alive()
        self.nodes[:] = [node for node in self.nodes if node.id in alive]

    def _again(self, piece: Piece, why: str) -> None:
        self.attempts[piece.name] += 1
        if self.attempts[piece.name] >= _MAX_ATTEMPTS:
            self._give_up(piece, f"its process ended {_MAX_ATTEMPTS} times ({why})")

    def _failed(self, piece: Piece, host: str, error: BaseException) -> None:
        if isinstance(error, OutOfMemory | MissingFile):
            self.unfit.add((piece.name, host))
            self.sweep.skip(f"{piece.name} on {host}", error.why)
        elif isinstance(error, ModelFileError | BackendError):
            self._give_up(piece, f"it could not be loaded: {error.why}", error)
        else:
            raise error

    def _give_up(self, piece: Piece, why: str, error: OutriderError | None = None) -> None:
        self.sweep.skip(piece.name, why)
        del self.waiting[piece.name]
        self.errors[piece.name] = error or BackendError(piece.name, why)

    def _say(self, what: str, part: float | None, node: Node) -> None:
        done = (self.num_pieces - len(self.waiting) + (part or 0.0)) / self.num_pieces
        self.sweep.progress(f"{node.name}: {what}" if self.num_nodes > 1 else what, done)
