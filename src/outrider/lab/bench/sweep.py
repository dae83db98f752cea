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

from outrider.backends.gguf.libraries import device_names
from outrider.backends.machine import physical_cores, total_bytes
from outrider.core.errors import BackendError, ModelFileError, OutriderError, SettingError
from outrider.lab.bench.loader import Loader
from outrider.lab.bench.plan import SweepPlan
from outrider.lab.bench.quality import families
from outrider.lab.bench.results import Results
from outrider.lab.bench.runs import RealRuns
from outrider.lab.bench.store import Store
from outrider.lab.bench.target import TargetWork
from outrider.lab.machine import machine, versions
from outrider.lab.models import OWN_HEAD, ModelFile, own_head, under_backends, usable_backends
from outrider.lab.progress import Meter, Progress
from outrider.lab.prompts import Workload
from outrider.lab.record import cases_of
from outrider.lab.rows import AnswerRow, BlockRow, CostsRow, DoneRow, HeadRow, ModelRow, SkippedRow
from outrider.lab.workloads import load_workload
from outrider.models.gguf import HEADS, check_whole
from outrider.models.hub import HubOptions
from outrider.session.drafts import why_no_head

_BYTES_PER_S = 8e9
"""of weights that a step reads, as long as nothing is measured"""
_SCORED_SHARE = 0.5
"""Scoring a draft takes about so much of recording the answers."""
_RUN_SHARE = 0.7
"""A real run of a setting takes about so much of recording the answers."""
_MODEL_S = 8.0
"""Loading a model and measuring its calls."""


