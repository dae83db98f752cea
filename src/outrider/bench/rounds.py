"""Real runs of one target: blocks until every interval is tight, with all drafts loaded that fit together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from outrider.bench.measure import Block, Entry, Rival, run_block
from outrider.bench.plan import Plan
from outrider.bench.results import Cell, Results
from outrider.bench.stages import Loader, Stages
from outrider.bench.summary.speeds import measured_speedup
from outrider.core.errors import BackendError, ModelFileError
from outrider.lab.loaded import LoadedDraft, LoadedTarget
from outrider.lab.progress import Meter
from outrider.lab.rows import BlockRow, PairRow, PredictionRow, RunRow, SkippedRow
from outrider.lab.settings import PLAIN, Setting


class Rounds:
    """The real runs of what was chosen. `rivals` are other engines that are ready to be asked."""

    def __init__(
        self,
        plan: Plan,
        stages: Stages,
        loader: Loader,
        meter: Meter,
        rivals: Sequence[Rival] = (),
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._plan = plan
        self._stages = stages
        self._loader = loader
        self._meter = meter
        self._rivals = rivals
        self._lost: set[str] = set()
        """rivals that failed"""
        self._is_over = is_over
        self._ledger = stages.ledger
        self._target: LoadedTarget = stages.target
        self._drafts: dict[str, LoadedDraft] = {}
        self._left = 0

    def run(self) -> bool:
        """Repeat blocks over all workloads until the least number is done, and on until the intervals are
        tight or the most are done. False when the time was over before."""
        workloads = self._all()
        with ExitStack() as stack:
            self._load(stack)
            for repetition in range(self._plan.repetitions_most):
                for number, workload in enumerate(workloads):
                    if self._is_done(workload, repetition):
                        continue
                    if self._is_over():
                        return False
                    self._expect(workloads[number:], repetition)
                    self._block(workload, repetition)
        self._meter.expect("measure", 0)
        return True

    def _load(self, stack: ExitStack) -> None:
        """Every draft model that something chosen needs and that can be loaded beside the others."""
        wanted = {
            row.draft for row in self._ledger.choices() if row.draft and (row.finalists or row.controls)
        }
        for name in [name for name in self._stages.drafts if name in wanted]:
            self._meter.say("loading", name)
            what = f"real runs of {name} for {self._target.name}"
            try:
                loaded = self._loader.draft(self._stages.drafts[name], self._target)
            except (ModelFileError, BackendError) as error:  # all of them at once take more memory
                self._ledger.skip(what, f"it could not be loaded: {error.why}")
                continue
            if isinstance(loaded, PairRow):  # it did line up before
                self._ledger.skip(what, loaded.why_not or "it does not line up")
                continue
            self._drafts[name] = loaded[0]
            stack.callback(loaded[0].close)

    # Is there more to do?

    def _is_done(self, workload: str, repetition: int) -> bool:
        if self._has(workload, repetition):
            return True
        if repetition < max(self._plan.repetitions_least, 2):  # a single one has no spread to look at
            return False
        return self._is_tight(workload)

    def _has(self, workload: str, repetition: int) -> bool:
        return bool(self._ledger.of(BlockRow, block=self._id(workload, repetition)))

    def _is_tight(self, workload: str) -> bool:
        """Whether the speed-ups of all settings that ran are known as well as asked for."""
        results = Results.of(self._ledger.rows)
        for draft, setting in self._entries(workload):
            if setting == PLAIN:
                continue
            cell = Cell(self._target.name, draft, setting.name, workload)
            found = measured_speedup(results, cell, draw_cases=False)
            if found is not None and found.half_width_ratio > self._plan.interval_ratio:
                return False
        return True

    # One block

    def _id(self, workload: str, repetition: int) -> str:
        return f"{self._target.name} | {workload} | {repetition + 1}"

    def _entries(self, workload: str) -> list[tuple[str | None, Setting]]:
        found: list[tuple[str | None, Setting]] = [(None, PLAIN)]
        for row in self._ledger.choices():
            if row.workload == workload and (row.draft is None or row.draft in self._drafts):
                found += [(row.draft, Setting.of(name)) for name in (*row.finalists, *row.controls)]
        return list(dict.fromkeys(found))

    def _block(self, workload: str, repetition: int) -> None:
        entries = [
            Entry(setting, self._drafts[draft] if draft else None, self._ledger.prices(draft))
            for draft, setting in self._entries(workload)
        ]
        cases = self._ledger.cases(workload)
        block = Block(
            id=self._id(workload, repetition),
            workload=workload,
            repetition=repetition,
            cases=cases,
            answered=self._ledger.answered(workload),
            entries=entries,
            rivals=self._rivals,
            lost=self._lost,
            seed=self._plan.seed,
        )
        total = len(cases) * (len(entries) + len(self._rivals))
        for number, row in enumerate(run_block(self._target, block)):
            if isinstance(row, SkippedRow):
                self._ledger.skip(row.what, row.why)
                continue
            self._ledger.append(row)
            if isinstance(row, RunRow):
                self._meter.did("measure", 1 / max(self._left - number, 1))
                where = f"{self._target.name}: {workload}, round {repetition + 1}, {number + 1} of {total}"
                self._meter.say("running", where)
        self._left -= total

    def _expect(self, workloads: Sequence[str], repetition: int) -> None:
        """What the blocks that are certain to come will take."""
        seconds, runs = 0.0, 0
        predicted = {
            (row.draft, row.setting, row.workload): sum(case.seconds for case in row.cases)
            for row in self._ledger.of(PredictionRow, target=self._target.name)
        }
        for later in range(repetition, max(self._plan.repetitions_least, repetition + 1)):
            for workload in workloads if later == repetition else self._all():
                entries = self._entries(workload)
                seconds += sum(predicted.get((draft, s.name, workload), 0.0) for draft, s in entries)
                seconds += sum(answer.prefill_s for _, answer in self._ledger.cases(workload))
                runs += len(self._ledger.cases(workload)) * (len(entries) + len(self._rivals))
        self._left = runs
        self._meter.expect("measure", seconds)

    def _all(self) -> list[str]:
        return list(dict.fromkeys(row.workload for row in self._ledger.choices()))
