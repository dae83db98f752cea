"""The stages of a sweep for one target: answers, costs, drafts scored, predictions, choices.

Every stage writes rows, and does only what has no row yet: that is how a run goes on where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from statistics import geometric_mean
from typing import Any, Protocol

from outrider.core.errors import BackendError, ConstraintError, GrammarError, ModelFileError, PromptError
from outrider.costs import CallCosts
from outrider.lab.bench.ledger import MIN_TOKENS, Ledger
from outrider.lab.bench.plan import SweepPlan
from outrider.lab.loaded import LoadedDraft, LoadedTarget
from outrider.lab.models import ModelFile
from outrider.lab.predict import bound_s, predict, prices_of, with_policy_times
from outrider.lab.progress import Meter
from outrider.lab.record import Case, cases_of, record_case
from outrider.lab.rows import (
    AnswerRow,
    ChoiceRow,
    CostsRow,
    ModelRow,
    OffersRow,
    PairRow,
    PredictionRow,
    Role,
    SkippedRow,
)
from outrider.lab.settings import AUTO, AUTO_LOOKUP, PLAIN, Setting, grid
from outrider.lab.subject import pair_row, probe_draft, score_case, target_costs

PROBED_ANSWERS = 2
"""of each workload, after which calls of every size are timed"""
_PROBED_PLACES = (0.25, 0.5, 1.0)
"""of the cases by length of their prompts, on which the draft model is timed"""


class Loader(Protocol):
    """Finds models, loads and measures them."""

    def find(self, references: Sequence[str], taken: Sequence[ModelFile] = ()) -> list[ModelFile]:
        """The models that are meant, each once; files among `taken` keep their names."""
        ...

    def check_backend(self, backend: str) -> None:
        """Raises BackendError where no library here is of this backend."""
        ...

    def target(self, file: ModelFile) -> tuple[LoadedTarget, ModelRow]: ...

    def draft(self, file: ModelFile, target: LoadedTarget) -> tuple[LoadedDraft, ModelRow] | PairRow:
        """The draft, or the row that says why it cannot draft for this target."""
        ...

    def costs(self, model: LoadedTarget | LoadedDraft, role: Role) -> CallCosts:
        """What calls of the model cost now."""
        ...


@dataclass
class Stages:
    """Finds out what the ledger does not say about its target."""

    plan: SweepPlan
    ledger: Ledger
    loader: Loader
    meter: Meter
    measures: bool = True
    """whether calls are timed here; else what drafts offer is found out, and nothing about costs"""
    drafts: dict[str, ModelFile] = field(default_factory=dict)
    """those that line up with the target"""

    def __post_init__(self) -> None:
        self.target, self.name = self.ledger.target, self.ledger.name

    @property
    def can_draft(self) -> bool:
        """Whether the target can take rejected drafts back. One that cannot only decodes plainly."""
        return self.target.model.rewinding.is_possible

    def record(self) -> None:
        """Let the target answer every case that it has not answered."""
        cases = [case for workload in self.ledger.workloads for case in cases_of(workload)]
        for number, case in enumerate(cases):
            what = f"{self.name}: {case.workload.name} {case.id}"
            self.meter.say("recording", what)
            if not self.ledger.of(SkippedRow, what=what):
                self._record(case, what)
            self.meter.did("record", 1 / (len(cases) - number))

    def _record(self, case: Case, what: str) -> None:
        answered = self.ledger.answered(case.workload.name)
        if any(earlier not in answered for earlier in case.earlier):
            self.ledger.skip(what, "the turn before it was left out")
            return
        if (row := answered.get(case.id)) is None:
            number = cases_of(case.workload).index(case)
            offset = [w.name for w in self.ledger.workloads].index(case.workload.name) * PROBED_ANSWERS
            probe = number + offset if number < PROBED_ANSWERS else None
            seed = (case.workload.sampling.seed or 0) + number
            try:
                row = record_case(self.target, case, answered, seed=seed, probe=probe)
            except (PromptError, GrammarError, ConstraintError) as error:
                self.ledger.skip(what, f"{error.what}: {error.why}")
                return
            self.ledger.append(row)
        if len(row.tokens) < MIN_TOKENS:  # also after a run that was killed before it said so
            self.ledger.skip(what, f"its answer ends after {len(row.tokens)} tokens")

    def measure_target(self) -> None:
        """The target's cost curve, and the engine's own times."""
        if self.ledger.costs(self.name, "target") is not None:
            return
        self.meter.say("measuring calls", self.name)
        answers = [row for _, row in self.ledger.all_cases()]
        if self.ledger.machine:  # they were answered on another machine, or beside other work
            answers = self._timed_again()
        curve = self.loader.costs(self.target, "target")
        if self.plan.costs is None:  # else it is another machine's, perhaps
            curve = target_costs(curve, answers)
        scored = [case for w in self.ledger.workloads for case in self.ledger.scored(w, None)]
        prices = with_policy_times(scored, prices_of(curve, answers))
        self.ledger.append(
            CostsRow(
                model=self.name,
                role="target",
                curve=curve.as_json(),
                own_s=dict(prices.own_s),
                own_token_s=prices.own_token_s,
            )
        )

    def _timed_again(self) -> list[AnswerRow]:
        """The first answers of each workload with the calls that they take here."""
        found: list[AnswerRow] = []
        for workload in self.ledger.workloads:
            answered = self.ledger.answered(workload.name)
            for case, row in self.ledger.cases(workload)[:PROBED_ANSWERS]:
                found.append(record_case(self.target, case, answered, seed=row.seed, probe=len(found)))
        return found

    def score(self, file: ModelFile) -> None:
        """Find out whether a draft lines up, what it would have offered along the answers, and its costs."""
        pair = self.ledger.pair(file.name)
        if pair is not None and not pair.usable:
            return
        missing = self._cases(file.name, offered=False)
        costs = self.ledger.costs(file.name, "draft") if self.measures else True
        if pair is None or missing or costs is None:
            self.meter.say("scoring", f"{file.name} for {self.name}")
            try:
                loaded = self.loader.draft(file, self.target)
            except (ModelFileError, BackendError) as error:
                self.ledger.skip(f"{file.name} for {self.name}", f"it could not be loaded: {error.why}")
                return
            if isinstance(loaded, PairRow):
                self.ledger.append(loaded)
                return
            with closing(loaded[0]) as draft:
                self.ledger.note_model(loaded[1])
                if pair is None:
                    report, identical = draft.alignment.report, draft.alignment.identical
                    row = pair_row(self.name, draft.name, report, identical=identical, prior=draft.prior)
                    self.ledger.append(row)
                self._score_all(draft, missing)
                self._measure_draft(draft)
        self.drafts[file.name] = file

    def _cases(self, draft: str, *, offered: bool) -> list[tuple[Case, AnswerRow]]:
        """The cases for which it is known what a draft offers, or those for which it is not."""
        known = {(row.workload, row.case) for row in self.ledger.of(OffersRow, draft=draft)}
        return [(c, a) for c, a in self.ledger.all_cases() if ((a.workload, a.case) in known) == offered]

    def _score_all(self, draft: LoadedDraft, missing: Sequence[tuple[Case, AnswerRow]]) -> None:
        for number, (case, answer) in enumerate(missing):
            what = f"{draft.name} for {self.name}: {answer.workload} {answer.case}"
            self.meter.say("scoring", what)
            try:
                self.ledger.append(score_case(self.target, draft, case, answer))
            except (BackendError, ConstraintError) as error:
                self.ledger.skip(what, f"{error.what}: {error.why}")
            self.meter.did(f"score {draft.name}", 1 / (len(missing) - number + 1))

    def _measure_draft(self, draft: LoadedDraft) -> None:
        fitting = self._cases(draft.name, offered=True)
        if not fitting or not self.measures or self.ledger.costs(draft.name, "draft") is not None:
            return
        self.meter.say("measuring calls", draft.name)
        free = [(c, a) for c, a in fitting if c.prompt.grammar is None] or fitting
        by_length = sorted(free, key=lambda pair: len(pair[1].prompt))
        probed = [by_length[int(place * (len(by_length) - 1))] for place in _PROBED_PLACES]
        curve = self.loader.costs(draft, "draft")
        if self.plan.costs is None:
            records = probe_draft(self.target, draft, probed)
            curve = curve.corrected_by_drafts(records, self.ledger.prices(None).target)
        self.ledger.append(CostsRow(model=draft.name, role="draft", curve=curve.as_json(), beside=self.name))
        self.meter.did(f"score {draft.name}", 1)

    def predict(self, draft: str | None) -> None:
        """Replay every setting of a pair, or those of lookup alone, and choose what runs for real."""
        automatic = AUTO_LOOKUP if draft is None else AUTO
        settings, prices = self._settings(draft), self.ledger.prices(draft)
        for workload in self.ledger.workloads:
            cases = self.ledger.scored(workload, draft)
            cell: dict[str, Any] = {"draft": draft, "workload": workload.name}
            known = {row.setting for row in self.ledger.of(PredictionRow, **cell)}
            for setting in settings if cases else ():
                if setting.name in known:
                    continue
                self.meter.say("replaying", f"{self.name}, {draft or 'no draft'}: {workload.name}")
                row = PredictionRow(
                    target=self.name,
                    setting=setting.name,
                    cases=tuple(predict(cases, setting, prices)),
                    bound_s=tuple(bound_s(case, prices) for case in cases) if setting == automatic else None,
                    **cell,
                )
                self.ledger.append(row)
            if cases and not self.ledger.of(ChoiceRow, **cell):
                controls = [Setting.of(name) for name in self.plan.controls]
                rows = self.ledger.of(PredictionRow, **cell)
                self.ledger.append(choose(rows, finalists=self.plan.finalists, controls=controls))
        self.meter.did(f"replay {draft}", 1)

    def _settings(self, draft: str | None) -> list[Setting]:
        """What needs no draft model is replayed without one alone."""
        if not self.can_draft:
            return [PLAIN]
        has_model = draft is not None
        found = grid(self.plan.draft_lengths, self.plan.p_mins, self.plan.drafters, has_model=has_model)
        found += [Setting.of(name) for name in self.plan.controls]
        return list(dict.fromkeys(setting for setting in found if setting.uses_model == has_model))


def predicted_ratio(row: PredictionRow) -> float:
    """Geometric mean over the cases of plain decoding's seconds over this setting's."""
    ratios = [case.plain_s / case.seconds for case in row.cases if case.seconds > 0]
    return geometric_mean(ratios) if ratios else 1.0


def choose(rows: Sequence[PredictionRow], *, finalists: int, controls: Sequence[Setting]) -> ChoiceRow:
    """The settings of one cell that run for real; `rows` are its predictions, one a setting.

    The automatic choice always does. Of settings that would do exactly the same, the first is kept.
    """
    cell = rows[0]
    ranked = sorted(rows, key=predicted_ratio, reverse=True)
    chosen: list[str] = []
    seen: list[object] = []
    for row in ranked:
        if row.setting == PLAIN.name or len(chosen) == finalists:
            continue
        does = [(case.target_calls, case.draft_calls, case.drafted, case.accepted) for case in row.cases]
        if does not in seen:
            seen.append(does)
            chosen.append(row.setting)
    automatic = (AUTO_LOOKUP if cell.draft is None else AUTO).name
    wanted = [setting.name for setting in controls if setting.uses_model == (cell.draft is not None)]
    others = dict.fromkeys([automatic, *wanted])
    known = {row.setting for row in rows}
    return ChoiceRow(
        target=cell.target,
        draft=cell.draft,
        workload=cell.workload,
        finalists=tuple(chosen),
        controls=tuple(name for name in others if name in known and name not in chosen),
    )
