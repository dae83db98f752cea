"""A target whose answers are recorded and whose calls are measured, and drafts beside it: how they line up,
what they would have offered all along the answers, and what their calls cost. All of it is rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from time import perf_counter
from typing import TypeVar

import numpy as np

from outrider.core.data import StepRecord
from outrider.core.errors import BackendError, ConstraintError
from outrider.costs import CallCosts, CallPoint
from outrider.drafters.model import ModelDrafter
from outrider.lab.loaded import LoadedDraft, LoadedTarget, Loader, pair_row
from outrider.lab.models import ModelFile
from outrider.lab.prompts import Workload
from outrider.lab.record import SHORT_TOKENS, Case, cases_of, recording_of, request_of
from outrider.lab.recording import Recording
from outrider.lab.replay import DRAFT, Prices, prices_of
from outrider.lab.rows import AnswerRow, CostsRow, ModelRow, OffersRow, PairRow, Role, Row, SkippedRow
from outrider.policy.fixed import FixedPolicy
from outrider.session.options import Progress, no_progress

_R = TypeVar("_R")

_MIN_ANSWERS = 4
"""that a draft is scored on even if the time is up"""
_MIN_CALLS = 3
"""of a size that make its ratio known"""
_MAX_RATIO = 4.0
"""A larger ratio is a disturbance of the machine."""
_PROBED_LENGTH = 4
_PROBED_TOKENS = 24
_PROBED_PLACES = (0.25, 0.5, 1.0)
"""of the cases by length of their prompts, on which the draft model is timed"""
_STAGES = {
    "loading": (0.0, 0.0),
    "recording": (0.0, 0.3),
    "measuring calls": (0.3, 0.0),
    "scoring": (0.3, 0.2),
    "replaying": (0.5, 0.1),
    "running": (0.6, 0.4),
}
"""Where each begins in the work on a target, and about which part of it it is."""


@dataclass
class Subject:
    """A target, what is known about it, and the work that finds out more.

    Every stage writes rows, and does only what has no row yet: that is how a sweep goes on where it was.

    Args:
        file: Its file, and `target` what was loaded of it.
        rows: All rows so far; `append` adds one.
    """

    file: ModelFile
    target: LoadedTarget
    workloads: Sequence[Workload]
    loader: Loader
    rows: Sequence[Row]
    append: Callable[[Row], None]
    tell: Progress = no_progress
    drafts: dict[str, ModelFile] = field(default_factory=dict)
    """those that line up with the target"""

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def can_draft(self) -> bool:
        """Whether the target can take rejected drafts back. One that cannot only decodes plainly."""
        return self.target.model.rewinding.is_possible

    def say(self, stage: str, detail: str = "", part: float = 0.0) -> None:
        begin, share = _STAGES[stage]
        self.tell(f"{stage}, {detail or self.name}", begin + share * part)

    # What is known

    def of(self, kind: type[_R], **fields: object) -> list[_R]:
        """The rows of a kind about this target, or about no target, whose fields have these values."""
        return [
            row
            for row in self.rows
            if isinstance(row, kind)
            and getattr(row, "target", self.name) == self.name
            and all(getattr(row, name) == value for name, value in fields.items())
        ]

    def skip(self, what: str, why: str) -> None:
        if not self.of(SkippedRow, what=what):
            self.append(SkippedRow(what=what, why=why))

    def note_model(self, row: ModelRow) -> None:
        """Write down a model in its role under its backend, once; a head beside its target."""
        if not self.of(ModelRow, model=row.model, role=row.role, backend=row.backend, beside=row.beside):
            self.append(row)

    def answered(self, workload: str) -> dict[str, AnswerRow]:
        return {row.case: row for row in self.of(AnswerRow, workload=workload)}

    def cases(self, workload: Workload | None = None) -> list[tuple[Case, AnswerRow]]:
        """The cases of a workload (None: of all) that were answered at some length, in that order."""
        workloads = self.workloads if workload is None else [workload]
        known = {(one.name, case.id): case for one in workloads for case in cases_of(one)}
        rows = [row for row in self.of(AnswerRow) if len(row.tokens) >= SHORT_TOKENS]
        return [(known[key], row) for row in rows if (key := (row.workload, row.case)) in known]

    def prices(self, draft: str | None) -> Prices:
        mine = self.costs(self.name, "target")
        assert mine is not None
        theirs = None if draft is None else self.costs(draft, "draft")
        pair = next(iter(self.of(PairRow, draft=draft)), None)
        return Prices(
            target=mine.costs(),
            draft=None if theirs is None else theirs.costs(),
            own_s=mine.own_s,
            own_token_s=mine.own_token_s,
            prior=None if pair is None else pair.prior,
            rewinding=self.target.model.rewinding,
        )

    def costs(self, model: str, role: Role) -> CostsRow | None:
        beside = self.name if role == "draft" else None
        return next(iter(self.of(CostsRow, model=model, role=role, beside=beside)), None)

    def recordings(self, draft: str | None, workload: Workload | None = None) -> list[Recording]:
        """The answers of a workload (None: of all) with a draft's offers; those without are left out."""
        offers = {(row.workload, row.case): row for row in self.of(OffersRow, draft=draft)} if draft else {}
        found = []
        for case, answer in self.cases(workload):
            row = offers.get((answer.workload, answer.case))
            if draft is None or row is not None:
                made = {} if row is None else {DRAFT: row.offers()}
                found.append(recording_of(self.target, case, answer, made))
        return found

    # Finding out

    def measure_target(self, measured: CallCosts | None = None) -> None:
        """What its calls cost, as measured before its answers or (None) now, and as these show."""
        if self.costs(self.name, "target") is not None:
            return
        self.say("measuring calls")
        answers = [row for _, row in self.cases()]
        curve = measured or self.loader.costs(self.target, "target")
        if self.loader.costs_file is None:  # else it is another machine's, perhaps
            curve = corrected(curve, (call[:3] for answer in answers for call in answer.calls))
        prices = prices_of(curve, answers, self.recordings(None))
        self.append(
            CostsRow(
                model=self.name,
                role="target",
                curve=curve.as_json(),
                own_s=dict(prices.own_s),
                own_token_s=prices.own_token_s,
            )
        )

    def score(self, file: ModelFile, seconds: float = math.inf) -> None:
        """Whether a draft lines up, what it would have offered along the answers (along as many as there is
        time for, a few at least), and what its calls cost.

        Raises ModelFileError, OutOfMemory or BackendError where it cannot be loaded.
        """
        end_s = perf_counter() + seconds
        pair = next(iter(self.of(PairRow, draft=file.name)), None)
        if pair is not None and not pair.usable:
            return
        missing = self._offered(file.name, known=False)
        is_timed = self.costs(file.name, "draft") is not None
        if pair is None or missing or not is_timed:
            self.say("scoring", f"{file.name} for {self.name}")
            loaded = self.loader.draft(file, self.target)
            if isinstance(loaded, PairRow):
                self.skip(f"{file.name} for {self.name}", loaded.why_not or "")
                self.append(loaded)
                return
            with closing(loaded[0]) as draft:
                self.note_model(loaded[1])
                if pair is None:
                    report, identical = draft.alignment.report, draft.alignment.identical
                    row = pair_row(self.name, draft.name, report, identical=identical, prior=draft.prior)
                    self.append(row)
                self._score_all(draft, missing, end_s)
                if not is_timed:
                    self._measure_draft(draft)
        self.drafts[file.name] = file

    def _offered(self, draft: str, *, known: bool) -> list[tuple[Case, AnswerRow]]:
        offered = {(row.workload, row.case) for row in self.of(OffersRow, draft=draft)}
        return [(c, a) for c, a in self.cases() if ((a.workload, a.case) in offered) == known]

    def _score_all(self, draft: LoadedDraft, missing: Sequence[tuple[Case, AnswerRow]], end_s: float) -> None:
        for number, (case, answer) in enumerate(missing):
            if perf_counter() > end_s and number >= _MIN_ANSWERS:
                break
            what = f"{draft.name} for {self.name}: {answer.workload} {answer.case}"
            self.say("scoring", what, number / len(missing))
            before_s = perf_counter()
            try:
                offers = asdict(draft.offers(recording_of(self.target, case, answer)))
            except (BackendError, ConstraintError) as error:
                self.skip(what, f"{error.what}: {error.why}")
                continue
            row = OffersRow(
                target=self.name,
                draft=draft.name,
                workload=answer.workload,
                case=answer.case,
                seconds=perf_counter() - before_s,
                **offers,
            )
            self.append(row)

    def _measure_draft(self, draft: LoadedDraft) -> None:
        fitting = self._offered(draft.name, known=True)
        if not fitting:
            return
        self.say("measuring calls", draft.name)
        free = [(case, answer) for case, answer in fitting if case.prompt.grammar is None] or fitting
        by_length = sorted(free, key=lambda pair: len(pair[1].prompt))
        probed = [by_length[int(place * (len(by_length) - 1))] for place in _PROBED_PLACES]
        curve = self.loader.costs(draft, "draft")
        if self.loader.costs_file is None:
            records = [record for case, answer in probed for record in self._probe(draft, case, answer)]
            curve = corrected_by_drafts(curve, records, self.prices(None).target)
        self.append(CostsRow(model=draft.name, role="draft", curve=curve.as_json(), beside=self.name))

    def _probe(self, draft: LoadedDraft, case: Case, answer: AnswerRow) -> Sequence[StepRecord]:
        """Steps in which the draft model drafts a few tokens each time, on the first tokens of an answer."""
        drafter = ModelDrafter(draft.model, draft.alignment)
        engine = (draft.feeder or self.target).engine
        engine.equip((drafter,), FixedPolicy(_PROBED_LENGTH, 0.0))
        engine.reset()
        request = request_of(case, answer.prompt, answer.seed)
        most = min(request.max_tokens or _PROBED_TOKENS, _PROBED_TOKENS)
        records = engine.generate(replace(request, max_tokens=most, ignore_end=False)).records
        drafter.reset()
        return records


