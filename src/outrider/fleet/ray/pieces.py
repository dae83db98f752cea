"""The work on one target of a sweep, on whatever machine it is given to: rows in, rows out."""

from __future__ import annotations

import math
import platform
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Queue
from threading import Thread
from time import monotonic
from typing import Any

from outrider.core.errors import BackendError, ModelFileError, OutriderError, SettingError
from outrider.lab.bench.plan import SweepPlan
from outrider.lab.bench.sweep import machine_facts
from outrider.lab.bench.target import TargetWork
from outrider.lab.loaded import Loader
from outrider.lab.models import OWN_HEAD, ModelFile
from outrider.lab.prompts import Workload
from outrider.lab.rows import Row
from outrider.lab.subject import Subject
from outrider.models.cache import fingerprint

_BOOT = Path("/proc/sys/kernel/random/boot_id")
Item = Row | tuple[str, float | None]
"""What a piece gives: rows, and how far it is in between."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Everything about a target, alone on its host, and what that needs."""

    target: ModelFile
    drafts: tuple[ModelFile, ...]
    plan: SweepPlan
    workloads: tuple[Workload, ...]
    loader: Loader

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def file_bytes(self) -> int:
        """Of what has to be in memory at once, at least."""
        return sum(file.card.file_bytes for file in (self.target, *self.drafts))

    def find(self, file: ModelFile) -> ModelFile:
        """The same model by a path of this machine. Raises MissingFile."""
        return at_hand(file, [*self.plan.targets, *self.plan.drafts], self.loader)


class _Closed(Exception):
    """Nobody takes what a piece finds out any more."""


def work(piece: Piece, rows: Sequence[Row], left_s: float = math.inf) -> Iterator[Item]:
    """Do a piece, given all rows so far: what it finds out, as soon as it does. `left_s` are the seconds that
    are left for real runs. Once this is closed, nothing goes on. Raises MissingFile, ModelFileError and
    BackendError."""
    found: Queue[Item | BaseException | None] = Queue()
    is_closed, known = False, list(rows)

    def put(item: Item) -> None:
        if is_closed:
            raise _Closed
        found.put(item)

    def append(row: Row) -> None:
        known.append(row)
        put(row)

    def run() -> None:
        end_s = monotonic() + left_s
        try:
            file = piece.find(piece.target)
            put((f"loading, {file.name}", 0.0))
            target, row = piece.loader.target(file)
            with closing(target):
                subject = Subject(
                    file, target, piece.workloads, piece.loader, known, append, lambda *said: put(said)
                )
                subject.note_model(row)
                drafts = [piece.find(draft) for draft in piece.drafts]
                TargetWork(piece.plan, subject).find_out(drafts, lambda: end_s - monotonic())
        except BaseException as error:  # it is raised where the items are taken
            found.put(error)
        else:
            found.put(None)

    thread = Thread(target=run, daemon=True)
    thread.start()
    try:
        while (item := found.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        is_closed = True
        thread.join()


# What a node is: its physical host, what machine that is, and whether it has a model's file


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a cluster that can work."""

    id: str
    name: str
    """its address, for people"""
    host: str
    cpus: float
    gpus: float
    memory_bytes: float
    facts: Mapping[str, Any]


def host_id() -> str:
    """Names the physical host: containers on it share the kernel's boot, and several nodes do."""
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return f"{platform.node()}-{uuid.getnode():x}"


def facts_here(backend: str, check: Callable[[str], None]) -> dict[str, Any]:
    """What this machine is, as plain data, and why the backend cannot be used here: `check` raises it."""
    refused = ""
    try:
        check(backend)
    except BackendError as error:
        refused = f"backend {backend}: {error.why}"
    return {"host": host_id(), "refused": refused, "facts": machine_facts()}


def check_alike(nodes: Sequence[Node]) -> None:
    """Raises SettingError where the nodes are different machines: their speeds do not compare."""
    found = {}
    for node in nodes:
        memory = f"{round((node.facts['memory_bytes'] or 0) / 1e9)} GB"
        what = [node.facts[name] for name in ("cpu", "physical_cores", "devices", "llama_cpp")]
        found[repr((*what, memory))] = f"{node.name}: {what[0]}, {what[1]} cores, {memory}"
    if len(found) > 1:
        why = f"its machines differ ({'; '.join(found.values())})"
        raise SettingError("the cluster", why, "Measure on a cluster of one kind of machine.")


class MissingFile(ModelFileError):
    """A machine lacks a model's file."""


def at_hand(file: ModelFile, references: Sequence[str], loader: Loader) -> ModelFile:
    """A model with a path that holds here: the same, or where one of the references leads. Raises
    MissingFile."""
    if _is(file.path, file.fingerprint):
        return file
    for reference in references:
        try:
            found = loader.find([reference])
        except OutriderError:
            continue  # it may be another one's
        for other in found:
            if other.fingerprint == file.fingerprint:
                head = other.card.own_head if file.name == OWN_HEAD else None
                return replace(file, path=other.path, card=head or other.card)
    way_out = "Put it at the same path on every machine, or name it by the hub (hf:OWNER/REPO)."
    raise MissingFile(str(file.path), f"{platform.node()} does not have it", way_out)


def _is(path: Path, wanted: str) -> bool:
    try:
        return path.exists() and fingerprint(path) == wanted
    except OutriderError:
        return False
