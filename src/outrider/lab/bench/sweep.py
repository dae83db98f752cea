"""The sweep: target by target, record once, replay everything, run the finalists for real.

Everything that was found out is a row in the run's folder, so a run that was interrupted goes on where it
was; a block of real runs that was interrupted is run again.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

from outrider.backends.gguf.libraries import candidates, device_names
from outrider.backends.machine import physical_cores, total_bytes
from outrider.core.errors import BackendError, ModelFileError, OutriderError, SettingError
from outrider.lab.bench.plan import SweepPlan
from outrider.lab.bench.results import Results, Store
from outrider.lab.bench.runs import find_out
from outrider.lab.bench.target import Loader, Meter, Progress, TargetWork
from outrider.lab.machine import machine, versions
from outrider.lab.models import OWN_HEAD, ModelFile, own_head
from outrider.lab.prompts import Workload
from outrider.lab.record import Case, cases_of
from outrider.lab.rows import AnswerRow, BlockRow, CostsRow, DoneRow, HeadRow, ModelRow, SkippedRow
from outrider.lab.workloads import load_workload
from outrider.models.gguf import HEADS, check_whole
from outrider.models.hub import HubOptions
from outrider.session.drafts import why_no_head

_BYTES_PER_S = 8e9
"""of weights that a step reads, as long as nothing is measured"""
_MOST_BYTES_PER_S = {"core": 1e11, "gpu": 1e13}
"""What no memory exceeds, several times what it usually gives: what takes too long even so is refused before
anything is loaded."""
_SCORED_SHARE = 0.5
"""Scoring a draft takes about so much of recording the answers."""
_RUN_SHARE = 0.7
"""A real run of a setting takes about so much of recording the answers."""
_MODEL_S = 8.0
"""Loading a model and measuring its calls."""

Elsewhere = Callable[["Sweep", Sequence[ModelFile], Sequence[ModelFile]], None]
"""Does the work on a sweep's targets with its drafts."""


def run_sweep(
    plan: SweepPlan,
    folder: Path,
    *,
    hub: HubOptions | None = None,
    progress: Callable[[Progress], None] = lambda _progress: None,
    loader: Loader | None = None,
    elsewhere: Elsewhere | None = None,
) -> Results:
    """Run `plan`, or go on with the run that is in `folder`; the rows that are there in the end.

    The work on the targets is done here, one after the other, or `elsewhere`. A model that cannot be loaded
    is left out, and a row says so. Raises SettingError for a folder that holds another run and for minutes
    that are too few, and what is wrong with the models' files where no target is left.
    """
    workloads = [load_workload(spec) for spec in plan.workloads]
    loading = loader or Loader(plan, workloads, hub or HubOptions())
    targets = loading.find(plan.targets)
    for target in targets:
        check_whole(target.card)
    drafts = loading.find([name for name in plan.drafts if name != OWN_HEAD], targets)
    with Store.open(folder, head_row(plan, workloads)) as store:
        sweep = Sweep(plan, store, loading, workloads, progress)
        sweep.run(targets, drafts, elsewhere)
        return Results.of(store.rows)