def run_sweep(
    plan: SweepPlan,
    folder: Path,
    *,
    hub: HubOptions | None = None,
    progress: Callable[[Progress], None] = lambda _progress: None,
    loader: Loader | None = None,
    elsewhere: Callable[[Sweep, Sequence[ModelFile], Sequence[ModelFile]], None] | None = None,
) -> Results:
    """Run `plan`, or go on with the run that is in `folder`; the rows that are there in the end.

    The work on the targets is done here, one after the other, or `elsewhere`, which is given the sweep, its
    targets and its drafts. A model that cannot be loaded is left out, and a row says so. Raises SettingError
    for a folder that holds another run and for minutes that are too few, and what is wrong with the models'
    files where no target is left.
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
    relatives: dict[str, str] = field(default_factory=dict)
    """of each target the one that it is a quantization of, or itself"""
    failures: list[OutriderError] = field(default_factory=list)
    """of targets that could not be loaded"""

    def __post_init__(self) -> None:
        self.meter = Meter(self._tell)
        self._answer_s: dict[str, float] = {}
        """of each target about what answering all cases once takes"""

    def run(
        self,
        targets: Sequence[ModelFile],
        drafts: Sequence[ModelFile],
        elsewhere: Callable[[Sweep, Sequence[ModelFile], Sequence[ModelFile]], None] | None = None,
    ) -> None:
        """Do what has no row yet. Raises what is wrong with the targets where none can be loaded."""
        pairs = [(target, draft) for target in targets for draft in self.drafts_of(target, drafts)]
        heads = [
            draft for target, draft in pairs if draft.is_head and not why_no_head(draft.card, target.card)
        ]
        backends = self._backends(heads, is_here=elsewhere is None)
        ordered = self._under_backends(families(targets), backends)
        self._check_files([*ordered, *drafts])
        if elsewhere is not None:
            elsewhere(self, ordered, drafts)
        else:
            self._run_here(ordered, drafts)
        if len(self.failures) == len(ordered):
            raise self.failures[0]

    def _run_here(self, targets: Sequence[ModelFile], drafts: Sequence[ModelFile]) -> None:
        waiting = [file for file in targets if not self.is_done(file)]
        tokens = sum(case.max_tokens for workload in self.workloads for case in cases_of(workload))
        for file in waiting:
            self._answer_s[file.name] = tokens * file.card.file_bytes / _BYTES_PER_S
            alike = len(_alike(file, self.drafts_of(file, drafts)))
            self.meter.expect(file.name, self._answer_s[file.name] * (1 + _RUN_SHARE * self._runs(alike)))
        for place, file in enumerate(waiting):
            self._target(file, waiting[place + 1 :], drafts)

    def _backends(self, heads: Sequence[ModelFile], *, is_here: bool) -> Sequence[str]:
        """Those of the plan that are here; a row names each that is not. One alone is left to the loading,
        which says what is wrong with it; where heads draft, "auto" is the one that runs them. The nodes of a
        cluster have said what they have. Raises BackendError where there is none."""
        if heads and self.plan.backends == ("auto",) and not self.plan.library:
            holds = f"{heads[0].name} holds {HEADS[heads[0].card.kind]}"
            self.skip("other libraries than llama.cpp", f"{holds}, which it alone runs")
            return ("llama.cpp",)
        if len(self.plan.backends) == 1 or not is_here:
            return self.plan.backends
        usable, refused = usable_backends(self.plan.backends, self.loader.check_backend)
        for backend, error in refused.items():
            self.skip(f"backend {backend}", error.why)
        return usable

    def _under_backends(
        self, groups: Sequence[Sequence[ModelFile]], backends: Sequence[str]
    ) -> list[ModelFile]:
        """Every target under each backend. Quality is compared under the first of them alone: it is the
        file's."""
        several = len(self.plan.backends) > 1
        for group in groups:
            alike = under_backends(group, backends[:1], several=several)
            self.relatives |= {model.name: alike[0].name for model in alike}
        return [model for group in groups for model in under_backends(group, backends, several=several)]

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
        mine = self.drafts_of(file, drafts)
        with closing(target):
            work = TargetWork(
                self.plan,
                self.workloads,
                self.loader,
                file,
                target,
                self.store.rows,
                self.store.append,
                self.meter,
            )
            work.note_model(row)

            def known(answer: AnswerRow) -> None:
                self._scale(file, answer)
                self._check_minutes([file, *later], drafts)

            has_answers = work.record(known)
            self._expect_stages(work, mine)
            if not has_answers:
                self.store.append(DoneRow(target=file.name, repetitions=self.plan.repetitions))
                return
            work.measure_target()
            if self.plan.quality:
                reference, is_compared = self.reference_of(file)
                work.quality(self.references, reference, is_compared=is_compared)
            work.score(mine)
            work.replay()
            end_s = perf_counter() + self._share_s(later, drafts)
            RealRuns(work, lambda: end_s - perf_counter()).run()

    def is_done(self, file: ModelFile, machine: str = "") -> bool:
        done = (row for row in self.store.rows if isinstance(row, DoneRow) and row.machine == machine)
        return any(row.target == file.name and row.repetitions >= self.plan.repetitions for row in done)

    @property
    def references(self) -> Path:
        return self.store.folder / "references"

    def reference_of(self, file: ModelFile) -> tuple[str, bool]:
        """The target whose texts this one is scored on, and whether another one is scored on them."""
        reference = self.relatives.get(file.name, file.name)
        return reference, any(
            other != reference for other, best in self.relatives.items() if best == reference
        )

    # How long it takes

    def left_s(self) -> float:
        """What is left of the plan's minutes; without a limit infinity."""
        minutes = self.plan.minutes
        return math.inf if minutes is None else 60 * minutes - (perf_counter() - self.started_s)

    def _scale(self, file: ModelFile, answer: AnswerRow) -> None:
        """Guess from a first answer what all take, of this target and by their sizes of others."""
        cases = [case for workload in self.workloads for case in cases_of(workload)]
        token_s = answer.decode_s / max(len(answer.tokens), 1)
        took_s = sum(case.max_tokens * token_s + answer.prefill_s for case in cases)
        scale = took_s / max(self._answer_s[file.name], 1e-9)
        self._answer_s = {name: seconds * scale for name, seconds in self._answer_s.items()}

    def _least_s(self, file: ModelFile, drafts: Sequence[ModelFile]) -> float:
        """What a target takes at least, beside what is there: answers, costs, drafts scored, and plain
        decoding and one setting once for real."""
        rows, answer_s = self.store.rows, self._answer_s[file.name]
        cases = sum(len(cases_of(workload)) for workload in self.workloads)
        answered = sum(isinstance(row, AnswerRow) and row.target == file.name for row in rows)
        timed = {
            row.model for row in rows if isinstance(row, CostsRow) and file.name in (row.model, row.beside)
        }
        missing = [draft for draft in _alike(file, self.drafts_of(file, drafts)) if draft.name not in timed]
        has_run = any(isinstance(row, BlockRow) and row.target == file.name for row in rows)
        return (
            answer_s * (1 - answered / cases)
            + (answer_s * _SCORED_SHARE + 2 * _MODEL_S) * len(missing)
            + (0.0 if file.name in timed else _MODEL_S)
            + (0.0 if has_run else answer_s * (1 + _RUN_SHARE))
        )

    def _check_minutes(self, waiting: Sequence[ModelFile], drafts: Sequence[ModelFile]) -> None:
        """Raises SettingError where there is no time for real runs of every target."""
        least_s = sum(self._least_s(file, drafts) for file in waiting)
        if least_s <= self.left_s():
            return
        minutes = math.ceil((perf_counter() - self.started_s + least_s) / 60)
        why = f"it takes at least {minutes} to run anything for real with every target"
        way_out = f"Give --minutes {minutes} or more, or fewer models, prompts (--prompts) or tokens (-n)."
        raise SettingError(f"--minutes {self.plan.minutes:g}", why, way_out)

    def _share_s(self, later: Sequence[ModelFile], drafts: Sequence[ModelFile]) -> float:
        """What a target's real runs may take: what is left is divided evenly, but for what later targets take
        at least before they run."""
        reserved_s = sum(self._least_s(file, drafts) for file in later)
        return max(self.left_s() - reserved_s, 0.0) / (1 + len(later))

    def _runs(self, num_drafts: int) -> int:
        """How often every case is answered for real."""
        return self.plan.repetitions * ((self.plan.finalists + 2) * (1 + num_drafts) + 1)

    def _expect_stages(self, work: TargetWork, drafts: Sequence[ModelFile]) -> None:
        """Better guesses, now that the target's speed is known."""
        self.meter.known()
        answers_s = sum(answer.prefill_s + answer.decode_s for _, answer in work.cases())
        alike = _alike(work.file, drafts)
        for draft in alike:
            self.meter.expect(f"score {draft.name}", answers_s * _SCORED_SHARE)
        self.meter.expect("measure", answers_s * _RUN_SHARE * self._runs(len(alike)))
        self.meter.expect(work.name, 0)

    def _tell(self, now: Progress) -> None:
        """Pass on how far it is; it ends with the plan's minutes."""
        if now.left_s is not None and now.left_s > self.left_s():
            now = replace(now, left_s=max(self.left_s(), 0.0))
        self.progress(now)


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
