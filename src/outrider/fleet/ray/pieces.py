"""A piece of a sweep's work on whatever machine it is given to: rows in, rows out, and no word of Ray."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from queue import Queue
from threading import Thread
from time import monotonic, time
from typing import NamedTuple

from outrider.fleet.ray.machines import at_hand
from outrider.lab.bench.plan import SweepPlan
from outrider.lab.bench.target import TargetWork
from outrider.lab.loaded import Loader
from outrider.lab.models import ModelFile
from outrider.lab.prompts import Workload
from outrider.lab.rows import Ran, Row
from outrider.lab.subject import Progress, Subject
from outrider.models.hub import HubOptions

Item = Row | Progress
"""What a piece gives: rows, and how far it is in between."""


class Where(NamedTuple):
    """The node that a piece is on."""

    machine: str
    host: str
    node: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Everything about a target on one kind of machine, alone on its host."""

    target: ModelFile
    drafts: tuple[ModelFile, ...]
    machine: str

    @property
    def name(self) -> str:
        """No other's in a sweep."""
        return f"{self.target.name} on {self.machine}"

    @property
    def file_bytes(self) -> int:
        """Of what has to be in memory at once, at least."""
        return sum(file.card.file_bytes for file in (self.target, *self.drafts))


@dataclass(frozen=True, slots=True)
class Kit:
    """What every piece of a sweep needs."""

    plan: SweepPlan
    workloads: tuple[Workload, ...]
    loader: Loader
    hub: HubOptions
    has_files: bool = True
    """False in tests: models are not files"""

    def find(self, file: ModelFile) -> ModelFile:
        """The same model by a path of this machine. Raises MissingFile."""
        return at_hand(file, [*self.plan.targets, *self.plan.drafts], self.hub) if self.has_files else file


def work(
    piece: Piece, kit: Kit, rows: Sequence[Row], where: Where, left_s: float = math.inf
) -> Iterator[Item]:
    """Do a piece, given all rows so far: what it finds out, as soon as it does. `left_s` are the seconds that
    are left for real runs. Once this is closed, nothing goes on. Raises MissingFile, ModelFileError and
    BackendError."""
    found: Queue[Item | BaseException | None] = Queue()
    is_closed = False

    def put(item: Item) -> None:
        if is_closed:
            raise _Closed
        found.put(item)

    def run() -> None:
        try:
            _do(piece, kit, _Found(piece, rows, where, put), left_s)
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


class _Closed(Exception):
    """Nobody takes what a piece finds out any more."""


class _Found:
    """The rows that a piece knows; those that are added are stamped, and handed on."""

    def __init__(self, piece: Piece, rows: Sequence[Row], where: Where, put: Callable[[Item], None]) -> None:
        self.rows = list(rows)
        self.put = put
        self._piece, self._where, self._began = piece, where, time()

    def append(self, row: Row) -> None:
        now = time()
        ran = Ran(**self._where._asdict(), job=self._piece.name, began_unix_s=self._began, ended_unix_s=now)
        row = row.model_copy(update={"ran": ran})
        self._began = now
        self.rows.append(row)
        self.put(row)


def _do(piece: Piece, kit: Kit, found: _Found, left_s: float) -> None:
    end_s, file = monotonic() + left_s, kit.find(piece.target)
    found.put(Progress("loading", 0.0, file.name))
    target, row = kit.loader.target(file)
    with closing(target):
        given = file, target, kit.workloads, kit.loader, found.rows, found.append, found.put
        subject = Subject(*given, piece.machine)
        subject.note_model(row)
        drafts = [kit.find(draft) for draft in piece.drafts]
        TargetWork(kit.plan, subject).find_out(drafts, lambda: end_s - monotonic())