# Measured curves corrected by real answers: calls of a generation are not quite those of a measurement.


def corrected(measured: CallCosts, calls: Iterable[tuple[int, int, float]]) -> CallCosts:
    """The curve as real calls show it, each given by its tokens, its context and its seconds.

    Every size takes the median ratio of its real calls to the curve, other sizes their neighbours'.
    """
    ratios: dict[int, list[float]] = {}
    for num_tokens, context, seconds in calls:
        ratio = seconds / measured.call_s(num_tokens, context=context)
        ratios.setdefault(num_tokens, []).append(ratio)
    known = {n: _bounded(median(found)) for n, found in sorted(ratios.items()) if len(found) >= _MIN_CALLS}
    if not known:
        return measured
    sizes, values = np.log(list(known)), list(known.values())
    spread = next((point.spread_ratio for point in measured.points), 0.05)
    there = {point.num_tokens for point in measured.points}
    added = [
        CallPoint(n, measured.call_s(n, context=0), spread_ratio=spread) for n in known if n not in there
    ]
    points = [
        replace(p, seconds=p.seconds * float(np.interp(np.log(p.num_tokens), sizes, values)))
        for p in (*measured.points, *added)
    ]
    return CallCosts(points, prefill_token_s=measured.prefill_token_s, window=measured.window)


