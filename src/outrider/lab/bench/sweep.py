"""The sweep: target by target, record once, replay everything, run the finalists for real. All that was found
out is a row in the run's folder: a run that was interrupted goes on where it was."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

from outrider.backends.gguf.libraries import device_names
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.machine import physical_cores, total_bytes
from outrider.core.errors import BackendError, ModelFileError, OutriderError, SettingError
from outrider.lab.bench.plan import SweepPlan
from outrider.lab.bench.results import Results, Store
from outrider.lab.bench.target import TargetWork, context_for
from outrider.lab.loaded import Loader
from outrider.lab.machine import machine, versions
from outrider.lab.models import OWN_HEAD, ModelFile, own_head
from outrider.lab.prompts import Workload
from outrider.lab.rows import DoneRow, HeadRow, ModelRow, SkippedRow
from outrider.lab.subject import Subject
from outrider.models.gguf import check_whole
from outrider.models.heads import why_no_head
from outrider.session.loading import for_heads
from outrider.session.options import Progress, no_progress

Elsewhere = Callable[["Sweep", Sequence[ModelFile], Sequence[ModelFile]], None]
"""Does the work on a sweep's targets with its drafts."""


def run_sweep(
    plan: SweepPlan,
    folder: Path,
    loader: Loader,
    *,
    progress: Progress = no_progress,
    elsewhere: Elsewhere | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Results:
    """Run `plan`, or go on with the run that is in `folder`; the rows that are there in the end.

    The work on the targets is done here, one after the other, or `elsewhere` on machines of these `facts`. A
    model that cannot be loaded is left out, and a row says so. Raises SettingError for a folder that holds
    another run, and what is wrong with the models' files where no target is left.
    """
    workloads = plan.workloads()
    targets = loader.find(plan.targets)
    for target in targets:
        check_whole(target.card)
    drafts = loader.find([name for name in plan.drafts if name != OWN_HEAD], targets)
    head = head_row(plan, workloads, loader.options, facts or machine_facts())
    with closing(Store.open(folder, head)) as store:
        loader.context = context_for(workloads) if loader.context is None else loader.context
        sweep = Sweep(plan, store, loader, workloads, progress)
        sweep.run(targets, drafts, elsewhere)
        return Results.of(store.rows)


@dataclass
class Sweep:
    """A sweep under way: what is asked for, and the rows that are there."""

    plan: SweepPlan
    store: Store
    loader: Loader
    workloads: Sequence[Workload]
    progress: Progress
    started_s: float = field(default_factory=lambda: perf_counter())
    failures: list[OutriderError] = field(default_factory=list)
    """of targets that could not be loaded"""

    def run(
        self, targets: Sequence[ModelFile], drafts: Sequence[ModelFile], elsewhere: Elsewhere | None = None
    ) -> None:
        """Do what has no row yet. Raises what is wrong with the targets where none can be loaded."""
        targets = self._in_library(targets, drafts)
        self._check_files([*targets, *drafts])
        (elsewhere or Sweep._run_here)(self, targets, drafts)
        if len(self.failures) == len(targets):
            raise self.failures[0]

    def _run_here(self, targets: Sequence[ModelFile], drafts: Sequence[ModelFile]) -> None:
        waiting = [file for file in targets if not self.is_done(file)]
        for place, file in enumerate(waiting):

            def tell(what: str, part: float | None, place: int = place) -> None:
                self.progress(what, (place + (part or 0.0)) / len(waiting))

            self._target(file, drafts, len(waiting) - place, tell)

    def _in_library(self, targets: Sequence[ModelFile], drafts: Sequence[ModelFile]) -> list[ModelFile]:
        """The targets under the backend that was asked for, or that runs the heads that draft."""
        pairs = [(target, draft) for target in targets for draft in self.drafts_of(target, drafts)]
        heads = [
            draft for target, draft in pairs if draft.is_head and not why_no_head(draft.card, target.card)
        ]
        options = for_heads(self.loader.options, heads[0].card) if heads else self.loader.options
        return [replace(target, backend=options.backend) for target in targets]

    def skip(self, what: str, why: str) -> None:
        """Say once that something takes no part."""
        skipped = SkippedRow(what=what, why=why)
        if skipped not in self.store.rows:
            self.store.append(skipped)

    def _check_files(self, files: Sequence[ModelFile]) -> None:
        rows = [row for row in self.store.rows if isinstance(row, ModelRow) and row.beside is None]
        known = {row.model: row.fingerprint for row in rows}
        for file in files:
            if known.get(file.name, file.fingerprint) != file.fingerprint:
                why = f"it is not the {file.name} that this run began with"
                raise SettingError(str(file.path), why, "Name another folder (-o), or put the file back.")

    def drafts_of(self, file: ModelFile, drafts: Sequence[ModelFile]) -> list[ModelFile]:
        """The draft files, and the target's own head where the plan names it."""
        head = own_head(file) if OWN_HEAD in self.plan.drafts else None
        return [*drafts, *([head] if head is not None else [])]

    def _target(
        self,
        file: ModelFile,
        drafts: Sequence[ModelFile],
        num_left: int,
        tell: Progress,
    ) -> None:
        tell(f"loading, {file.name}", 0.0)
        try:
            target, row = self.loader.target(file)
        except (ModelFileError, BackendError) as error:
            self.failures.append(error)
            self.skip(file.name, f"it could not be loaded: {error.why}")
            return
        rows, append = self.store.rows, self.store.append
        with closing(target):
            subject = Subject(file, target, self.workloads, self.loader, rows, append, tell)
            subject.note_model(row)
            work = TargetWork(self.plan, subject)
            work.find_out(self.drafts_of(file, drafts), lambda: self.left_s() / num_left)

    def is_done(self, file: ModelFile) -> bool:
        done = (row for row in self.store.rows if isinstance(row, DoneRow))
        return any(row.target == file.name and row.repetitions >= self.plan.repetitions for row in done)

    def left_s(self) -> float:
        """What is left of the plan's minutes; without a limit infinity."""
        minutes = self.plan.minutes
        return math.inf if minutes is None else 60 * minutes - (perf_counter() - self.started_s)


# What it is measured on: the head of its rows.


def machine_facts() -> dict[str, Any]:
    """This machine and the builds on it, as plain data."""
    memory_bytes = total_bytes()
    return {
        **machine(),
        "physical_cores": physical_cores(),
        "devices": list(device_names()),
        "memory_bytes": int(memory_bytes) if math.isfinite(memory_bytes) else None,
        **versions(version("outrider")),
    }


def head_row(
    plan: SweepPlan, workloads: Sequence[Workload], options: LoadOptions, facts: Mapping[str, Any]
) -> HeadRow:
    """The machine, the plan with how targets are loaded, and which prompts its workloads held."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    prompts = {workload.name: _digest(workload) for workload in workloads}
    asked = plan.model_dump(mode="json") | {"loading": asdict(options)}
    return HeadRow(started=started, machine=dict(facts), plan=asked, prompts=prompts)


def _digest(workload: Workload) -> str:
    return blake2b(repr(workload.prompts).encode(errors="backslashreplace"), digest_size=12).hexdigest()
