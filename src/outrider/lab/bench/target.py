"""What a sweep finds out about one target that is loaded: answers, costs, what drafts offer, predictions.

Every stage writes rows, and does only what has no row yet: that is how a run goes on where it was. The real
runs that follow are in `runs`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from statistics import geometric_mean
from time import perf_counter
from typing import Any, TypeVar

from outrider.backends.gguf.libraries import candidates
from outrider.backends.gguf.model import GgufModel
from outrider.backends.tuning.curves import costs_of
from outrider.core.errors import (
    BackendError,
    ConstraintError,
    GrammarError,
    ModelFileError,
    PromptError,
    SettingError,
)
from outrider.core.notices import collect_notices
from outrider.costs import CallCosts
from outrider.costs.store import import_costs
from outrider.lab.bench.plan import SweepPlan
from outrider.lab.loaded import Loaded, LoadedDraft, LoadedTarget
from outrider.lab.models import OWN_HEAD, ModelFile, find_models
from outrider.lab.predict import Prices, predict, prices_of, with_policy_times
from outrider.lab.prompts import Workload
from outrider.lab.record import SHORT_TOKENS, Case, cases_of, record_case, recording_of
from outrider.lab.recording import Offers, Recording
from outrider.lab.rows import (
    AnswerRow,
    CostsRow,
    ModelRow,
    OffersRow,
    PairRow,
    PredictionRow,
    Role,
    Row,
    SkippedRow,
)
from outrider.lab.settings import AUTO, AUTO_LOOKUP, PLAIN, Setting, grid
from outrider.lab.subject import corrected_by_drafts, pair_row, probe_draft, score_case, target_costs
from outrider.models.hub import HubOptions
from outrider.models.vocab import compare
from outrider.session.loading import why_no_draft

_R = TypeVar("_R")

PROBED_ANSWERS = 2
"""of each workload, after which calls of every size are timed"""
_PROBED_PLACES = (0.25, 0.5, 1.0)
"""of the cases by length of their prompts, on which the draft model is timed"""
_DEFAULT_CONTEXT_TOKENS = 4096
_ROOM_TOKENS = 8
"""of a context beyond the longest text: a call's draft is cut to what is left of it"""


@dataclass(frozen=True, slots=True)
class Progress:
    """`stage` is what is being done, `detail` on what; `done` is the part of everything, 0 to 1, `left_s` the
    seconds that the rest may take, None while nothing is known."""

    stage: str
    done: float
    left_s: float | None
    detail: str


class Meter:
    """Adds up what each part of the work is expected to take, and tells of it.

    Parts have any names; what is expected of one is replaced when more is known, and is 0 when it is over.
    """

    def __init__(self, tell: Callable[[Progress], None]) -> None:
        self._tell = tell
        self._started_s = perf_counter()
        self._expected_s: dict[str, float] = {}
        self.is_known = False
        """whether the expectations rest on measured times"""

    def expect(self, part: str, seconds: float) -> None:
        """So much is left of this part."""
        self._expected_s[part] = max(seconds, 0.0)

    def did(self, part: str, share: float) -> None:
        """This share of what was left of the part is done."""
        self._expected_s[part] = self._expected_s.get(part, 0.0) * (1 - share)

    def say(self, stage: str, detail: str = "") -> None:
        left_s, spent_s = sum(self._expected_s.values()), perf_counter() - self._started_s
        done = spent_s / (spent_s + left_s) if spent_s + left_s > 0 else 0.0
        self._tell(Progress(stage, done, left_s if self.is_known else None, detail))


