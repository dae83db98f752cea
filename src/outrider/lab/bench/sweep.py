"""The sweep: target by target, record once, replay everything, run the finalists for real.

Everything that was found out is a row in the run's folder, so a run that was interrupted goes on where it
was; a block of real runs that was interrupted is run again.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import blake2b
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from outrider.backends.gguf import device_names, physical_cores
from outrider.backends.machine import total_bytes
from outrider.core.errors import BackendError, ModelFileError, OutriderError, SettingError
from outrider.lab.bench.ledger import Ledger
from outrider.lab.bench.loader import LlamaCppLoader
from outrider.lab.bench.plan import SweepPlan
from outrider.lab.bench.quality import families
from outrider.lab.bench.results import Results
from outrider.lab.bench.stages import Loader, Stages
from outrider.lab.bench.store import Store
from outrider.lab.bench.work import TargetWork
from outrider.lab.machine import machine, versions
from outrider.lab.models import OWN_HEAD, ModelFile, own_head, under_backends, usable_backends
from outrider.lab.progress import Meter, Progress
from outrider.lab.prompts import Workload
from outrider.lab.record import cases_of
from outrider.lab.rows import DoneRow, HeadRow, ModelRow, SkippedRow
from outrider.lab.workloads import load_workload
from outrider.models.gguf import HEADS, check_whole
from outrider.models.hub import HubOptions
from outrider.session.drafts import why_no_head

__all__ = ["Executor", "Progress", "Sweep", "run_sweep"]

_BYTES_PER_S = 8e9
"""of weights that a step reads, as long as nothing is measured"""
_SCORED_SHARE = 0.5
"""Scoring a draft takes about so much of recording the answers; a better guess follows."""
_REPLAYED_CASE_S = 0.002


def run_sweep(
    plan: SweepPlan,
    folder: Path,
    *,
    hub: HubOptions | None = None,
    progress: Callable[[Progress], None] = lambda _progress: None,
    loader: Loader | None = None,
    executor: Executor | None = None,
) -> Results:
    """Run `plan`, or go on with the run that is in `folder`; the rows that are there in the end.

    The work on the targets is done here, one after the other, or by an `executor`. A model that cannot be
    loaded is left out, and a row says so. Raises SettingError for a folder that holds another run, and what
    is wrong with the models' files where no target is left.
    """
    workloads = [load_workload(spec) for spec in plan.workloads]
    loading = loader or LlamaCppLoader(plan, workloads, hub or HubOptions())
    targets = loading.find(plan.targets)
    for target in targets:
        check_whole(target.card)
    drafts = loading.find([name for name in plan.drafts if name != OWN_HEAD], targets)
    with Store.open(folder, head_row(plan, workloads)) as store:
        sweep = Sweep(plan, store, loading, workloads, Meter(progress), executor)
        sweep.run(targets, drafts)
        return Results.of(store.rows)


class Executor(Protocol):
    """Does the work of a sweep elsewhere."""

    def check_backend(self, backend: str) -> None:
        """Raises BackendError where no machine has a library of this backend."""
        ...

    def run(self, sweep: Sweep, targets: Sequence[ModelFile], drafts: Sequence[ModelFile]) -> None:
        """All that has no row yet. Rows are added to the sweep's store, in the calling thread alone."""
        ...


