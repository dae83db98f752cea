"""A sweep on a cluster: its pieces as Ray tasks, timings alone on their physical host, rows in the driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import ray

from outrider.core.errors import BackendError, ModelFileError, OutOfMemory, OutriderError, SettingError
from outrider.fleet.ray.joining import ENVIRONMENT, find_nodes, nodes_alive, on_node
from outrider.fleet.ray.machines import MissingFile, Node, same_kind
from outrider.fleet.ray.pieces import Item, Kit, Piece, Where, work
from outrider.lab.bench.sweep import Sweep
from outrider.lab.models import ModelFile
from outrider.lab.rows import AnswerRow, MachineRow, Row
from outrider.lab.subject import Progress
from outrider.models.hub import HubOptions

_MAX_ATTEMPTS = 5
"""of a piece whose process or node died"""
_WAIT_S = 1.0


class RaySweep:
    """Does the work of a sweep on the cluster that this process is in.

    Raises SettingError where no node can work, before anything is written.

    Args:
        backend: The native library that the plan names; `check` raises BackendError where it is missing.
        machines: The kinds of machines that are measured, where not all are.
        has_files: False in tests, whose models are no files.
    """

    def __init__(
        self,
        backend: str,
        check: Callable[[str], None],
        hub: HubOptions,
        machines: Sequence[str] = (),
        *,
        has_files: bool = True,
    ) -> None:
        self._hub, self._has_files = hub, has_files
        self._nodes, self._left_out = find_nodes([backend], check, machines)

    def __call__(self, sweep: Sweep, targets: Sequence[ModelFile], drafts: Sequence[ModelFile]) -> None:
        """All that has no row yet; rows are added to the sweep's store in the calling thread alone. Raises
        SettingError where a machine is another than when the run began."""
        for node, why in self._left_out.items():
            sweep.skip(node, why)
        _note_machines(sweep, self._nodes)
        kit = Kit(sweep.plan, tuple(sweep.workloads), sweep.loader, self._hub, self._has_files)
        _Driver(sweep, kit, self._nodes, targets, drafts).run()


def _note_machines(sweep: Sweep, nodes: Sequence[Node]) -> None:
    known = {row.machine: row for row in sweep.store.rows if isinstance(row, MachineRow)}
    for kind in dict.fromkeys(node.kind for node in nodes):
        mine = [node for node in nodes if node.kind == kind]
        if kind not in known:
            hosts = tuple(dict.fromkeys(node.host for node in mine))
            sweep.store.append(MachineRow(machine=kind, facts=dict(mine[0].facts), hosts=hosts))
        elif same_kind(known[kind].facts) != same_kind(mine[0].facts):
            why = "it is another kind of machine than the one that this run began with"
            raise SettingError(f"machine {kind}", why, "Name another folder (-o), or label it otherwise.")


class _Running(NamedTuple):
    piece: Piece
    host: str
    items: Any
    """the stream of what it finds out"""


class _Driver:
    """Hands out what can be done next, and adds what comes back to the store."""

    def __init__(
        self,
        sweep: Sweep,
        kit: Kit,
        nodes: list[Node],
        targets: Sequence[ModelFile],
        drafts: Sequence[ModelFile],
    ) -> None:
        self.sweep, self.nodes, self.targets = sweep, nodes, targets
        self.kinds = list(dict.fromkeys(node.kind for node in nodes))
        self.drafts = {file.name: tuple(sweep.drafts_of(file, drafts)) for file in targets}
        self.done: set[str] = set()
        """pieces that are over, those that were given up too"""
        self.errors: dict[str, OutriderError] = {}
        """why a target could not be measured on some kind of machine"""
        self.running: dict[str, _Running] = {}
        self.attempts: Counter[str] = Counter()
        self.unfit: set[tuple[str, str]] = set()
        """pieces, and hosts without the memory or a file for them"""
        self._kit = ray.put(kit)
        self._where = {node.id: Where(node.kind, node.host, node.name) for node in nodes}
        task = ray.remote(num_returns="streaming", max_retries=0, runtime_env={"env_vars": ENVIRONMENT})
        self._task = task(_on_a_node)

    def run(self) -> None:
        while True:
            for piece in self._possible():
                if piece.name not in self.done and piece.name not in self.running:
                    self._start(piece)
            if not self.running:
                break
            self._wait()
        for file in self.targets:
            if file.name in self.errors and not _has_answers(self.sweep.store.rows, file.name):
                self.sweep.failures.append(self.errors[file.name])

    def _possible(self) -> Iterator[Piece]:
        """Every piece that can begin. Of a target one kind of machine comes after the other: the first makes
        its answers, on which the others measure."""
        for file in self.targets:
            pieces = (Piece(file, self.drafts[file.name], kind) for kind in self.kinds)
            left = (p for p in pieces if p.name not in self.done and not self.sweep.is_done(file, p.machine))
            if (piece := next(left, None)) is not None:
                yield piece

    def _start(self, piece: Piece) -> None:
        """On all CPUs of a node, of which one works at a time on each host: then nothing that Ray runs on
        that node shares it, whoever's it is."""
        fitting = [node for node in self.nodes if self._fits(piece, node)]
        if not fitting:
            why = f"no node of the kind {piece.machine} is left that can do it"
            self._give_up(piece, f"{why} (it needs {piece.file_bytes / 1e9:.1f} GB at least)")
            return
        busy = {other.host for other in self.running.values()}
        node = next((node for node in fitting if node.host not in busy), None)
        if node is None:
            return
        options: dict[str, Any] = {"num_cpus": node.cpus, "scheduling_strategy": on_node(node.id)}
        options |= {"num_gpus": node.gpus} if node.gpus else {}
        rows = ray.put(self.sweep.store.rows)
        share_s = max(self.sweep.left_s(), 0.0) / self._waiting(piece)
        items = self._task.options(**options).remote(piece, self._kit, rows, self._where, share_s)
        self.running[piece.name] = _Running(piece, node.host, items)

    def _fits(self, piece: Piece, node: Node) -> bool:
        is_kind = piece.machine == node.kind and (piece.name, node.host) not in self.unfit
        return is_kind and node.memory_bytes >= piece.file_bytes

    def _waiting(self, piece: Piece) -> int:
        """How many targets have real runs one after the other on a host of this kind, this one among them."""
        hosts = {node.host for node in self.nodes if piece.machine == node.kind}
        waiting = [file for file in self.targets if not self.sweep.is_done(file, piece.machine)]
        return max(-(-len(waiting) // max(len(hosts), 1)), 1)

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
            del self.running[piece.name]
            self.done.add(piece.name)
        except ray.exceptions.RayTaskError as error:
            del self.running[piece.name]
            self._failed(piece, error.cause)
        except ray.exceptions.RayError as error:  # the process or the node died
            del self.running[piece.name]
            self._forget_dead_nodes()
            self._again(piece, f"{type(error).__name__}: {str(error).splitlines()[0]}")
        else:
            if isinstance(item, Progress):
                self._say(piece, item)
            else:
                self.sweep.store.append(item)

    def _forget_dead_nodes(self) -> None:
        alive = nodes_alive()
        self.nodes[:] = [node for node in self.nodes if node.id in alive]

    def _again(self, piece: Piece, why: str) -> None:
        self.attempts[piece.name] += 1
        if self.attempts[piece.name] >= _MAX_ATTEMPTS:
            self._give_up(piece, f"its process ended {_MAX_ATTEMPTS} times ({why})")

    def _failed(self, piece: Piece, cause: BaseException) -> None:
        if not isinstance(cause, _Failed):
            raise cause
        if isinstance(cause.error, OutOfMemory | MissingFile):
            self.unfit.add((piece.name, cause.host))
            self.sweep.skip(f"{piece.name} on {cause.host}", cause.error.why)
        elif isinstance(cause.error, ModelFileError | BackendError):
            self._give_up(piece, f"it could not be loaded: {cause.error.why}", cause.error)
        else:
            raise cause.error

    def _give_up(self, piece: Piece, why: str, error: OutriderError | None = None) -> None:
        self.sweep.skip(piece.name, why)
        self.done.add(piece.name)
        self.errors[piece.target.name] = error or BackendError(piece.target.name, why)

    def _say(self, piece: Piece, now: Progress) -> None:
        total = len(self.targets) * len(self.kinds)
        done = min((len(self.done) + now.done) / total, 1.0)
        on = f"{piece.machine}: " if len(self.kinds) > 1 else ""
        self.sweep.progress(Progress(now.stage, done, f"{on}{now.detail}"))


def _has_answers(rows: Sequence[Row], target: str) -> bool:
    return any(isinstance(row, AnswerRow) and row.target == target for row in rows)


class _Failed(Exception):
    def __init__(self, error: OutriderError, host: str) -> None:
        super().__init__(error, host)
        self.error, self.host = error, host


def _on_a_node(
    piece: Piece, kit: Kit, rows: Sequence[Row], where: dict[str, Where], left_s: float
) -> Iterator[Item]:
    here = where[ray.get_runtime_context().get_node_id()]
    try:
        for item in work(piece, kit, rows, here, left_s):
            if isinstance(item, Progress) and len(where) > 1:
                item = Progress(item.stage, item.done, f"{here.node}: {item.detail}")
            yield item
    except OutriderError as error:
        raise _Failed(error, here.host) from None