class Loader:
    """Finds and loads the models of a sweep through their native library, and measures what calls cost."""

    def __init__(self, plan: SweepPlan, workloads: Sequence[Workload], hub: HubOptions) -> None:
        self._plan = plan
        self._hub = hub
        self._context = plan.context or _context(workloads)

    def find(self, references: Sequence[str], taken: Sequence[ModelFile] = ()) -> list[ModelFile]:
        """Raises ModelFileError and HubError, which name the reference that leads nowhere."""
        return find_models(references, hub=self._hub, taken=taken)

    def check_backend(self, backend: str) -> None:
        """Raises BackendError where no library here is of this backend."""
        next(candidates(self._plan.load_options(backend)))

    def target(self, file: ModelFile) -> tuple[LoadedTarget, ModelRow]:
        """Raises ModelFileError or OutOfMemory."""
        with collect_notices() as notices:
            loaded = Loaded(file, self._plan.load_options(file.backend))
            model = self._open(loaded)
        return LoadedTarget(file.name, model, loaded.template), loaded.row("target", notices)

    def draft(self, file: ModelFile, target: LoadedTarget) -> tuple[LoadedDraft, ModelRow] | PairRow:
        """Raises ModelFileError or OutOfMemory."""
        with collect_notices() as notices, ExitStack() as stack:
            options = self._plan.load_options()
            loaded = stack.enter_context(Loaded(file, options, beside=target.model))
            alignment = compare(target.model.vocabulary, loaded.weights.vocabulary)
            useless = loaded.why_not or None
            if isinstance(target.model, GgufModel) and not file.is_head:
                useless = why_no_draft(target.model.weights, loaded.weights)
            row = pair_row(target.name, file.name, alignment.report, why_not=useless)
            if not row.usable:
                return row
            if file.is_head:  # in a context of the target's own size
                loaded.open(target.model.context_length)
            else:
                self._open(loaded)
            draft = loaded.draft(alignment)
            stack.pop_all()  # it is the caller's now
        return draft, loaded.row("draft", notices, target.name)

    def _open(self, loaded: Loaded) -> GgufModel:
        """A context for the longest text and the draft after it; 0: as trained."""
        try:
            longest = self._context and min(self._context + _ROOM_TOKENS, loaded.weights.trained_context)
            return loaded.open(longest)
        except BaseException:
            loaded.close()
            raise

    def costs(self, model: LoadedTarget | LoadedDraft, role: Role) -> CallCosts:
        """Measured now, or those of the plan's file. Raises SettingError, or BackendError when a call
        fails."""
        if self._plan.costs is not None:
            pair = import_costs(self._plan.costs)
            curve = pair.target if role == "target" else pair.draft
            if curve is None:
                why = "it has no costs of a draft model"
                raise SettingError(str(self._plan.costs), why, "Write one with -md.")
            return curve
        assert isinstance(model.model, GgufModel), "it was loaded from a file"
        return costs_of(model.model, rows="all" if role == "target" else "last", fresh=True)


