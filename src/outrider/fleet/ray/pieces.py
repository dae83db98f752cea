"""A piece of a sweep's work on whatever machine it is given to: rows in, rows out, and no word of Ray."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from threading import Thread
from time import monotonic, time
from typing import Literal, NamedTuple

from outrider.fleet.ray.machines import at_hand
from outrider.lab.bench.loader import Loader
from outrider.lab.bench.plan import SweepPlan
from outrider.lab.bench.runs import RealRuns
from outrider.lab.bench.target import TargetWork
from outrider.lab.loaded import LoadedTarget
from outrider.lab.models import ModelFile
from outrider.lab.progress import Meter, Progress
from outrider.lab.prompts import Workload
from outrider.lab.rows import DoneRow, Ran, Row
from outrider.models.hub import HubOptions

Stage = Literal["measure", "quality"]
"""everything about a target on one kind of machine, alone on its host; or how quantizations score"""

Item = Row | Progress
"""What a piece gives: rows, and how far it is in between."""


class Where(NamedTuple):
    """The node that a piece is on."""

    machine: str
    host: str
    node: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Work on a target, or on the quantizations of one model. `machine` is the kind that is measured,
    `reference` the target whose texts quality is scored on."""

    stage: Stage
    targets: tuple[ModelFile, ...]
    drafts: tuple[ModelFile, ...] = ()
    machine: str = ""
    reference: str = ""

    @property
    def target(self) -> ModelFile:
        """The target, or the first of several."""
        return self.targets[0]

    @property
    def name(self) -> str:
        """No other's in a sweep."""
        return " | ".join([self.stage, self.target.name, *filter(None, [self.machine])])

    @property
    def file_bytes(self) -> int:
        """Of what has to be in memory at once, at least."""
        drafts = sum(file.card.file_bytes for file in self.drafts)
        return max(file.card.file_bytes for file in self.targets) + drafts


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
    """Do a piece, given all rows so far: what it finds out, as soon as it does.

    `left_s` are the seconds that are left for real runs. Once this is closed, nothing goes on. Raises
    MissingFile, ModelFileError and BackendError.
    """
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
    meter, end_s = Meter(found.put), monotonic() + left_s
    with TemporaryDirectory(prefix="outrider-") as folder:
        for file in map(kit.find, piece.targets):
            meter.say("loading", file.name)
            target, row = kit.loader.target(file)

            def work(machine: str, file: ModelFile = file, target: LoadedTarget = target) -> TargetWork:
                given = kit.plan, kit.workloads, kit.loader, file, target, found.rows, found.append, meter
                return TargetWork(*given, machine, is_timed=bool(machine))

            with closing(target):
                mine = work(piece.machine)
                mine.note_model(row)
                if piece.stage == "quality":
                    mine.quality(Path(folder), piece.reference, is_compared=len(piece.targets) > 1)
                else:
                    drafts = [kit.find(draft) for draft in piece.drafts]
                    _measure(work(""), mine, drafts, lambda: end_s - monotonic())


def _measure(
    shared: TargetWork, mine: TargetWork, drafts: Sequence[ModelFile], left_s: Callable[[], float]
) -> None:
    """What holds on every machine, where another has not found it out; then what holds on this kind."""
    if not shared.record():
        mine.append(DoneRow(target=mine.name, repetitions=mine.plan.repetitions))
        return
    shared.score(drafts)
    mine.measure_target()
    mine.score(drafts)
    mine.replay()
    RealRuns(mine, left_s).run()
