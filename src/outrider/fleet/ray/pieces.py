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
from time import monotonic, time
from typing import Any, NamedTuple

from outrider.core.errors import BackendError, ModelFileError, OutriderError
from outrider.lab.bench.plan import SweepPlan
from outrider.lab.bench.sweep import machine_facts
from outrider.lab.bench.target import TargetWork
from outrider.lab.loaded import Loader
from outrider.lab.models import OWN_HEAD, ModelFile, find_models
from outrider.lab.prompts import Workload
from outrider.lab.rows import Ran, Row
from outrider.lab.subject import Progress, Subject
from outrider.models.cache import fingerprint
from outrider.models.gguf import read_card
from outrider.models.hub import HubOptions
from outrider.models.reference import DEFAULT

LABEL = "outrider-machine"
"""The label of a node that names its kind: `ray start --labels outrider-machine=NAME`."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")
Item = Row | Progress
"""What a piece gives: rows, and how far it is in between."""


class Where(NamedTuple):
    """The node that a piece is on."""

    host: str
    node: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Everything about a target, alone on its host, and what that needs."""

    target: ModelFile
    drafts: tuple[ModelFile, ...]
    plan: SweepPlan
    workloads: tuple[Workload, ...]
    loader: Loader
    has_files: bool = True
    """False in tests: models are not files"""

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def file_bytes(self) -> int:
        """Of what has to be in memory at once, at least."""
        return sum(file.card.file_bytes for file in (self.target, *self.drafts))

    def find(self, file: ModelFile) -> ModelFile:
        """The same model by a path of this machine. Raises MissingFile."""
        references = [*self.plan.targets, *self.plan.drafts]
        return at_hand(file, references, self.loader.hub) if self.has_files else file


class _Closed(Exception):
    """Nobody takes what a piece finds out any more."""


def work(piece: Piece, rows: Sequence[Row], where: Where, left_s: float = math.inf) -> Iterator[Item]:
    """Do a piece, given all rows so far: what it finds out, as soon as it does; rows say where and when they
    were made. `left_s` are the seconds that are left for real runs. Once this is closed, nothing goes on.
    Raises MissingFile, ModelFileError and BackendError."""
    found: Queue[Item | BaseException | None] = Queue()
    is_closed, known, began_s = False, list(rows), time()

    def put(item: Item) -> None:
        if is_closed:
            raise _Closed
        found.put(item)

    def append(row: Row) -> None:
        nonlocal began_s
        now_s = time()
        ran = Ran(**where._asdict(), target=piece.name, began_unix_s=began_s, ended_unix_s=now_s)
        known.append(row.model_copy(update={"ran": ran}))
        began_s = now_s
        put(known[-1])

    def run() -> None:
        end_s = monotonic() + left_s
        try:
            file = piece.find(piece.target)
            put(Progress("loading", 0.0, file.name))
            target, row = piece.loader.target(file)
            with closing(target):
                subject = Subject(file, target, piece.workloads, piece.loader, known, append, put)
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


# What a node is: its physical host, what kind of machine that is, and whether it has a model's file


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a cluster that can work."""

    id: str
    name: str
    """its address, for people"""
    host: str
    kind: str
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


def same_kind(facts: Mapping[str, Any]) -> tuple[Any, ...]:
    """What is alike on machines of one kind."""
    compared = ("cpu", "physical_cores", "devices", "llama_cpp")
    return _gigabytes(facts), *(repr(facts.get(name)) for name in compared)


def kind_name(facts: Mapping[str, Any], label: str | None) -> str:
    """A kind's name: the label that its nodes were given, or the machine in a few words."""
    if label:
        return label
    devices = [str(name) for name in facts.get("devices", ()) if name and name not in facts["cpu"]]
    parts = [facts["cpu"], f"{facts['physical_cores']} cores", f"{_gigabytes(facts)} GB", *devices]
    return ", ".join(map(str, parts))


def _gigabytes(facts: Mapping[str, Any]) -> int:
    return round((facts["memory_bytes"] or 0) / 1e9)


class MissingFile(ModelFileError):
    """A machine lacks a model's file."""


def at_hand(file: ModelFile, references: Sequence[str], hub: HubOptions) -> ModelFile:
    """A model with a path that holds here: the same, or that of the hub or of what comes with Outrider, by
    one of the references. Raises MissingFile."""
    if _is(file.path, file.fingerprint):
        return file
    for reference in references:
        if reference.startswith("hf:") or reference == DEFAULT:
            try:
                [found] = find_models([reference], hub=hub)
            except (OutriderError, ValueError):
                continue  # it may be another one's
            if found.fingerprint == file.fingerprint:
                card = read_card(found.path)
                head = card.own_head if file.name == OWN_HEAD else None
                return replace(file, path=found.path, card=head or card)
    way_out = "Put it at the same path on every machine, or name it by the hub (hf:OWNER/REPO)."
    raise MissingFile(str(file.path), f"{platform.node()} does not have it", way_out)


def _is(path: Path, wanted: str) -> bool:
    try:
        return path.exists() and fingerprint(path) == wanted
    except OutriderError:
        return False