def _context(workloads: Sequence[Workload]) -> int:
    needed = [_DEFAULT_CONTEXT_TOKENS]
    for workload in workloads:
        for prompt in workload.prompts:
            asked = [repr(prompt.messages), repr(prompt.tools), *prompt.follow_ups]
            answers = (1 + len(prompt.follow_ups)) * (prompt.max_tokens or workload.max_tokens)
            needed.append(sum(map(len, asked)) // 2 + answers)
    return max(needed)


@dataclass
class TargetWork:
    """The work on a target.

    Args:
        file: Its file, and `target` what was loaded of it.
        rows: All rows of the sweep so far; `add` appends one.
        machine: The kind of machine that timings hold for, of several; empty: the one of the head.
    """

    plan: SweepPlan
    workloads: Sequence[Workload]
    loader: Loader
    file: ModelFile
    target: LoadedTarget
    rows: Sequence[Row]
    add: Callable[[Row], None]
    meter: Meter
    machine: str = ""
    drafts: dict[str, ModelFile] = field(default_factory=dict)
    """those that line up with the target"""

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def can_draft(self) -> bool:
        """Whether the target can take rejected drafts back. One that cannot only decodes plainly."""
        return self.target.model.rewinding.is_possible

    # What is known

    def of(self, kind: type[_R], **fields: object) -> list[_R]:
        """The rows of a kind about this target, or about no target, whose fields have these values."""
        return [
            row
            for row in self.rows
            if isinstance(row, kind)
            and getattr(row, "target", self.name) == self.name
            and getattr(row, "machine", self.machine) == self.machine
            and all(getattr(row, name) == value for name, value in fields.items())
        ]

    def append(self, row: Row) -> None:
        """Add a row; one that holds for a kind of machine does so for this one."""
        is_local = self.machine and hasattr(row, "machine")
        self.add(row.model_copy(update={"machine": self.machine}) if is_local else row)

    @property
    def here(self) -> str:
        """Names the machine after what took no part on it, where there are several."""
        return f" on {self.machine}" if self.machine else ""

    def skip(self, what: str, why: str) -> None:
        if not self.of(SkippedRow, what=what):
            self.append(SkippedRow(what=what, why=why))

    def note_model(self, row: ModelRow) -> None:
        """Write down a model in its role under its backend, once; a head beside its target."""
        if not self.of(ModelRow, model=row.model, role=row.role, backend=row.backend, beside=row.beside):
            self.append(row)

    def answered(self, workload: str) -> dict[str, AnswerRow]:
        return {row.case: row for row in self.of(AnswerRow, workload=workload)}

    def cases(self, *workloads: Workload) -> list[tuple[Case, AnswerRow]]:
        """The cases of these workloads (of all, if none is named) that were answered at some length."""
        found = []
        for workload in workloads or self.workloads:
            rows = self.answered(workload.name)
            known = [(case, rows[case.id]) for case in cases_of(workload) if case.id in rows]
            found += [(case, row) for case, row in known if len(row.tokens) >= SHORT_TOKENS]
        return found

    def prices(self, draft: str | None) -> Prices:
        """The costs in force for a pair."""
        mine = self._costs(self.name, "target")
        assert mine is not None
        theirs = None if draft is None else self._costs(draft, "draft")
        pair = next(iter(self.of(PairRow, draft=draft)), None)
        return Prices(
            target=mine.costs(),
            draft=None if theirs is None else theirs.costs(),
            own_s=mine.own_s,
            own_token_s=mine.own_token_s,
            prior=None if pair is None else pair.prior,
            rewinding=self.target.model.rewinding,
        )

    def _costs(self, model: str, role: Role) -> CostsRow | None:
        beside = self.name if role == "draft" else None
        return next(iter(self.of(CostsRow, model=model, role=role, beside=beside)), None)

    def _recordings(self, workload: Workload, draft: str | None) -> list[Recording]:
        """The answers of a workload with the offers of a draft; those without offers are left out."""
        rows = self.of(OffersRow, draft=draft, workload=workload.name) if draft else []
        offers = {r.case: {"draft": Offers(r.tokens, r.confidence, r.departures, r.block)} for r in rows}
        return [
            recording_of(self.target, case, answer, offers.get(answer.case, {}))
            for case, answer in self.cases(workload)
            if draft is None or answer.case in offers
        ]

    # The stages

    def record(self, on_first: Callable[[AnswerRow], None] = lambda _answer: None) -> bool:
        """Let the target answer every case that it has not answered; False when there are no answers to go
        on with. `on_first` is called with the first one as soon as it is there."""
        cases = [case for workload in self.workloads for case in cases_of(workload)]
        is_told = False
        for number, case in enumerate(cases):
            what = f"{self.name}: {case.workload.name} {case.id}"
            self.meter.say("recording", what)
            if not self.of(SkippedRow, what=what):
                self._record(case, what)
            self.meter.did("record", 1 / (len(cases) - number))
            if not is_told and (found := self.cases()):
                on_first(found[0][1])
                is_told = True
        if not is_told:
            self.skip(self.name, f"it answered none of the prompts with {SHORT_TOKENS} tokens or more")
        return is_told

    def _record(self, case: Case, what: str) -> None:
        answered = self.answered(case.workload.name)
        if any(earlier not in answered for earlier in case.earlier):
            self.skip(what, "the turn before it was left out")
            return
        if (row := answered.get(case.id)) is None:
            number = cases_of(case.workload).index(case)
            offset = [w.name for w in self.workloads].index(case.workload.name) * PROBED_ANSWERS
            probe = number + offset if number < PROBED_ANSWERS else None
            seed = (case.workload.sampling.seed or 0) + number
            try:
                row = record_case(self.target, case, answered, seed=seed, probe=probe)
            except (PromptError, GrammarError, ConstraintError) as error:
                self.skip(what, f"{error.what}: {error.why}")
                return
            self.append(row)
        if len(row.tokens) < SHORT_TOKENS:  # also after a run that was killed before it said so
            self.skip(what, f"its answer ends after {len(row.tokens)} tokens")

    def measure_target(self) -> None:
        if self._costs(self.name, "target") is not None:
            return
        self.meter.say("measuring calls", self.name)
        # On a cluster they were answered on another machine, or beside other work.
        answers = self._timed_again() if self.machine else [row for _, row in self.cases()]
        curve = self.loader.costs(self.target, "target")
        if self.plan.costs is None:  # else it is another machine's, perhaps
            curve = target_costs(curve, answers)
        scored = [case for workload in self.workloads for case in self._recordings(workload, None)]
        prices = with_policy_times(scored, prices_of(curve, answers))
        self.append(
            CostsRow(
                model=self.name,
                role="target",
                curve=curve.as_json(),
                own_s=dict(prices.own_s),
                own_token_s=prices.own_token_s,
            )
        )

    def _timed_again(self) -> list[AnswerRow]:
        found: list[AnswerRow] = []
        for workload in self.workloads:
            answered = self.answered(workload.name)
            for case, row in self.cases(workload)[:PROBED_ANSWERS]:
                found.append(record_case(self.target, case, answered, seed=row.seed, probe=len(found)))
        return found

    def score(self, drafts: Sequence[ModelFile]) -> None:
        """What those drafts offer that the target can have, and what they cost."""
        if not self.can_draft:
            why = "it cannot take tokens back (recurrent or hybrid state): it decodes plainly"
            self.skip(f"drafts and lookup for {self.name}", why)
        if OWN_HEAD in self.plan.drafts and self.file.card.own_head is None:
            self.skip(f"{OWN_HEAD} for {self.name}", "its file has no head of its own")
        for draft in drafts:
            if draft.fingerprint == self.file.fingerprint and not draft.is_head:
                self.skip(f"{draft.name} for {self.name}", "it is the target itself")
            elif self.can_draft:
                self._score(draft)
            self.meter.expect(f"score {draft.name}", 0)

    def _score(self, file: ModelFile) -> None:
        """Whether a draft lines up, what it would have offered along the answers, and its costs."""
        pair = next(iter(self.of(PairRow, draft=file.name)), None)
        if pair is not None and not pair.usable:
            return
        missing = self._offered(file.name, known=False)
        is_timed = self._costs(file.name, "draft") is not None
        if pair is None or missing or not is_timed:
            self.meter.say("scoring", f"{file.name} for {self.name}")
            try:
                loaded = self.loader.draft(file, self.target)
            except (ModelFileError, BackendError) as error:
                what = f"{file.name} for {self.name}{self.here}"
                self.skip(what, f"it could not be loaded: {error.why}")
                return
            if isinstance(loaded, PairRow):
                self.append(loaded)
                return
            with closing(loaded[0]) as draft:
                self.note_model(loaded[1])
                if pair is None:
                    report, identical = draft.alignment.report, draft.alignment.identical
                    row = pair_row(self.name, draft.name, report, identical=identical, prior=draft.prior)
                    self.append(row)
                self._score_all(draft, missing)
                if not is_timed:
                    self._measure_draft(draft)
        self.drafts[file.name] = file

    def _offered(self, draft: str, *, known: bool) -> list[tuple[Case, AnswerRow]]:
        offered = {(row.workload, row.case) for row in self.of(OffersRow, draft=draft)}
        return [(c, a) for c, a in self.cases() if ((a.workload, a.case) in offered) == known]

    def _score_all(self, draft: LoadedDraft, missing: Sequence[tuple[Case, AnswerRow]]) -> None:
        for number, (case, answer) in enumerate(missing):
            what = f"{draft.name} for {self.name}: {answer.workload} {answer.case}"
            self.meter.say("scoring", what)
            try:
                self.append(score_case(self.target, draft, case, answer))
            except (BackendError, ConstraintError) as error:
                self.skip(what, f"{error.what}: {error.why}")
            self.meter.did(f"score {draft.name}", 1 / (len(missing) - number + 1))

    def _measure_draft(self, draft: LoadedDraft) -> None:
        fitting = self._offered(draft.name, known=True)
        if not fitting:
            return
        self.meter.say("measuring calls", draft.name)
        free = [(case, answer) for case, answer in fitting if case.prompt.grammar is None] or fitting
        by_length = sorted(free, key=lambda pair: len(pair[1].prompt))
        probed = [by_length[int(place * (len(by_length) - 1))] for place in _PROBED_PLACES]
        curve = self.loader.costs(draft, "draft")
        if self.plan.costs is None:
            records = probe_draft(self.target, draft, probed)
            curve = corrected_by_drafts(curve, records, self.prices(None).target)
        self.append(CostsRow(model=draft.name, role="draft", curve=curve.as_json(), beside=self.name))

    def replay(self) -> None:
        """Every setting over the recorded answers, without a draft model and with each that was scored."""
        is_alone = self.plan.lookup_only or not self.can_draft
        if not is_alone and not self.drafts:
            self.skip(f"real runs of {self.name}", "no draft is left, and lookup_only is off")
        for draft in [*([None] if is_alone else []), *self.drafts]:
            prices = self.prices(draft)
            for workload in self.workloads:
                self._predict(draft, workload, prices)

    def _predict(self, draft: str | None, workload: Workload, prices: Prices) -> None:
        cases = self._recordings(workload, draft)
        cell: dict[str, Any] = {"draft": draft, "workload": workload.name}
        known = {row.setting for row in self.of(PredictionRow, **cell)}
        for setting in self._settings(draft) if cases else ():
            if setting.name in known:
                continue
            self.meter.say("replaying", f"{self.name}, {draft or 'no draft'}: {workload.name}")
            outcomes = tuple(predict(cases, setting, prices))
            self.append(PredictionRow(target=self.name, setting=setting.name, cases=outcomes, **cell))

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


def choose(rows: Sequence[PredictionRow], plan: SweepPlan) -> list[str]:
    """The settings of one cell that run for real, what matters most first: the automatic choice, the
    finalists, the controls. `rows` are its predictions, one a setting.

    Of settings that would do exactly the same, the first is a finalist.
    """
    known = {row.setting for row in rows}
    controls = [setting for setting in map(Setting.of, plan.controls) if setting.name in known]
    finalists: list[str] = []
    seen: list[object] = []
    for row in sorted(rows, key=predicted_ratio, reverse=True):
        if row.setting == PLAIN.name or len(finalists) == plan.finalists:
            continue
        does = [(case.target_calls, case.draft_calls, case.drafted, case.accepted) for case in row.cases]
        if does not in seen:
            seen.append(does)
            finalists.append(row.setting)
    automatic = (AUTO if rows[0].draft else AUTO_LOOKUP).name
    chosen = [automatic] if automatic in known else []
    return list(dict.fromkeys([*chosen, *finalists, *(setting.name for setting in controls)]))
