"""Real runs of one target: blocks until every interval is tight, with all drafts loaded that fit together."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any, Protocol

from outrider.bench.contestants import Answer, ContestantError, RefusedError
from outrider.bench.plan import SweepPlan
from outrider.bench.results import Cell, Results
from outrider.bench.stages import Loader, Stages
from outrider.bench.summary.speeds import measured_speedup
from outrider.core.contracts import Drafter
from outrider.core.data import Completion, StepRecord
from outrider.core.errors import BackendError, ConstraintError, ModelFileError
from outrider.drafters.model import ModelDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine import PreferredTokenization
from outrider.lab.loaded import LoadedDraft, LoadedTarget
from outrider.lab.predict import Prices, outcome_of
from outrider.lab.progress import Meter
from outrider.lab.record import Case, request_of
from outrider.lab.rows import AnswerRow, BlockRow, PairRow, PredictionRow, RunRow, SkippedRow
from outrider.lab.settings import PLAIN, Setting
from outrider.policy.forced import FORCED


class Rounds:
    """The real runs of what was chosen. `rivals` are other engines that are ready to be asked."""

    def __init__(
        self,
        plan: SweepPlan,
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


# Real runs: plain decoding, the chosen settings and other engines, in turn over the same cases.

_HICCUP_RATIO = 2.0


@dataclass(frozen=True, slots=True)
class Entry:
    """One of our own settings, with its draft model."""

    setting: Setting
    draft: LoadedDraft | None
    prices: Prices


class Rival(Protocol):
    """Another engine, ready to answer."""

    @property
    def name(self) -> str: ...

    def answer(self, case: Case, answered: Mapping[str, AnswerRow], seed: int) -> Answer:
        """Its answer to a case whose earlier turns were answered so. Raises ContestantError where it fails,
        RefusedError where that is about this request alone."""
        ...


@dataclass(frozen=True, slots=True)
class Block:
    """Who runs on which cases. `answered` are all answers of the workload by their cases, those that are too
    short to run as well: follow-ups come after them. `lost`, which grows, names the rivals that failed."""

    id: str
    workload: str
    repetition: int
    cases: Sequence[tuple[Case, AnswerRow]]
    answered: Mapping[str, AnswerRow]
    entries: Sequence[Entry]
    rivals: Sequence[Rival] = ()
    lost: set[str] = field(default_factory=set)
    seed: int = 0


def run_block(target: LoadedTarget, block: Block) -> Iterator[RunRow | SkippedRow | BlockRow]:
    """Run a block; its last row says that it is complete. Raises BackendError when a call fails."""
    runners = [_Runner(target, entry) for entry in block.entries]
    started = perf_counter()
    for case, answer in block.cases:
        turns: list[_Runner | Rival] = [*runners, *(r for r in block.rivals if r.name not in block.lost)]
        random.Random(f"{block.seed} {block.id} {case.id}").shuffle(turns)
        target.engine.reset()
        for order, runner in enumerate(turns):
            at_s = perf_counter() - started
            if isinstance(runner, _Runner):
                row = _own_turn(block, runner, case, answer)
            else:
                row = _rival_turn(block, target.name, runner, case, answer)
            if isinstance(row, RunRow):
                row = row.model_copy(update={"order": order, "started_s": at_s})
            yield row
    calls_s = [seconds for runner in runners for seconds in runner.calls_s]
    usual_s = median(calls_s) if calls_s else 0.0
    yield BlockRow(
        block=block.id,
        target=target.name,
        workload=block.workload,
        repetition=block.repetition,
        hiccups=sum(seconds > _HICCUP_RATIO * usual_s for seconds in calls_s),
        calls=len(calls_s),
    )


def _seed(answer: AnswerRow, repetition: int) -> int:
    """A sampled text is another one in each repetition, and the same for all settings."""
    return answer.seed + repetition


def _is_single(record: StepRecord) -> bool:
    return record.kind == "decode" and record.num_evaluated == 1


class _Runner:
    """A setting with its own drafters, policy and memory of spellings, which last for a block."""

    def __init__(self, target: LoadedTarget, entry: Entry) -> None:
        self.entry = entry
        self._target = target
        prices = entry.prices
        self._policy = entry.setting.policy(prices.target, prices.drafts(entry.setting), prices.prior)
        self._spelling = PreferredTokenization()
        self.calls_s: list[float] = []
        """the target's calls over a single token"""
        self._drafters: list[Drafter] = [SuffixDrafter()] if entry.setting.uses_lookup else []
        if entry.setting.uses_model and entry.draft is not None:
            self._drafters.append(ModelDrafter(entry.draft.model, entry.draft.alignment))

    def run(self, case: Case, answer: AnswerRow, seed: int) -> Completion:
        self._target.engine.equip(self._drafters, self._policy, self._spelling)
        request = request_of(case, answer.prompt, seed, speculate=self.entry.setting != PLAIN)
        try:
            completion = self._target.engine.generate(request)
        finally:
            for drafter in self._drafters:
                drafter.reset()
        self.calls_s += [record.verify_s for record in completion.records if _is_single(record)]
        return completion

    @property
    def target(self) -> str:
        """The target's name."""
        return self._target.name


