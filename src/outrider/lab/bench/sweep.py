"""The sweep: target by target, record once, replay everything, run the finalists for real.

Everything that was found out is a row in the run's folder, so a run that was interrupted goes on where it
was; a block of real runs that was interrupted is run again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

from outrider.backends.gguf.libraries import candidates, device_names
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
from outrider.lab.record import cases_of
from outrider.lab.rows import AnswerRow, BlockRow, CostsRow, DoneRow, HeadRow, ModelRow, SkippedRow
from outrider.lab.subject import Progress, Subject
from outrider.models.gguf import HEADS, check_whole
from outrider.session.loading import why_no_head

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
    loader: Loader,
    *,
    progress: Callable[[Progress], None] = lambda _progress: None,
    elsewhere: Elsewhere | None = None,
) -> Results:
    """Run `plan`, or go on with the run that is in `folder`; the rows that are there in the end.

    The work on the targets is done here, one after the other, or `elsewhere`. A model that cannot be loaded
    is left out, and a row says so. Raises SettingError for a folder that holds another run and for minutes
    that are too few, and what is wrong with the models' files where no target is left.
    """
    workloads = plan.workloads()
    targets = loader.find(plan.targets)
    for target in targets:
        check_whole(target.card)
    drafts = loader.find([name for name in plan.drafts if name != OWN_HEAD], targets)
    with Store.open(folder, head_row(plan, workloads, loader.options)) as store:
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
    progress: Callable[[Progress], None]
    started_s: float = field(default_factory=lambda: perf_counter())
    failures: list[OutriderError] = field(default_factory=list)
    """of targets that could not be loaded"""

    def __post_init__(self) -> None:
        self._limits = [case.max_tokens for workload in self.workloads for case in cases_of(workload)]
        """of all answers, in tokens"""
        self._byte_s = 1 / _BYTES_PER_S
        """what a byte of weights takes that is read for a token"""

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
        for place, file in enumerate(waiting):

            def tell(now: Progress, place: int = place) -> None:
                self.progress(replace(now, done=(place + now.done) / len(waiting)))

            self._target(file, waiting[place + 1 :], drafts, tell)

    def _in_library(self, targets: Sequence[ModelFile], drafts: Sequence[ModelFile]) -> list[ModelFile]:
        """The targets under the backend that was asked for; where heads draft, "auto" is the one that runs
        them."""
        backend = self.loader.options.backend
        pairs = [(target, draft) for target in targets for draft in self.drafts_of(target, drafts)]
        heads = [
            draft for target, draft in pairs if draft.is_head and not why_no_head(draft.card, target.card)
        ]
        if heads and backend == "auto" and not self.loader.options.library:
            backend, holds = "llama.cpp", f"{heads[0].name} holds {HEADS[heads[0].card.kind]}"
            self.skip("other libraries than llama.cpp", f"{holds}, which it alone runs")
        return [replace(target, backend=backend) for target in targets]

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
        later: Sequence[ModelFile],
        drafts: Sequence[ModelFile],
        tell: Callable[[Progress], None],
    ) -> None:
        tell(Progress("loading", 0.0, file.name))
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

            def known(answer: AnswerRow) -> None:
                token_s = answer.decode_s / max(len(answer.tokens), 1)
                took_s = sum(self._limits) * token_s + len(self._limits) * answer.prefill_s
                self._byte_s = took_s / max(sum(self._limits) * file.card.file_bytes, 1)
                least_s = sum(self._least_s(file, drafts) for file in [file, *later])
                self._check_minutes(
                    least_s, "it takes at least {} to run anything for real with every target"
                )

            work = TargetWork(self.plan, subject)
            work.find_out(self.drafts_of(file, drafts), lambda: self._share_s(later, drafts), known)

    def is_done(self, file: ModelFile, machine: str = "") -> bool:
        done = (row for row in self.store.rows if isinstance(row, DoneRow) and row.machine == machine)
        return any(row.target == file.name and row.repetitions >= self.plan.repetitions for row in done)

    # How long it takes

    def left_s(self) -> float:
        """What is left of the plan's minutes; without a limit infinity."""
        minutes = self.plan.minutes
        return math.inf if minutes is None else 60 * minutes - (perf_counter() - self.started_s)

    def _missing_share(self, file: ModelFile) -> float:
        answered = sum(isinstance(row, AnswerRow) and row.target == file.name for row in self.store.rows)
        return 1 - answered / len(self._limits)

    def _has_run(self, file: ModelFile) -> bool:
        return any(isinstance(row, BlockRow) and row.target == file.name for row in self.store.rows)

    def _certain_s(self, file: ModelFile) -> float:
        """What a target takes for certain, by its size alone: the weights that are read while all cases are
        answered to their limits, once to record them and once for real."""
        options = replace(self.loader.options, backend=file.backend)
        is_on_gpu = any(library.uses_gpu(options) for library in candidates(options))
        rate = _MOST_BYTES_PER_S["gpu"] if is_on_gpu else _MOST_BYTES_PER_S["core"] * physical_cores()
        read = sum(self._limits) * file.card.bytes_per_token
        return (self._missing_share(file) + (not self._has_run(file))) * read / rate

    def _least_s(self, file: ModelFile, drafts: Sequence[ModelFile]) -> float:
        """What a target takes at least, beside what is there: answers, costs, drafts scored, and plain
        decoding and one setting once for real."""
        costs = [row for row in self.store.rows if isinstance(row, CostsRow)]
        timed = {row.model for row in costs if file.name in (row.model, row.beside)}
        untimed = sum(
            draft.card.tokenizer == file.card.tokenizer and draft.name not in timed
            for draft in self.drafts_of(file, drafts)
        )
        runs = 0 if self._has_run(file) else 1 + _RUN_SHARE
        answers = self._missing_share(file) + _SCORED_SHARE * untimed + runs
        models_s = _MODEL_S * (2 * untimed + (file.name not in timed))
        return answers * sum(self._limits) * file.card.file_bytes * self._byte_s + models_s

    def _check_minutes(self, least_s: float, why: str) -> None:
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


# What it is measured on: the head of its rows.


def head_row(plan: SweepPlan, workloads: Sequence[Workload], options: LoadOptions) -> HeadRow:
    """Machine, library build, plan with how targets are loaded, and which prompts its workloads held."""
    memory_bytes = total_bytes()
    facts: dict[str, Any] = {
        **machine(),
        "physical_cores": physical_cores(),
        "devices": list(device_names()),
        "memory_bytes": int(memory_bytes) if math.isfinite(memory_bytes) else None,
        **versions(version("outrider")),
    }
    started = datetime.now(UTC).isoformat(timespec="seconds")
    prompts = {workload.name: _digest(workload) for workload in workloads}
    asked = plan.model_dump(mode="json") | {"loading": asdict(options)}
    return HeadRow(started=started, machine=facts, plan=asked, prompts=prompts)


def _digest(workload: Workload) -> str:
    return blake2b(repr(workload.prompts).encode(errors="backslashreplace"), digest_size=12).hexdigest()
