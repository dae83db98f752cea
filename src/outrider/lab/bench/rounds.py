"""Real runs of one target: blocks until every interval is tight, with all drafts loaded that fit together.

In a block plain decoding, the chosen settings and other engines run in turn over the same cases.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

from outrider.core.contracts import Drafter
from outrider.core.data import Completion
from outrider.core.errors import BackendError, ConstraintError, ModelFileError
from outrider.drafters.model import ModelDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine import PreferredTokenization
from outrider.lab.bench.contestants import Contestant, ContestantError, RefusedError
from outrider.lab.bench.results import Cell, Results
from outrider.lab.bench.stages import Stages
from outrider.lab.bench.summary.speeds import measured_speedup
from outrider.lab.loaded import LoadedDraft, LoadedTarget
from outrider.lab.predict import Prices, outcome_of
from outrider.lab.record import Case, request_of
from outrider.lab.rows import AnswerRow, BlockRow, ChoiceRow, PairRow, PredictionRow, RunRow
from outrider.lab.settings import PLAIN, Setting
from outrider.policy.forced import FORCED

_HICCUP_RATIO = 2.0


@dataclass
class Rounds:
    """The real runs of what was chosen, until it `is_over`. `rivals` are other engines that are ready to be
    asked; those that fail are taken out."""

    stages: Stages
    rivals: list[Contestant]
    is_over: Callable[[], bool]
    _drafts: dict[str, LoadedDraft] = field(default_factory=dict)
    _left: int = 0
    """requests of the blocks that are certain to come"""

    def __post_init__(self) -> None:
        self._plan, self._ledger, self._target = self.stages.plan, self.stages.ledger, self.stages.target
        self._meter = self.stages.meter

    def run(self) -> bool:
        """Repeat blocks over all workloads until the least number is done, and on until the intervals are
        tight or the most are done. False when the time was over before."""
        workloads = self._workloads()
        with ExitStack() as stack:
            self._load(stack)
            for repetition in range(self._plan.repetitions_most):
                for number, workload in enumerate(workloads):
                    if self._is_done(workload, repetition):
                        continue
                    if self.is_over():
                        return False
                    self._expect(workloads[number:], repetition)
                    self._block(workload, repetition)
        self._meter.expect("measure", 0)
        return True

    def _workloads(self) -> list[str]:
        return list(dict.fromkeys(row.workload for row in self._ledger.of(ChoiceRow)))

    def _load(self, stack: ExitStack) -> None:
        """Every draft model that something chosen needs and that can be loaded beside the others."""
        chosen = [row for row in self._ledger.of(ChoiceRow) if row.finalists or row.controls]
        for name, file in self.stages.drafts.items():
            if not any(row.draft == name for row in chosen):
                continue
            self._meter.say("loading", name)
            what = f"real runs of {name} for {self._target.name}"
            try:
                loaded = self.stages.loader.draft(file, self._target)
            except (ModelFileError, BackendError) as error:  # all of them at once take more memory
                self._ledger.skip(what, f"it could not be loaded: {error.why}")
                continue
            if isinstance(loaded, PairRow):  # it did line up before
                self._ledger.skip(what, loaded.why_not or "it does not line up")
                continue
            self._drafts[name] = loaded[0]
            stack.callback(loaded[0].close)

    def _is_done(self, workload: str, repetition: int) -> bool:
        """Whether the block is there, or not needed: the speed-ups of all settings that ran are known as well
        as asked for."""
        if self._ledger.of(BlockRow, block=self._id(workload, repetition)):
            return True
        if repetition < max(self._plan.repetitions_least, 2):  # a single one has no spread to look at
            return False
        results = Results.of(self._ledger.rows)
        for draft, setting in self._entries(workload)[1:]:
            cell = Cell(self._target.name, draft, setting.name, workload)
            found = measured_speedup(results, cell, draw_cases=False)
            if found is not None and found.half_width_ratio > self._plan.interval_ratio:
                return False
        return True

    def _id(self, workload: str, repetition: int) -> str:
        return f"{self._target.name} | {workload} | {repetition + 1}"

    def _entries(self, workload: str) -> list[tuple[str | None, Setting]]:
        """Plain decoding and what was chosen, each with its draft."""
        found: list[tuple[str | None, Setting]] = [(None, PLAIN)]
        for row in self._ledger.of(ChoiceRow, workload=workload):
            if row.draft is None or row.draft in self._drafts:
                found += [(row.draft, Setting.of(name)) for name in (*row.finalists, *row.controls)]
        return list(dict.fromkeys(found))

    def _cases(self, workload: str) -> list[tuple[Case, AnswerRow]]:
        return [pair for pair in self._ledger.all_cases() if pair[1].workload == workload]

    def _expect(self, workloads: Sequence[str], repetition: int) -> None:
        """What the blocks that are certain to come will take."""
        seconds, self._left = 0.0, 0
        predicted = {
            (row.draft, row.setting, row.workload): sum(case.seconds for case in row.cases)
            for row in self._ledger.of(PredictionRow)
        }
        for later in range(repetition, max(self._plan.repetitions_least, repetition + 1)):
            for workload in workloads if later == repetition else self._workloads():
                entries, cases = self._entries(workload), self._cases(workload)
                seconds += sum(predicted.get((draft, s.name, workload), 0.0) for draft, s in entries)
                seconds += sum(answer.prefill_s for _, answer in cases)
                self._left += len(cases) * (len(entries) + len(self.rivals))
        self._meter.expect("measure", seconds)

    def _block(self, workload: str, repetition: int) -> None:
        """Every request once. A row says in the end that the block is complete."""
        runners = [
            _Runner(self._target, setting, self._drafts.get(draft or ""), self._ledger.prices(draft))
            for draft, setting in self._entries(workload)
        ]
        block: dict[str, Any] = {
            "block": self._id(workload, repetition),
            "target": self._target.name,
            "workload": workload,
        }
        cases = self._cases(workload)
        number, total = 0, len(cases) * (len(runners) + len(self.rivals))
        started = perf_counter()
        for case, answer in cases:
            turns: list[_Runner | Contestant] = [*runners, *self.rivals]
            random.Random(f"{self._plan.seed} {block['block']} {case.id}").shuffle(turns)
            for engine in {runner.engine for runner in runners}:
                engine.reset()
            for order, runner in enumerate(turns):
                at_s, number = perf_counter() - started, number + 1
                if isinstance(runner, _Runner):
                    made = self._own(runner, case, answer, repetition)
                else:
                    made = self._rival(runner, case, answer, repetition)
                if made is not None:
                    made |= {"repetition": repetition, "order": order, "started_s": at_s}
                    self._ledger.append(RunRow(**block, **made, case=answer.case))
                self._meter.did("measure", 1 / max(self._left, 1))
                self._left -= 1
                where = f"{self._target.name}: {workload}, round {repetition + 1}, {number} of {total}"
                self._meter.say("running", where)
        calls_s = [seconds for runner in runners for seconds in runner.calls_s]
        usual_s = median(calls_s) if calls_s else 0.0
        hiccups = sum(seconds > _HICCUP_RATIO * usual_s for seconds in calls_s)
        self._ledger.append(BlockRow(**block, repetition=repetition, hiccups=hiccups, calls=len(calls_s)))

    def _own(self, runner: _Runner, case: Case, answer: AnswerRow, repetition: int) -> dict[str, Any] | None:
        """What a request of ours made, as fields of its row; None where a constraint leaves a sampled text
        nothing to go on with."""
        draft = runner.draft.name if runner.draft is not None else None
        try:
            completion = runner.run(case, answer, _seed(answer, repetition))
        except ConstraintError as error:
            drafted = f" with {draft}" if draft else ""
            what = f"{runner.setting.name}{drafted} for {self._target.name}: {answer.workload} {case.id}"
            self._ledger.skip(what, f"round {repetition + 1}: {error.why}")
            return None
        made = outcome_of(answer.case, completion.records, 0.0)
        same = {"tokens", "target_calls", "draft_calls", "drafted", "accepted", "draft_s", "verify_s"}
        return made.model_dump(include=same) | {
            "draft": draft,
            "setting": runner.setting.name,
            "timed_tokens": made.tokens,
            "prefill_s": sum(r.total_s if r.kind == "prefill" else r.read_s for r in completion.records),
            "decode_s": made.seconds,
            "forced": sum(s == FORCED for r in completion.records for s in r.draft.sources[: r.num_accepted]),
            **(_difference(completion.tokens, answer.tokens) if _is_greedy(case) else {}),
            "finish_reason": completion.finish_reason,
            "seed": completion.seed,
        }

    def _rival(
        self, rival: Contestant, case: Case, answer: AnswerRow, repetition: int
    ) -> dict[str, Any] | None:
        """The same of another engine. One that fails is left out from there on, a request that it refuses
        alone."""
        seed, what = _seed(answer, repetition), f"{rival.name} with {self._target.name}"
        try:
            reply = rival.answer(case, self._ledger.answered(answer.workload), seed)
        except RefusedError as error:
            self._ledger.skip(f"{what}: {answer.workload} {case.id}", error.why)
            return None
        except ContestantError as error:
            self.rivals.remove(rival)
            since = f"round {repetition + 1} of {answer.workload}, {case.id}"
            self._ledger.skip(f"{what}, from {since} on", error.why)
            return None
        same = ("tokens", "timed_tokens", "prefill_s", "decode_s", "target_calls", "draft_calls", "forced")
        return {name: getattr(reply, name) for name in (*same, "finish_reason")} | {
            "draft": None,
            "contestant": rival.name,
            "setting": rival.name,
            "drafted": None if reply.drafted is None else (reply.drafted,),
            "accepted": None if reply.accepted is None else (reply.accepted,),
            "equal": reply.text == answer.text if _is_greedy(case) and reply.is_whole_text else None,
            "seed": seed,
        }


class _Runner:
    """A setting with its own drafters, policy and memory of spellings, which last for a block."""

    def __init__(
        self, target: LoadedTarget, setting: Setting, draft: LoadedDraft | None, prices: Prices
    ) -> None:
        self.setting = setting
        self.draft = draft
        self.calls_s: list[float] = []
        """the target's calls over a single token"""
        self.engine = ((draft and draft.feeder) or target).engine
        """a head's is that of the target that feeds it"""
        self._policy = setting.policy(prices.target, prices.drafts(setting), prices.prior)
        self._spelling = PreferredTokenization()
        self._drafters: list[Drafter] = [SuffixDrafter()] if setting.uses_lookup else []
        if setting.uses_model and draft is not None:
            self._drafters.append(ModelDrafter(draft.model, draft.alignment))

    def run(self, case: Case, answer: AnswerRow, seed: int) -> Completion:
        self.engine.equip(self._drafters, self._policy, self._spelling)
        request = request_of(case, answer.prompt, seed, speculate=self.setting != PLAIN)
        try:
            completion = self.engine.generate(request)
        finally:
            for drafter in self._drafters:
                drafter.reset()
        decoded = [record for record in completion.records if record.kind == "decode"]
        singles = (record for record in decoded if record.num_evaluated == 1 and not record.read_tokens)
        self.calls_s += [record.verify_s for record in singles]
        return completion


def _seed(answer: AnswerRow, repetition: int) -> int:
    """A sampled text is another one in each repetition, and the same for all settings."""
    return answer.seed + repetition


def _is_greedy(case: Case) -> bool:
    """Whether its answer is the same each time."""
    return case.workload.sampling.is_greedy


def _difference(tokens: Sequence[int], recorded: Sequence[int]) -> dict[str, Any]:
    if tuple(tokens) == tuple(recorded):
        return {"equal": True}
    pairs = enumerate(zip(tokens, recorded, strict=False))
    shorter = min(len(tokens), len(recorded))
    return {"equal": False, "divergence": next((i for i, (a, b) in pairs if a != b), shorter)}