@dataclass
class Sweep:
    """A sweep under way: what is asked for, and the rows that are there."""

    plan: SweepPlan
    store: Store
    loader: Loader
    workloads: Sequence[Workload]
    meter: Meter
    executor: Executor | None = None
    started_s: float = field(default_factory=lambda: perf_counter())
    relatives: dict[str, str] = field(default_factory=dict)
    """of each target the one that it is a quantization of, or itself"""
    failures: list[OutriderError] = field(default_factory=list)
    """of targets that could not be loaded"""

    def run(self, targets: Sequence[ModelFile], drafts: Sequence[ModelFile]) -> None:
        """Do what has no row yet. Raises what is wrong with the targets where none can be loaded."""
        pairs = [(target, draft) for target in targets for draft in self.drafts_of(target, drafts)]
        heads = [
            draft for target, draft in pairs if draft.is_head and not why_no_head(draft.card, target.card)
        ]
        ordered = self._under_backends(families(targets, self.plan.references), heads)
        self._check_files([*ordered, *drafts])
        if self.executor is not None:
            self.executor.run(self, ordered, drafts)
        else:
            self._run_here(ordered, drafts)
        if len(self.failures) == len(ordered):
            raise self.failures[0]

    def _run_here(self, targets: Sequence[ModelFile], drafts: Sequence[ModelFile]) -> None:
        done = {row.target for row in self.store.rows if isinstance(row, DoneRow)}
        waiting = [file for file in targets if file.name not in done]
        for file in waiting:
            self._expect(file, self.drafts_of(file, drafts))
        for file in waiting:
            self._target(file, self.drafts_of(file, drafts))

    def _under_backends(
        self, groups: Sequence[Sequence[ModelFile]], heads: Sequence[ModelFile]
    ) -> list[ModelFile]:
        """Every target under each backend that is here. Quality is compared under the first of them alone: it
        is the file's.

        Raises BackendError where none is here.
        """
        backends, several = self._backends(heads), len(self.plan.backends) > 1
        for group in groups:
            alike = under_backends(group, backends[:1], several=several)
            self.relatives |= {model.name: alike[0].name for model in alike}
        return [model for group in groups for model in under_backends(group, backends, several=several)]

    def _backends(self, heads: Sequence[ModelFile]) -> Sequence[str]:
        """Those of the plan that are here; a row names each that is not. One alone is left to the loading,
        which says what is wrong with it; where heads draft, "auto" is the one that runs them. Raises
        BackendError where there is none."""
        if heads and self.plan.backends == ("auto",) and not self.plan.library:
            holds = f"{heads[0].name} holds {HEADS[heads[0].card.kind]}"
            self.skip("other libraries than llama.cpp", f"{holds}, which it alone runs")
            return ("llama.cpp",)
        if len(self.plan.backends) == 1:
            return self.plan.backends
        usable, refused = usable_backends(self.plan.backends, (self.executor or self.loader).check_backend)
        for backend, error in refused.items():
            self.skip(f"backend {backend}", error.why)
        return usable

    def skip(self, what: str, why: str) -> None:
        """Say once that something takes no part."""
        skipped = SkippedRow(what=what, why=why)
        if skipped not in self.store.rows:
            self.store.append(skipped)

    def _check_files(self, files: Sequence[ModelFile]) -> None:
        """Rows of another file by the same name are no rows of this one."""
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

    def _expect(self, file: ModelFile, drafts: Sequence[ModelFile]) -> None:
        """A first guess, by the size of the file."""
        tokens = sum(len(cases_of(w)) * w.max_tokens for w in self.workloads)
        record_s = 1.5 * tokens * file.card.file_bytes / _BYTES_PER_S
        runs = self._runs(len(_alike(file, drafts)))
        self.meter.expect(f"later {file.name}", record_s * (1 + 0.7 * runs))

    def _runs(self, num_drafts: int) -> int:
        """How often every case is answered for real, at least."""
        return self.plan.repetitions_least * ((self.plan.finalists + 2) * (1 + num_drafts) + 1)

    def _target(self, file: ModelFile, drafts: Sequence[ModelFile]) -> None:
        self.meter.say("loading", file.name)
        try:
            target, row = self.loader.target(file)
        except (ModelFileError, BackendError) as error:
            self.failures.append(error)
            self.skip(file.name, f"it could not be loaded: {error.why}")
            self.meter.expect(f"later {file.name}", 0)
            return
        with closing(target):
            ledger = Ledger(self.store, target, self.workloads)
            ledger.note_model(row)
            stages = Stages(self.plan, ledger, self.loader, self.meter)
            work = TargetWork(stages, file)
            has_answers = work.record()
            self._expect_stages(stages, file, drafts)
            if not has_answers:
                self.store.append(DoneRow(target=file.name))
                return
            stages.measure_target()
            if self.plan.quality:
                reference, is_compared = self.reference_of(file)
                work.quality(self.references, reference, is_compared=is_compared)
            work.score(drafts)
            work.replay()
            for draft in drafts:
                self.meter.expect(f"replay {draft.name}", 0)
            work.run(drafts, self.is_over)

    def _expect_stages(self, stages: Stages, file: ModelFile, drafts: Sequence[ModelFile]) -> None:
        """Better guesses, now that the target's speed is known."""
        self.meter.known()
        cases = stages.ledger.all_cases()
        recorded_s = sum(answer.prefill_s + answer.decode_s for _, answer in cases)
        num_settings = 2 + len(self.plan.draft_lengths) * 3
        alike = _alike(file, drafts)
        for draft in alike:
            self.meter.expect(f"score {draft.name}", recorded_s * _SCORED_SHARE)
            self.meter.expect(f"replay {draft.name}", len(cases) * num_settings * _REPLAYED_CASE_S)
        self.meter.expect("measure", recorded_s * 0.7 * self._runs(len(alike)))
        self.meter.expect(f"later {stages.name}", 0)

    @property
    def references(self) -> Path:
        """Where distributions of references are kept."""
        return self.store.folder / "references"

    def reference_of(self, file: ModelFile) -> tuple[str, bool]:
        """The target whose texts this one is scored on, and whether another one is scored on them."""
        reference = self.relatives.get(file.name, file.name)
        return reference, any(
            other != reference for other, best in self.relatives.items() if best == reference
        )

    def is_over(self) -> bool:
        """Whether the time for real runs is."""
        minutes = self.plan.minutes
        return minutes is not None and perf_counter() - self.started_s > 60 * minutes


def _alike(target: ModelFile, drafts: Sequence[ModelFile]) -> list[ModelFile]:
    """The drafts with the target's tokenizer."""
    return [draft for draft in drafts if draft.card.tokenizer == target.card.tokenizer]


# What it is measured on: the head of its rows.


def head_row(plan: SweepPlan, workloads: Sequence[Workload]) -> HeadRow:
    """Machine, library build, plan, and which prompts its workloads held."""
    memory_bytes = total_bytes()
    facts: dict[str, Any] = {
        **machine(),
        "physical_cores": physical_cores(),
        "devices": list(device_names()),
        "memory_bytes": int(memory_bytes) if isfinite(memory_bytes) else None,
        **versions(version("outrider")),
        "commit": _commit(),
    }
    started = datetime.now(UTC).isoformat(timespec="seconds")
    prompts = {workload.name: _digest(workload) for workload in workloads}
    return HeadRow(started=started, machine=facts, plan=plan.model_dump(mode="json"), prompts=prompts)


def _digest(workload: Workload) -> str:
    return blake2b(repr(workload.prompts).encode(errors="backslashreplace"), digest_size=12).hexdigest()


def _commit() -> str | None:
    """The commit of a checkout that this runs from; None for an installed package."""
    source = Path(__file__).resolve().parents[3]
    if not (source / ".git").exists():
        return None
    command = ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None