def corrected_by_drafts(measured: CallCosts, records: Sequence[StepRecord], target: CallCosts) -> CallCosts:
    """A draft model's curve as the steps show it in which it drafted, with the engine's own time for each of
    its tokens made part of its calls.

    All times are those of a machine on which the `target`'s calls take what its curve says: a slow moment
    shows in the target's calls of the same steps, and is taken out. Steps that read a prompt do not count.
    """
    steps = [record for record in records if record.work.calls and not record.read_tokens]
    if not steps:
        return measured
    slowness = median(r.verify_s / target.call_s(r.num_evaluated, context=r.position) for r in steps)
    expected_s = [sum(measured.call_s(n, context=r.position) for n in r.work.call_tokens) for r in steps]
    ratio = _bounded(median(r.work.model_s / s for r, s in zip(steps, expected_s, strict=True)) / slowness)
    own_s = median(max(r.draft_s - r.work.model_s, 0.0) / r.work.calls for r in steps) / slowness
    read_s = sum(record.work.prefill_s for record in records) / slowness
    read_tokens = sum(record.work.prefill_tokens for record in records)
    return CallCosts(
        [replace(point, seconds=point.seconds * ratio + own_s) for point in measured.points],
        prefill_token_s=read_s / read_tokens if read_s and read_tokens else measured.prefill_token_s,
        window=measured.window,
    )


def _bounded(ratio: float) -> float:
    return min(max(ratio, 1 / _MAX_RATIO), _MAX_RATIO)