@dataclass
class Sweep:
    """A sweep under way: what is asked for, and the rows that are there."""

    plan: SweepPlan
    store: Store
    loader: Loader
    workloads: Sequence[Workload]
    progress: Callable[[Progress], None]
    started_s: float = field(default_factory=lambda: perf_counter())
    failures: list[OutriderError] = field(default_factory=list)
    """of targets that could not be loaded"""

    def __post_init__(self) -> None:
        self.meter = Meter(self._tell)
        self._answer_s: dict[str, float] = {}
        """of each target about what answering all cases once takes"""

    def run(
        self, targets: Sequence[ModelFile], drafts: Sequence[ModelFile], elsewhere: Elsewhere | None = None
    ) -> None:
        """Do what has no row yet. Raises what is wrong with the targets where none can be loaded."""
        targets = self._in_library(targets, drafts)
        self._check_files([*targets, *drafts])
        if elsewhere is not None:
            elsewhere(self, targets, drafts)
        else:
            self._run_here(targets, drafts)
        if len(self.failures) == len(targets):
            raise self.failures[0]

    def _run_here(self, targets: Sequence[ModelFile], drafts: Sequence[ModelFile]) -> None:
        waiting = [file for file in targets if not self.is_done(file)]
        if self.plan.minutes is not None:
            least_s = sum(map(self._certain_s, waiting))
            self._check_minutes(least_s, "reading the weights for every token alone takes at least {}")
        tokens = sum(case.max_tokens for case in self._cases)
        self._answer_s = {file.name: tokens * file.card.file_bytes / _BYTES_PER_S for file in waiting}
        self._expect(waiting, drafts)
        for place, file in enumerate(waiting):
            self._target(file, waiting[place + 1 :], drafts)

    def _in_library(self, targets: Sequence[ModelFile], drafts: Sequence[ModelFile]) -> list[ModelFile]:
        """The targets under the plan's backend; where heads draft, "auto" is the one that runs them."""
        backend = self.plan.backend
        pairs = [(target, draft) for target in targets for draft in self.drafts_of(target, drafts)]
        heads = [
            draft for target, draft in pairs if draft.is_head and not why_no_head(draft.card, target.card)
        ]
        if heads and backend == "auto" and not self.plan.library:
            backend, holds = "llama.cpp", f"{heads[0].name} holds {HEADS[heads[0].card.kind]}"
            self.skip("other libraries than llama.cpp", f"{holds}, which it alone runs")
        return [replace(target, backend=backend) for target in targets]

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

    def _target(self, file: ModelFile, later: Sequence[ModelFile], drafts: Sequence[ModelFile]) -> None:
        self.meter.say("loading", file.name)
        try:
            target, row = self.loader.target(file)
        except (ModelFileError, BackendError) as error:
            self.failures.append(error)
            self.skip(file.name, f"it could not be loaded: {error.why}")
            self.meter.expect(file.name, 0)
            return
        rows, append = self.store.rows, self.store.append
        with closing(target):
            work = TargetWork(self.plan, self.workloads, self.loader, file, target, rows, append, self.meter)
            work.note_model(row)

            def known(answer: AnswerRow) -> None:
                self._scale(file, answer)
                least_s = sum(self._least_s(file, drafts) for file in [file, *later])
                self._check_minutes(
                    least_s, "it takes at least {} to run anything for real with every target"
                )
                self._expect([file, *later], drafts)

            find_out(work, self.drafts_of(file, drafts), lambda: self._share_s(later, drafts), known)

    def is_done(self, file: ModelFile, machine: str = "") -> bool:
        done = (row for row in self.store.rows if isinstance(row, DoneRow) and row.machine == machine)
        return any(row.target == file.name and row.repetitions >= self.plan.repetitions for row in done)

    # How long it takes

    @property
    def _cases(self) -> list[Case]:
        return [case for workload in self.workloads for case in cases_of(workload)]

    def left_s(self) -> float:
        """What is left of the plan's minutes; without a limit infinity."""
        minutes = self.plan.minutes
        return math.inf if minutes is None else 60 * minutes - (perf_counter() - self.started_s)

    def _scale(self, file: ModelFile, answer: AnswerRow) -> None:
        """Guess from a first answer what all take, of this target and by their sizes of others."""
        token_s = answer.decode_s / max(len(answer.tokens), 1)
        took_s = sum(case.max_tokens * token_s + answer.prefill_s for case in self._cases)
        scale = took_s / max(self._answer_s[file.name], 1e-9)
        self._answer_s = {name: seconds * scale for name, seconds in self._answer_s.items()}
        self.meter.is_known = True

    def _missing_share(self, file: ModelFile) -> float:
        answered = sum(isinstance(row, AnswerRow) and row.target == file.name for row in self.store.rows)
        return 1 - answered / len(self._cases)

    def _has_run(self, file: ModelFile) -> bool:
        return any(isinstance(row, BlockRow) and row.target == file.name for row in self.store.rows)

    def _certain_s(self, file: ModelFile) -> float:
        """What a target takes for certain, by its size alone: the weights that are read while all cases are
        answered to their limits, once to record them and once for real."""
        options = self.plan.load_options(file.backend)
        is_on_gpu = any(library.uses_gpu(options) for library in candidates(options))
        rate = _MOST_BYTES_PER_S["gpu"] if is_on_gpu else _MOST_BYTES_PER_S["core"] * physical_cores()
        read = sum(case.max_tokens for case in self._cases) * file.card.bytes_per_token
        return (self._missing_share(file) + (not self._has_run(file))) * read / rate

    def _least_s(self, file: ModelFile, drafts: Sequence[ModelFile]) -> float:
        """What a target takes at least, beside what is there: answers, costs, drafts scored, and plain
        decoding and one setting once for real."""
        answer_s = self._answer_s[file.name]
        timed = {
            row.model
            for row in self.store.rows
            if isinstance(row, CostsRow) and file.name in (row.model, row.beside)
        }
        missing = [draft for draft in self._alike(file, drafts) if draft.name not in timed]
        return (
            answer_s * self._missing_share(file)
            + (answer_s * _SCORED_SHARE + 2 * _MODEL_S) * len(missing)
            + (0.0 if file.name in timed else _MODEL_S)
            + (0.0 if self._has_run(file) else answer_s * (1 + _RUN_SHARE))
        )

    def _check_minutes(self, least_s: float, why: str) -> None:
        """Raises SettingError where there is no time for real runs of every target."""
        if least_s <= self.left_s():
            return
        minutes = math.ceil((perf_counter() - self.started_s + least_s) / 60)
        way_out = f"Give --minutes {minutes} or more, or fewer models, prompts (--prompts) or tokens (-n)."
        raise SettingError(f"--minutes {self.plan.minutes:g}", why.format(minutes), way_out)

    def _share_s(self, later: Sequence[ModelFile], drafts: Sequence[ModelFile]) -> float:
        """What a target's real runs may take: what is left is divided evenly, but for what later targets take
        at least before they run."""
        reserved_s = sum(self._least_s(file, drafts) for file in later)
        return max(self.left_s() - reserved_s, 0.0) / (1 + len(later))

    def _alike(self, file: ModelFile, drafts: Sequence[ModelFile]) -> list[ModelFile]:
        mine = self.drafts_of(file, drafts)
        return [draft for draft in mine if draft.card.tokenizer == file.card.tokenizer]

    def _expect(self, files: Sequence[ModelFile], drafts: Sequence[ModelFile]) -> None:
        """Tell the meter what these targets take: of the first, once it answers, by what is done."""
        for place, file in enumerate(files):
            answer_s, alike = self._answer_s[file.name], self._alike(file, drafts)
            runs = self.plan.repetitions * ((self.plan.finalists + 2) * (1 + len(alike)) + 1)
            parts = {f"score {draft.name}": answer_s * _SCORED_SHARE for draft in alike}
            parts |= {"record": answer_s, "measure": answer_s * _RUN_SHARE * runs}
            is_begun = place == 0 and self.meter.is_known
            self.meter.expect(file.name, 0 if is_begun else sum(parts.values()))
            for part, seconds in parts.items() if is_begun else ():
                self.meter.expect(part, seconds)

    def _tell(self, now: Progress) -> None:
        if now.left_s is not None and now.left_s > self.left_s():
            now = replace(now, left_s=max(self.left_s(), 0.0))
        self.progress(now)


# What it is measured on: the head of its rows.


def head_row(plan: SweepPlan, workloads: Sequence[Workload]) -> HeadRow:
    """Machine, library build, plan, and which prompts its workloads held."""
    memory_bytes = total_bytes()
    facts: dict[str, Any] = {
        **machine(),
        "physical_cores": physical_cores(),
        "devices": list(device_names()),
        "memory_bytes": int(memory_bytes) if math.isfinite(memory_bytes) else None,
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
    source = Path(__file__).resolve().parents[4]
    if not (source / ".git").exists():
        return None
    command = ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None
