"""The stages of a sweep for one target: answers, costs, drafts scored, predictions, choices.

Every stage writes rows, and does only what has no row yet: that is how a run goes on where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.bench.choose import choose
from outrider.bench.curves import curve_of, draft_costs, own_times, target_costs
from outrider.bench.loaded import LoadedDraft, LoadedTarget
from outrider.bench.models import ModelFile
from outrider.bench.plan import Plan
from outrider.bench.predict import OwnTimes, Prices, Scored, bounds_s, policy_times, predict
from outrider.bench.progress import Meter
from outrider.bench.prompts import Workload
from outrider.bench.record import Case, cases_of, record_case
from outrider.bench.rows import (
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
from outrider.bench.score import offers_of, pair_row, probe_draft, score_case
from outrider.bench.settings import AUTO, AUTO_LOOKUP, Setting, grid
from outrider.bench.store import Store
from outrider.core.errors import BackendError, ConstraintError, GrammarError, PromptError
from outrider.costs import CallCosts
from outrider.replay import Recording
from outrider.vocab import Alignment, AlignmentReport

__all__ = ["Loader", "Stages"]

PROBED_ANSWERS = 2
"""of each workload, behind which calls of every size are timed"""
_PROBED_PLACES = (0.25, 0.5, 1.0)
"""of the cases by length of their prompts, on which the draft model is timed"""


class Loader(Protocol):
    """Finds models, loads and measures them."""

    def find(self, references: Sequence[str], taken: Sequence[ModelFile] = ()) -> list[ModelFile]:
        """The models that are meant, each once; files among `taken` keep their names."""
        ...

    def target(self, file: ModelFile) -> tuple[LoadedTarget, ModelRow]: ...

    def draft(self, file: ModelFile, target: LoadedTarget) -> tuple[LoadedDraft, ModelRow] | PairRow:
        """The draft, or the row that says why it cannot draft for this target."""
        ...

    def costs(self, model: LoadedTarget | LoadedDraft, role: Role) -> CallCosts:
        """What calls of the model cost now."""
        ...


class Stages:
    """What is known of one target, and how to find out what is not."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        loader: Loader,
        target: LoadedTarget,
        workloads: Sequence[Workload],
        meter: Meter,
    ) -> None:
        self.plan = plan
        self.store = store
        self.target = target
        self.name = target.name
        self.drafts: dict[str, ModelFile] = {}
        """those that line up with the target"""
        self._loader = loader
        self._workloads = workloads
        self._meter = meter

    # What rows say already

    def cases(self, workload: str) -> list[tuple[Case, AnswerRow]]:
        """The cases of a workload that were answered, in their order."""
        [found] = [known for known in self._workloads if known.name == workload]
        rows = self._answered(workload)
        return [(case, rows[case.id]) for case in cases_of(found) if case.id in rows and rows[case.id].tokens]

    def _answered(self, workload: str) -> dict[str, AnswerRow]:
        return {
            row.case: row
            for row in self.store.rows
            if isinstance(row, AnswerRow) and row.target == self.name and row.workload == workload
        }

    def all_cases(self) -> list[tuple[Case, AnswerRow]]:
        """Those of all workloads."""
        return [pair for workload in self._workloads for pair in self.cases(workload.name)]

    def choices(self) -> list[ChoiceRow]:
        """What was chosen for each cell."""
        return [row for row in self.store.rows if isinstance(row, ChoiceRow) and row.target == self.name]

    def prices(self, draft: str | None) -> Prices:
        """The costs in force for a pair."""
        mine = self._costs(self.name, "target")
        assert mine is not None
        theirs = None if draft is None else self._costs(draft, "draft")
        own = OwnTimes(mine.own_s, mine.own_token_s)
        return Prices(curve_of(mine), None if theirs is None else curve_of(theirs), own)

    def _costs(self, model: str, role: Role) -> CostsRow | None:
        beside = self.name if role == "draft" else None
        for row in self.store.rows:
            if isinstance(row, CostsRow) and (row.model, row.role, row.beside) == (model, role, beside):
                return row
        return None

    def has_skipped(self, what: str) -> bool:
        """Whether it was said already that this takes no part."""
        return any(isinstance(row, SkippedRow) and row.what == what for row in self.store.rows)

    # Answers

    def record(self) -> None:
        """Let the target answer every case that it has not answered."""
        cases = [case for workload in self._workloads for case in cases_of(workload)]
        for number, case in enumerate(cases):
            self._meter.say("recording", f"{self.name}: {case.workload.name} {case.id}")
            self._record(case)
            self._meter.did("record", 1 / (len(cases) - number))

    def _record(self, case: Case) -> None:
        answered = self._answered(case.workload.name)
        what = f"{self.name}: {case.workload.name} {case.id}"
        if case.id in answered or self.has_skipped(what):
            return
        number = cases_of(case.workload).index(case)
        offset = [w.name for w in self._workloads].index(case.workload.name) * PROBED_ANSWERS
        probe = number + offset if number < PROBED_ANSWERS else None
        try:
            row = record_case(self.target, case, answered, seed=self.plan.seed + number, probe=probe)
        except (PromptError, GrammarError, ConstraintError) as error:
            self.store.append(SkippedRow(what=what, why=f"{error.what}: {error.why}"))
            return
        except KeyError:
            self.store.append(SkippedRow(what=what, why="the turn before it was left out"))
            return
        self.store.append(row)

    def measure_target(self) -> None:
        """The target's cost curve, and the engine's own times."""
        if self._costs(self.name, "target") is not None:
            return
        self._meter.say("measuring calls", self.name)
        answers = [row for _, row in self.all_cases()]
        curve = self._loader.costs(self.target, "target")
        if self.plan.costs is None:  # else it is another machine's, perhaps
            curve = target_costs(curve, answers)
        plain_s, token_s = own_times(answers)
        scored = [self._scored(case, row, None) for case, row in self.all_cases()]
        prices = Prices(curve, None, OwnTimes({"plain": plain_s}, token_s))
        kinds = {"lookup": Setting.of("lookup 8"), "auto": AUTO_LOOKUP}
        own_s = {kind: plain_s + s for kind, s in policy_times(scored, prices, kinds).items()}
        self.store.append(
            CostsRow(
                model=self.name,
                role="target",
                curve=curve.as_json(),
                own_s={"plain": plain_s, **own_s},
                own_token_s=token_s,
            )
        )

    # Drafts

    def score(self, file: ModelFile) -> None:
        """Find out whether a draft lines up, what it would have offered along the answers, and its costs."""
        known = [row for row in self.store.rows if isinstance(row, PairRow) and row.target == self.name]
        pair = next((row for row in known if row.draft == file.name), None)
        if pair is not None and not pair.usable:
            return
        self.drafts[file.name] = file
        offered = {(row.workload, row.case) for row in self._offers(file.name)}
        missing = [(c, a) for c, a in self.all_cases() if (a.workload, a.case) not in offered]
        if pair is not None and not missing and self._costs(file.name, "draft") is not None:
            return
        self._meter.say("scoring", f"{file.name} for {self.name}")
        loaded = self._loader.draft(file, self.target)
        if isinstance(loaded, PairRow):
            del self.drafts[file.name]
            self.store.append(loaded)
            return
        draft, row = loaded
        try:
            self._note_draft(draft, row, pair)
            self._score_all(draft, missing)
            self._measure_draft(draft)
        finally:
            draft.close()

    def _note_draft(self, draft: LoadedDraft, row: ModelRow, pair: PairRow | None) -> None:
        if not any(
            isinstance(r, ModelRow) and (r.model, r.role) == (row.model, "draft") for r in self.store.rows
        ):
            self.store.append(row)
        if pair is None:
            alignment: Alignment = draft.alignment
            report: AlignmentReport = alignment.report
            self.store.append(pair_row(self.name, draft.name, report, identical=alignment.identical))

    def _score_all(self, draft: LoadedDraft, missing: Sequence[tuple[Case, AnswerRow]]) -> None:
        for number, (case, answer) in enumerate(missing):
            self._meter.say("scoring", f"{draft.name} for {self.name}: {answer.workload} {answer.case}")
            what = f"{draft.name} for {self.name}: {answer.workload} {answer.case}"
            try:
                self.store.append(score_case(self.target, draft, case, answer))
            except (BackendError, ConstraintError) as error:
                if not self.has_skipped(what):
                    self.store.append(SkippedRow(what=what, why=f"{error.what}: {error.why}"))
            self._meter.did(f"score {draft.name}", 1 / (len(missing) - number + 1))

    def _measure_draft(self, draft: LoadedDraft) -> None:
        if self._costs(draft.name, "draft") is not None:
            return
        self._meter.say("measuring calls", draft.name)
        free = [(c, a) for c, a in self.all_cases() if c.prompt.grammar is None] or self.all_cases()
        by_length = sorted(free, key=lambda pair: len(pair[1].prompt))
        probed = [by_length[int(place * (len(by_length) - 1))] for place in _PROBED_PLACES]
        curve = self._loader.costs(draft, "draft")
        if self.plan.costs is None:
            records = list(probe_draft(self.target, draft, probed))
            read = sum(len(answer.prompt) for _, answer in probed)
            curve = draft_costs(curve, records, read, self.prices(None).target)
        self.store.append(CostsRow(model=draft.name, role="draft", curve=curve.as_json(), beside=self.name))
        self._meter.did(f"score {draft.name}", 1)

    def _offers(self, draft: str) -> list[OffersRow]:
        return [
            row
            for row in self.store.rows
            if isinstance(row, OffersRow) and (row.target, row.draft) == (self.name, draft)
        ]

    # Predictions

    def predict(self, draft: str | None) -> None:
        """Replay every setting of a pair, or those of lookup alone, and choose what runs for real."""
        known = {
            (row.workload, row.setting)
            for row in self.store.rows
            if isinstance(row, PredictionRow) and (row.target, row.draft) == (self.name, draft)
        }
        settings = self._settings(draft)
        prices = self.prices(draft)
        for workload in self._workloads:
            cases = self._all_scored(workload.name, draft)
            if not cases:
                continue
            for setting in settings:
                if (workload.name, setting.name) not in known:
                    self._meter.say("replaying", f"{self.name}, {draft or 'no draft'}: {workload.name}")
                    self.store.append(self._prediction(cases, setting, prices, draft, workload.name))
            self._choose(workload.name, draft)
        self._meter.did(f"replay {draft}", 1)

    def _settings(self, draft: str | None) -> list[Setting]:
        found = grid(
            self.plan.draft_lengths, self.plan.p_mins, self.plan.drafters, has_model=draft is not None
        )
        found += [Setting.of(name) for name in self.plan.controls]
        if draft is not None:  # what needs no draft model is in the column without one
            return list(dict.fromkeys(setting for setting in found if setting.uses_model))
        return list(dict.fromkeys(setting for setting in found if not setting.uses_model))

    def _prediction(
        self, cases: Sequence[Scored], setting: Setting, prices: Prices, draft: str | None, workload: str
    ) -> PredictionRow:
        automatic = AUTO_LOOKUP if draft is None else AUTO
        return PredictionRow(
            target=self.name,
            draft=draft,
            workload=workload,
            setting=setting.name,
            cases=tuple(predict(cases, setting, prices)),
            bound_s=tuple(bounds_s(cases, prices)) if setting == automatic else None,
        )

    def _all_scored(self, workload: str, draft: str | None) -> list[Scored]:
        offers = {row.case: row for row in self._offers(draft) if row.workload == workload} if draft else {}
        return [
            self._scored(case, answer, offers.get(answer.case))
            for case, answer in self.cases(workload)
            if draft is None or answer.case in offers
        ]

    def _scored(self, case: Case, answer: AnswerRow, offers: OffersRow | None) -> Scored:
        known = {} if offers is None else {"draft": offers_of(offers)}
        recording = Recording(
            answer.case, answer.workload, answer.prompt, answer.tokens, answer.finish_reason, known
        )
        return Scored(recording, self.target.constrain(case.prompt.grammar))

    def _choose(self, workload: str, draft: str | None) -> None:
        if any((row.workload, row.draft) == (workload, draft) for row in self.choices()):
            return
        rows = [
            row
            for row in self.store.rows
            if isinstance(row, PredictionRow)
            and (row.target, row.draft, row.workload) == (self.name, draft, workload)
        ]
        controls = [Setting.of(name) for name in self.plan.controls]
        self.store.append(choose(rows, finalists=self.plan.finalists, controls=controls))
