"""The sweep: target by target, record once, replay everything, run the finalists for real.

Everything that was found out is a row in the run's folder, so a run that was interrupted goes on where it
was; a block of real runs that was interrupted is run again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from outrider.backends.gguf import physical_cores
from outrider.bench.contestants import Contestant, ContestantError
from outrider.bench.ledger import MIN_TOKENS, Ledger
from outrider.bench.loader import LlamaCppLoader
from outrider.bench.machine import head_row
from outrider.bench.plan import SweepPlan
from outrider.bench.quality import families, quality_of, save_reference
from outrider.bench.results import Results
from outrider.bench.rounds import Rival, Rounds
from outrider.bench.stages import Loader, Stages
from outrider.bench.store import Store
from outrider.core.errors import BackendError, InputError, ModelFileError, OutriderError, SettingError
from outrider.lab.models import OWN_HEAD, ModelFile, own_head, under_backends, usable_backends
from outrider.lab.progress import Meter, Progress
from outrider.lab.prompts import Workload
from outrider.lab.record import cases_of
from outrider.lab.rows import AnswerRow, DoneRow, ModelRow, QualityRow, SkippedRow
from outrider.lab.workloads import load_workload
from outrider.models.hub import HubOptions

__all__ = ["Progress", "run_sweep"]

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
) -> Results:
    """Run `plan`, or go on with the run that is in `folder`; the rows that are there in the end.

    A model that cannot be loaded is left out, and a row says so. Raises SettingError for a folder that holds
    another run, and what is wrong with the models' files where no target is left.
    """
    workloads = [load_workload(spec) for spec in plan.workloads]
    loading = loader or LlamaCppLoader(plan, workloads, hub or HubOptions())
    targets = loading.find(plan.targets)
    drafts = loading.find([name for name in plan.drafts if name != OWN_HEAD], targets)
    with Store.open(folder, head_row(plan, workloads)) as store:
        sweep = _Sweep(plan, store, loading, workloads, Meter(progress), perf_counter())
        sweep.run(targets, drafts)
        return Results.of(store.rows)


@dataclass
class _Sweep:
    plan: SweepPlan
    store: Store
    loader: Loader
    workloads: Sequence[Workload]
    meter: Meter
    started_s: float
    relatives: dict[str, str] = field(default_factory=dict)
    """of each target the one that it is a quantization of, or itself"""
    failures: list[OutriderError] = field(default_factory=list)
    """of targets that could not be loaded"""

    def run(self, targets: Sequence[ModelFile], drafts: Sequence[ModelFile]) -> None:
        ordered = self._under_backends(families(targets, self.plan.references))
        self._check_files([*ordered, *drafts])
        done = {row.target for row in self.store.rows if isinstance(row, DoneRow)}
        waiting = [file for file in ordered if file.name not in done]
        for file in waiting:
            self._expect(file, self._drafts(file, drafts))
        for file in waiting:
            self._target(file, self._drafts(file, drafts))
        if len(self.failures) == len(ordered):
            raise self.failures[0]

    def _under_backends(self, groups: Sequence[Sequence[ModelFile]]) -> list[ModelFile]:
        """Every target under each backend that is here. Quality is compared under the first of them alone: it
        is the file's.

        Raises BackendError where none is here.
        """
        backends, several = self._backends(), len(self.plan.backends) > 1
        for group in groups:
            alike = under_backends(group, backends[:1], several=several)
            self.relatives |= {model.name: alike[0].name for model in alike}
        return [model for group in groups for model in under_backends(group, backends, several=several)]

    def _backends(self) -> Sequence[str]:
        """Those of the plan that are here; a row names each that is not. One alone is left to the loading,
        which says what is wrong with it. Raises BackendError where there is none."""
        if len(self.plan.backends) == 1:
            return self.plan.backends
        usable, refused = usable_backends(self.plan.backends, self.loader.check_backend)
        for backend, error in refused.items():
            self._skip(f"backend {backend}", error.why)
        return usable

    def _skip(self, what: str, why: str) -> None:
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

    def _drafts(self, file: ModelFile, drafts: Sequence[ModelFile]) -> list[ModelFile]:
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
            self._skip(file.name, f"it could not be loaded: {error.why}")
            self.meter.expect(f"later {file.name}", 0)
            return
        with closing(target):
            ledger = Ledger(self.store, target, self.workloads)
            ledger.note_model(row)
            stages = Stages(self.plan, ledger, self.loader, self.meter)
            stages.record()
            self._expect_stages(stages, file, drafts)
            if not stages.ledger.all_cases():
                ledger.skip(file.name, f"it answered none of the prompts with {MIN_TOKENS} tokens or more")
                self.store.append(DoneRow(target=file.name))
                return
            stages.measure_target()
            if self.plan.quality:
                self._quality(stages, target.name, self.relatives.get(file.name, file.name))
            self._score(stages, file, drafts)
            for name in [*([None] if self.plan.lookup_only or not stages.can_draft else []), *stages.drafts]:
                stages.predict(name)
            for draft in drafts:
                self.meter.expect(f"replay {draft.name}", 0)
            with ExitStack() as stack:
                rivals: list[Rival] = [*self._rivals(stack, stages, file, drafts)]
                if Rounds(stages, rivals, self._is_over).run():
                    self.store.append(DoneRow(target=file.name))

    def _score(self, stages: Stages, file: ModelFile, drafts: Sequence[ModelFile]) -> None:
        """Score the drafts that the target can have."""
        if not stages.can_draft:
            why = "it cannot take tokens back (recurrent or hybrid state): it decodes plainly"
            stages.ledger.skip(f"drafts and lookup for {file.name}", why)
        if OWN_HEAD in self.plan.drafts and file.card.own_head is None:
            stages.ledger.skip(f"{OWN_HEAD} for {file.name}", "its file has no head of its own")
        for draft in drafts:
            if draft.fingerprint == file.fingerprint and not draft.is_head:
                stages.ledger.skip(f"{draft.name} for {file.name}", "it is the target itself")
            elif stages.can_draft:
                stages.score(draft)
            self.meter.expect(f"score {draft.name}", 0)
        if stages.can_draft and not stages.drafts and not self.plan.lookup_only:
            stages.ledger.skip(f"real runs of {file.name}", "no draft is left, and lookup_only is off")

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

    def _quality(self, stages: Stages, target: str, reference: str) -> None:
        """Keep a reference's distributions, or compare with them: one pass over its texts."""
        folder = self.store.folder / "references" / re.sub(r"[^\w.-]+", "_", reference)
        answers = [row for row in self.store.rows if isinstance(row, AnswerRow) and row.target == reference]
        self.meter.say("scoring", f"{target} as a quantization of {reference}")
        try:
            if target == reference:
                if any(other != target for other, ref in self.relatives.items() if ref == reference):
                    save_reference(stages.target.model, folder, answers, name=reference)
                return
            known = {(row.workload, row.case) for row in stages.ledger.of(QualityRow)}
            missing = [row for row in answers if (row.workload, row.case) not in known]
            for found in quality_of(stages.target.model, folder, missing, name=target):
                self.store.append(found)
        except (InputError, BackendError) as error:
            stages.ledger.skip(f"quality of {target}", f"{error.what}: {error.why}")

    def _is_over(self) -> bool:
        minutes = self.plan.minutes
        return minutes is not None and perf_counter() - self.started_s > 60 * minutes

    def _rivals(
        self, stack: ExitStack, stages: Stages, file: ModelFile, drafts: Sequence[ModelFile]
    ) -> Iterator[Contestant]:
        """Other engines that start; one that needs a draft model is started with each."""
        for spec in self.plan.contestants:
            wanting = spec.command is not None and "{draft}" in spec.command
            usable = [draft for draft in drafts if draft.name in stages.drafts and not draft.is_head]
            if wanting and not usable:
                what = f"{spec.name} with {file.name}"
                stages.ledger.skip(what, "its command wants a draft model, and there is none for this target")
            for draft in usable if wanting else [None]:
                name = spec.name if draft is None or len(usable) == 1 else f"{spec.name} ({draft.name})"
                self.meter.say("starting", name)
                try:
                    engine = Contestant.open(
                        spec,
                        file.path,
                        None if draft is None else draft.path,
                        context=stages.target.model.context_length,
                        threads=self.plan.threads or physical_cores(),
                    )
                except ContestantError as error:
                    lines = [line.strip() for line in error.way_out.splitlines() if line.strip()]
                    last = lines[-1] if lines else "no more is known"
                    stages.ledger.skip(f"{name} with {file.name}", f"{error.why} ({last})")
                    continue
                engine.name = name
                yield stack.enter_context(engine)


def _alike(target: ModelFile, drafts: Sequence[ModelFile]) -> list[ModelFile]:
    """The drafts with the target's tokenizer."""
    return [draft for draft in drafts if draft.card.tokenizer == target.card.tokenizer]
