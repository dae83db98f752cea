"""Real runs of one target, in blocks: plain decoding and the chosen settings in turn over the same cases."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import geometric_mean
from time import perf_counter
from typing import Any, NamedTuple

from outrider.core.contracts import Drafter
from outrider.core.data import Completion
from outrider.core.errors import BackendError, ConstraintError, ModelFileError
from outrider.drafters.model import ModelDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine import PreferredTokenization
from outrider.lab.bench.target import TargetWork, choose, predicted_ratio
from outrider.lab.loaded import LoadedDraft, LoadedTarget
from outrider.lab.models import ModelFile
from outrider.lab.predict import Prices, outcome_of
from outrider.lab.record import Case, request_of
from outrider.lab.rows import AnswerRow, BlockRow, DoneRow, PairRow, PredictionRow, RunRow
from outrider.lab.settings import PLAIN, Setting
from outrider.policy.forced import FORCED

_SLOWNESS = 1.25
"""what runs take beside what was predicted of them, as long as none has run"""
_LEAST_REPETITIONS = 2
"""that the settings which run have to have time for: a single one has no spread"""


class Entry(NamedTuple):
    """What runs in a block: a setting with its draft."""

    draft: str | None
    setting: str


_PLAIN = Entry(None, PLAIN.name)


def find_out(
    work: TargetWork,
    drafts: Sequence[ModelFile],
    left_s: Callable[[], float],
    on_first: Callable[[AnswerRow], None] = lambda _answer: None,
) -> None:
    """Everything about a target that has no row yet: answers, costs, offers, predictions, then real runs for
    the seconds that are left once they begin. `on_first` is called with the first answer."""
    if not work.record(on_first):
        work.append(DoneRow(target=work.name, repetitions=work.plan.repetitions))
        return
    work.measure_target()
    work.score(drafts)
    work.replay()
    _RealRuns(work, perf_counter() + left_s()).run()


@dataclass
class _RealRuns:
    """The real runs of what was chosen for a target, up to a time of `perf_counter`."""

    work: TargetWork
    end_s: float
    _drafts: dict[str, LoadedDraft] = field(default_factory=dict)
    _slowness: float = _SLOWNESS

    @property
    def _left_s(self) -> float:
        return self.end_s - perf_counter()

    def run(self) -> None:
        """Every block of every repetition that there is time for; a row says when all is done."""
        chosen = self._chosen()
        with ExitStack() as stack:
            self._load(stack, {entry.draft for entries in chosen.values() for entry in entries})
            chosen = {
                workload: [entry for entry in entries if entry.draft in (None, *self._drafts)]
                for workload, entries in chosen.items()
            }
            fitting = self._fitting(chosen)
            is_whole = fitting == chosen
            todo = [(number, w) for number in range(self.work.plan.repetitions) for w in fitting]
            todo = [(number, w) for number, w in todo if not self._is_done(number, w, fitting[w])]
            for place, (number, workload) in enumerate(todo):
                later = [self._takes_s(w, fitting[w]) for _, w in todo[place:]]
                self.work.meter.expect("measure", sum(later))
                # The first repetition runs as long as there is any time: without it nothing is measured.
                if later[0] > self._left_s and (number > 0 or self._left_s <= 0):
                    is_whole = False
                    break
                requests = [len(self._cases(w)) * len(fitting[w]) for _, w in todo[place:]]
                self._block(number, workload, fitting[workload], sum(requests))
        self.work.meter.expect("measure", 0)
        if is_whole:
            self.work.append(DoneRow(target=self.work.name, repetitions=self.work.plan.repetitions))

    # What runs

    def _chosen(self) -> dict[str, list[Entry]]:
        """By workload plain decoding and what was chosen, what matters most first: the automatic choice of
        each draft, by its prediction; then the other settings, by theirs."""
        found: dict[str, list[Entry]] = {}
        pooled: dict[Entry, list[float]] = defaultdict(list)
        for row in self.work.of(PredictionRow):
            pooled[Entry(row.draft, row.setting)].append(predicted_ratio(row))

        def rank(entry: Entry) -> tuple[bool, float]:
            return not Setting.of(entry.setting).is_auto, -geometric_mean(pooled[entry])

        for workload in self.work.workloads:
            rows = self.work.of(PredictionRow, workload=workload.name)
            chosen: list[Entry] = []
            for draft in dict.fromkeys(row.draft for row in rows):
                if draft is None or draft in self.work.drafts:
                    cell = [row for row in rows if row.draft == draft]
                    chosen += [Entry(draft, setting) for setting in choose(cell, self.work.plan)]
            if rows:
                found[workload.name] = [_PLAIN, *sorted(chosen, key=rank)]
        return found

    def _fitting(self, chosen: dict[str, list[Entry]]) -> dict[str, list[Entry]]:
        """As much of it as there is time to repeat; plain decoding and the first in any case."""
        repetitions = min(_LEAST_REPETITIONS, self.work.plan.repetitions)
        for size in range(max(map(len, chosen.values()), default=0), 1, -1):
            cut = {workload: entries[:size] for workload, entries in chosen.items()}
            takes_s = repetitions * sum(self._takes_s(w, entries) for w, entries in cut.items())
            if takes_s <= self._left_s or size == 2:
                return cut
        return chosen

    def _takes_s(self, workload: str, entries: Sequence[Entry]) -> float:
        predicted: dict[Entry, float] = {}
        for row in self.work.of(PredictionRow, workload=workload):
            predicted[Entry(row.draft, row.setting)] = sum(case.seconds for case in row.cases)
            predicted.setdefault(_PLAIN, sum(case.plain_s for case in row.cases))
        prompts_s = sum(answer.prefill_s for _, answer in self._cases(workload))
        return self._slowness * sum(predicted.get(entry, 0.0) for entry in entries) + prompts_s

    def _is_done(self, number: int, workload: str, entries: Sequence[Entry]) -> bool:
        """Whether the block is there with all of this: one that had less time is run again."""
        block = self._block_id(number, workload)
        ran = {Entry(row.draft, row.setting) for row in self.work.of(RunRow, block=block)}
        return bool(self.work.of(BlockRow, block=block)) and ran >= set(entries)

    def _block_id(self, number: int, workload: str) -> str:
        return f"{self.work.name} | {workload} | {number + 1}"

    def _cases(self, workload: str) -> list[tuple[Case, AnswerRow]]:
        return [pair for pair in self.work.cases() if pair[1].workload == workload]

    def _load(self, stack: ExitStack, wanted: set[str | None]) -> None:
        """Every draft model that something chosen needs and that can be loaded beside the others."""
        for name, file in self.work.drafts.items():
            if name not in wanted:
                continue
            self.work.meter.say("loading", name)
            what = f"real runs of {name} for {self.work.name}{self.work.here}"
            try:
                loaded = self.work.loader.draft(file, self.work.target)
            except (ModelFileError, BackendError) as error:  # all of them at once take more memory
                self.work.skip(what, f"it could not be loaded: {error.why}")
                continue
            if isinstance(loaded, PairRow):  # it did line up before
                self.work.skip(what, loaded.why_not or "it does not line up")
                continue
            self._drafts[name] = loaded[0]
            stack.callback(loaded[0].close)

    # Running it

    def _block(self, number: int, workload: str, entries: Sequence[Entry], left: int) -> None:
        """Every request once; a row says in the end that the block is complete. `left` requests are to come,
        later blocks' among them."""
        work, block = self.work, self._block_id(number, workload)
        expected_s, started_s = self._takes_s(workload, entries), perf_counter()
        runners = [
            _Runner(work.target, Setting.of(setting), self._drafts.get(draft or ""), work.prices(draft))
            for draft, setting in entries
        ]
        cases = self._cases(workload)
        total, done = len(cases) * len(runners), 0
        for case, answer in cases:
            turns = [*runners]
            random.Random(f"{work.plan.seed} {block} {case.id}").shuffle(turns)
            for engine in {runner.engine for runner in runners}:
                engine.reset()
            for order, runner in enumerate(turns):
                done += 1
                place = f"{work.name}: {workload}, round {number + 1}, {done} of {total}"
                work.meter.say("running", place)
                at_s = perf_counter() - started_s
                if (made := self._request(runner, case, answer, number)) is not None:
                    made |= {"block": block, "target": work.name, "workload": workload, "case": answer.case}
                    made |= {"repetition": number, "order": order, "started_s": at_s}
                    work.append(RunRow(**made))
                work.meter.did("measure", 1 / (left - done + 1))
        work.append(BlockRow(block=block, target=work.name, workload=workload, repetition=number))
        if expected_s > 0:
            self._slowness *= min(max((perf_counter() - started_s) / expected_s, 0.5), 2.0)

    def _request(
        self, runner: _Runner, case: Case, answer: AnswerRow, repetition: int
    ) -> dict[str, Any] | None:
        """What a request made, as fields of its row; None where a constraint leaves a sampled text nothing to
        go on with. A sampled text is another one in each repetition, and the same for all settings."""
        draft = runner.draft.name if runner.draft is not None else None
        try:
            completion = runner.run(case, answer, answer.seed + repetition)
        except ConstraintError as error:
            drafted = f" with {draft}" if draft else ""
            what = f"{runner.setting.name}{drafted} for {self.work.name}: {answer.workload} {case.id}"
            self.work.skip(what, f"round {repetition + 1}: {error.why}")
            return None
        made = outcome_of(answer.case, completion.records, 0.0)
        same = {"tokens", "target_calls", "draft_calls", "drafted", "accepted", "draft_s", "verify_s"}
        is_greedy = case.workload.sampling.is_greedy  # then its answer is the same each time
        return made.model_dump(include=same) | {
            "draft": draft,
            "setting": runner.setting.name,
            "prefill_s": sum(r.total_s if r.kind == "prefill" else r.read_s for r in completion.records),
            "decode_s": made.seconds,
            "forced": sum(s == FORCED for r in completion.records for s in r.draft.sources[: r.num_accepted]),
            **(_difference(completion.tokens, answer.tokens) if is_greedy else {}),
            "finish_reason": completion.finish_reason,
            "seed": completion.seed,
        }


class _Runner:
    """A setting with its own drafters, policy and memory of spellings, which last for a block."""

    def __init__(
        self, target: LoadedTarget, setting: Setting, draft: LoadedDraft | None, prices: Prices
    ) -> None:
        self.setting = setting
        self.draft = draft
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
            return self.engine.generate(request)
        finally:
            for drafter in self._drafters:
                drafter.reset()


def _difference(tokens: Sequence[int], recorded: Sequence[int]) -> dict[str, Any]:
    if tuple(tokens) == tuple(recorded):
        return {"equal": True}
    pairs = enumerate(zip(tokens, recorded, strict=False))
    shorter = min(len(tokens), len(recorded))
    return {"equal": False, "divergence": next((i for i, (a, b) in pairs if a != b), shorter)}