def _own_turn(block: Block, runner: _Runner, case: Case, answer: AnswerRow) -> RunRow | SkippedRow:
    """One request of ours; a constraint may leave a sampled text nothing to go on with."""
    entry = runner.entry
    try:
        completion = runner.run(case, answer, _seed(answer, block.repetition))
    except ConstraintError as error:
        drafted = f" with {entry.draft.name}" if entry.draft is not None else ""
        what = f"{entry.setting.name}{drafted} for {runner.target}: {block.workload} {case.id}"
        return SkippedRow(what=what, why=f"round {block.repetition + 1}: {error.why}")
    return _own_row(block, runner.target, entry, answer, completion)


def _rival_turn(
    block: Block, target: str, rival: Rival, case: Case, answer: AnswerRow
) -> RunRow | SkippedRow:
    """One request to another engine. One that fails is lost; a request that it refuses is left out."""
    seed = _seed(answer, block.repetition)
    try:
        reply = rival.answer(case, block.answered, seed)
    except RefusedError as error:
        return SkippedRow(what=f"{rival.name} with {target}: {block.workload} {case.id}", why=error.why)
    except ContestantError as error:
        block.lost.add(rival.name)
        since = f"round {block.repetition + 1} of {block.workload}, {case.id}"
        return SkippedRow(what=f"{rival.name} with {target}, from {since} on", why=error.why)
    return _rival_row(block, target, rival.name, answer, reply, seed)


def _own_row(block: Block, target: str, entry: Entry, answer: AnswerRow, completion: Completion) -> RunRow:
    made = outcome_of(answer.case, completion.records, 0.0)
    equal, divergence = _compared(completion.tokens, answer, block)
    return RunRow(
        **_place(block, target, answer),
        **made.model_dump(
            include={"tokens", "target_calls", "draft_calls", "drafted", "accepted", "draft_s", "verify_s"}
        ),
        draft=entry.draft.name if entry.draft is not None else None,
        setting=entry.setting.name,
        timed_tokens=made.tokens,
        prefill_s=sum(r.total_s for r in completion.records if r.kind == "prefill"),
        decode_s=made.seconds,
        forced=sum(s == FORCED for r in completion.records for s in r.draft.sources[: r.num_accepted]),
        equal=equal,
        divergence=divergence,
        finish_reason=completion.finish_reason,
        seed=completion.seed,
    )


def _place(block: Block, target: str, answer: AnswerRow) -> dict[str, Any]:
    """Fields of any request of a block; its order and time are filled in where it is asked."""
    names = {"block": block.id, "target": target, "workload": block.workload, "case": answer.case}
    return {**names, "repetition": block.repetition, "order": 0}


def _compared(tokens: Sequence[int], answer: AnswerRow, block: Block) -> tuple[bool | None, int | None]:
    if not _is_greedy(block):
        return None, None
    if tuple(tokens) == answer.tokens:
        return True, None
    pairs = zip(tokens, answer.tokens, strict=False)
    shorter = min(len(tokens), len(answer.tokens))
    return False, next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), shorter)


def _is_greedy(block: Block) -> bool:
    """Whether an answer is the same each time: all cases of a workload are sampled alike."""
    return block.cases[0][0].workload.sampling.is_greedy


def _rival_row(block: Block, target: str, name: str, answer: AnswerRow, reply: Answer, seed: int) -> RunRow:
    return RunRow(
        **_place(block, target, answer),
        draft=None,
        contestant=name,
        setting=name,
        tokens=reply.tokens,
        timed_tokens=reply.timed_tokens,
        prefill_s=reply.prefill_s,
        decode_s=reply.decode_s,
        target_calls=reply.target_calls,
        draft_calls=reply.draft_calls,
        drafted=None if reply.drafted is None else (reply.drafted,),
        accepted=None if reply.accepted is None else (reply.accepted,),
        forced=reply.forced,
        equal=reply.text == answer.text if _is_greedy(block) and reply.is_whole_text else None,
        finish_reason=reply.finish_reason,
        seed=seed,
    )
