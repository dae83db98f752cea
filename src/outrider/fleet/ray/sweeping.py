"""A sweep on a cluster: its pieces as Ray tasks, timings alone on their physical host, rows in the driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ray

from outrider.core.errors import BackendError, ModelFileError, OutOfMemory, OutriderError
from outrider.fleet.ray.joining import ENVIRONMENT, find_nodes, nodes_alive, on_node
from outrider.fleet.ray.pieces import Item, MissingFile, Node, Piece, Where, work
from outrider.lab.bench.sweep import Sweep
from outrider.lab.models import ModelFile
from outrider.lab.rows import AnswerRow, Row
from outrider.lab.subject import Progress

_MAX_ATTEMPTS = 5
"""of a piece whose process or node died"""
_WAIT_S = 1.0


class RaySweep:
    """Does the work of a sweep on the cluster that this process is in, on one kind of `machine`; `check`
    raises BackendError where a node lacks the `backend`. Raises SettingError where no node can work, before
    anything is written."""

    def __init__(
        self,
        backend: str,
        check: Callable[[str], None],
        machine: str | None = None,
        *,
        has_files: bool = True,
    ) -> None:
        self._has_files = has_files
        self._nodes, self._left_out = find_nodes(backend, check, machine)

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the machines are that it measures on."""
        node = self._nodes[0]
        return {**node.facts, "kind": node.kind}

    def __call__(self, sweep: Sweep, targets: Sequence[ModelFile], drafts: Sequence[ModelFile]) -> None:
        """All that has no row yet; rows are added to the sweep's store in the calling thread alone."""
        for node, why in self._left_out.items():
            sweep.skip(node, why)
        given = sweep.plan, tuple(sweep.workloads), sweep.loader, self._has_files
        pieces = [Piece(file, tuple(sweep.drafts_of(file, drafts)), *given) for file in targets]
        _Driver(sweep, self._nodes, pieces).run()


class _Running(NamedTuple):
    piece: Piece
    host: str
    items: Any
    """the stream of what it finds out"""


class _Driver:
    """Hands out what can be done next, and adds what comes back to the store."""

    def __init__(self, sweep: Sweep, nodes: list[Node], pieces: Sequence[Piece]) -> None:
        self.sweep, self.nodes, self.num_pieces = sweep, nodes, len(pieces)
        self.waiting = {piece.name: piece for piece in pieces if not sweep.is_done(piece.target)}
        """pieces that are not over; those that were given up are"""
        self.errors: dict[str, OutriderError] = {}
        """why a target could not be measured"""
        self.running: dict[str, _Running] = {}
        self.attempts: Counter[str] = Counter()
        self.unfit: set[tuple[str, str]] = set()
        """pieces, and hosts without the memory or a file for them"""
        self._where = {node.id: Where(node.host, node.name) for node in nodes}
        task = ray.remote(num_returns="streaming", max_retries=0, runtime_env={"env_vars": ENVIRONMENT})
        self._task = task(_on_a_node)

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
        busy = {other.host for other in self.running.values()}
        node = next((node for node in fitting if node.host not in busy), None)
        if node is None:
            return
        options: dict[str, Any] = {"num_cpus": node.cpus, "scheduling_strategy": on_node(node.id)}
        options |= {"num_gpus": node.gpus} if node.gpus else {}
        rows = ray.put(self.sweep.store.rows)
        turns = -(-len(self.waiting) // len({node.host for node in self.nodes}))
        share_s = max(self.sweep.left_s(), 0.0) / turns
        items = self._task.options(**options).remote(piece, rows, self._where, share_s)
        self.running[piece.name] = _Running(piece, node.host, items)

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
            self._failed(piece, error.cause)
        except ray.exceptions.RayError as error:  # the process or the node died
            del self.running[piece.name]
            self._forget_dead_nodes()
            self._again(piece, f"{type(error).__name__}: {str(error).splitlines()[0]}")
        else:
            if isinstance(item, Progress):
                self._say(item)
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
        del self.waiting[piece.name]
        self.errors[piece.name] = error or BackendError(piece.name, why)

    def _say(self, now: Progress) -> None:
        done = (self.num_pieces - len(self.waiting) + now.done) / self.num_pieces
        self.sweep.progress(Progress(now.stage, done, now.detail))


class _Failed(Exception):
    def __init__(self, error: OutriderError, host: str) -> None:
        super().__init__(error, host)
        self.error, self.host = error, host


def _on_a_node(piece: Piece, rows: Sequence[Row], where: dict[str, Where], left_s: float) -> Iterator[Item]:
    here = where[ray.get_runtime_context().get_node_id()]
    try:
        for item in work(piece, rows, here, left_s):
            if isinstance(item, Progress) and len(where) > 1:
                item = Progress(item.stage, item.done, f"{here.node}: {item.detail}")
            yield item
    except OutriderError as error:
        raise _Failed(error, here.host) from None
