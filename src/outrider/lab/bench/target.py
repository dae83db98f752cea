"""The work of a sweep on one target: answers, costs, what drafts offer, predictions, and real runs in blocks
of plain decoding and the chosen settings in turn over the same cases."""

from __future__ import annotations

import math
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
from outrider.core.errors import BackendError, ConstraintError, GrammarError, ModelFileError, PromptError
from outrider.drafters.lookup import SuffixDrafter
from outrider.drafters.model import ModelDrafter
from outrider.engine import PreferredTokenization
from outrider.lab.bench.plan import SweepPlan
from outrider.lab.loaded import LoadedDraft, LoadedTarget
from outrider.lab.models import OWN_HEAD, ModelFile
from outrider.lab.prompts import Workload
from outrider.lab.record import SHORT_TOKENS, Case, cases_of, record_case, request_of
from outrider.lab.replay import Prices, outcome_of, predict
from outrider.lab.rows import AnswerRow, BlockRow, DoneRow, PairRow, PredictionRow, RunRow, SkippedRow
from outrider.lab.settings import AUTO, AUTO_LOOKUP, PLAIN, Setting
from outrider.lab.subject import Subject
from outrider.policy.fixed import FORCED

_DEFAULT_CONTEXT_TOKENS = 4096
_PROBED_ANSWERS = 2
"""of each workload, after which calls of every size are timed"""
_SLOWNESS = 1.25
"""what runs are taken to need beside what was predicted of them"""
_LEAST_REPETITIONS = 2
"""that the settings which run have to have time for: a single one has no spread"""


def context_for(workloads: Sequence[Workload]) -> int:
    """Tokens of a context that holds their prompts and answers."""
    needed = [_DEFAULT_CONTEXT_TOKENS]
    for workload in workloads:
        for prompt in workload.prompts:
            asked = [repr(prompt.messages), repr(prompt.tools), *prompt.follow_ups]
            answers = (1 + len(prompt.follow_ups)) * (prompt.max_tokens or workload.max_tokens)
            needed.append(sum(map(len, asked)) // 2 + answers)
    return max(needed)


class Entry(NamedTuple):
    """What runs in a block: a setting with its draft."""

    draft: str | None
    setting: str


_PLAIN = Entry(None, PLAIN.name)


@dataclass
class TargetWork:
    """What a plan wants to know of a target."""

    plan: SweepPlan
    subject: Subject
    _end_s: float = math.inf
    """of real runs, by `perf_counter`"""
    _drafts: dict[str, LoadedDraft] = field(default_factory=dict)

    def find_out(self, drafts: Sequence[ModelFile], left_s: Callable[[], float]) -> None:
        """Everything that has no row yet: answers, costs, offers, predictions, then real runs for the seconds
        that are left once they begin."""
        self.record()
        if not self.subject.cases():
            why = f"it answered none of the prompts with {SHORT_TOKENS} tokens or more"
            self.subject.skip(self.subject.name, why)
            self.subject.append(DoneRow(target=self.subject.name, repetitions=self.plan.repetitions))
            return
        self.subject.measure_target()
        self.score(drafts)
        self.replay()
        self._end_s = perf_counter() + left_s()
        self._run()

    def record(self) -> None:
        """Let the target answer every case that it has not answered."""
        cases = [case for workload in self.subject.workloads for case in cases_of(workload)]
        for number, case in enumerate(cases):
            what = f"{self.subject.name}: {case.workload.name} {case.id}"
            self.subject.say("recording", what, number / len(cases))
            if not self.subject.of(SkippedRow, what=what):
                self._record(case, what)

    def _record(self, case: Case, what: str) -> None:
        answered = self.subject.answered(case.workload.name)
        if any(earlier not in answered for earlier in case.earlier):
            self.subject.skip(what, "the turn before it was left out")
            return
        if (row := answered.get(case.id)) is None:
            number = cases_of(case.workload).index(case)
            offset = [w.name for w in self.subject.workloads].index(case.workload.name) * _PROBED_ANSWERS
            probe = number + offset if number < _PROBED_ANSWERS else None
            seed = (case.workload.sampling.seed or 0) + number
            try:
                row = record_case(self.subject.target, case, answered, seed=seed, probe=probe)
            except (PromptError, GrammarError, ConstraintError) as error:
                self.subject.skip(what, f"{error.what}: {error.why}")
                return
            self.subject.append(row)
        if len(row.tokens) < SHORT_TOKENS:  # also after a run that was killed before it said so
            self.subject.skip(what, f"its answer ends after {len(row.tokens)} tokens")

    def score(self, drafts: Sequence[ModelFile]) -> None:
        """What those drafts offer that the target can have, and what they cost."""
        known = self.subject
        if not known.can_draft:
            why = "it cannot take tokens back (recurrent or hybrid state): it decodes plainly"
            known.skip(f"drafts and lookup for {known.name}", why)
        if OWN_HEAD in self.plan.drafts and known.file.card.own_head is None:
            known.skip(f"{OWN_HEAD} for {known.name}", "its file has no head of its own")
        for draft in drafts:
            if draft.fingerprint == known.file.fingerprint and not draft.is_head:
                known.skip(f"{draft.name} for {known.name}", "it is the target itself")
            elif known.can_draft:
                try:
                    known.score(draft)
                except (ModelFileError, BackendError) as error:
                    known.skip(f"{draft.name} for {known.name}", f"it could not be loaded: {error.why}")

    def replay(self) -> None:
        """Every setting over the recorded answers, without a draft model and with each that was scored."""
        for draft in [None, *self.subject.drafts]:
            prices = self.subject.prices(draft)
            for workload in self.subject.workloads:
                self._predict(draft, workload, prices)

    def _predict(self, draft: str | None, workload: Workload, prices: Prices) -> None:
        cases = self.subject.recordings(draft, workload)
        cell: dict[str, Any] = {"draft": draft, "workload": workload.name}
        known = {row.setting for row in self.subject.of(PredictionRow, **cell)}
        settings = self.plan.settings(draft, can_draft=self.subject.can_draft)
        for setting in settings if cases else ():
            if setting.name in known:
                continue
            self.subject.say("replaying", f"{self.subject.name}, {draft or 'no draft'}: {workload.name}")
            outcomes = tuple(predict(cases, setting, prices))
            row = PredictionRow(target=self.subject.name, setting=setting.name, cases=outcomes, **cell)
            self.subject.append(row)

    # Real runs

    @property
    def _left_s(self) -> float:
        return self._end_s - perf_counter()

    def _run(self) -> None:
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
            todo = [(number, w) for number in range(self.plan.repetitions) for w in fitting]
            todo = [(number, w) for number, w in todo if not self._is_done(number, w, fitting[w])]
            for place, (number, workload) in enumerate(todo):
                later = [self._takes_s(w, fitting[w]) for _, w in todo[place:]]
                # The first repetition runs as long as there is any time: without it nothing is measured.
                if later[0] > self._left_s and (number > 0 or self._left_s <= 0):
                    is_whole = False
                    break
                self._block(number, workload, fitting[workload], (place, len(todo)))
        if is_whole:
            self.subject.append(DoneRow(target=self.subject.name, repetitions=self.plan.repetitions))

    # What runs

    def _chosen(self) -> dict[str, list[Entry]]:
        """By workload plain decoding and what was chosen, what matters most first: the automatic choice of
        each draft, by its prediction; then the other settings, by theirs."""
        found: dict[str, list[Entry]] = {}
        pooled: dict[Entry, list[float]] = defaultdict(list)
        for row in self.subject.of(PredictionRow):
            pooled[Entry(row.draft, row.setting)].append(predicted_ratio(row))

        def rank(entry: Entry) -> tuple[bool, float]:
            return not Setting.of(entry.setting).is_auto, -geometric_mean(pooled[entry])

        for workload in self.subject.workloads:
            rows = self.subject.of(PredictionRow, workload=workload.name)
            chosen: list[Entry] = []
            for draft in dict.fromkeys(row.draft for row in rows):
                if draft is None or draft in self.subject.drafts:
                    cell = [row for row in rows if row.draft == draft]
                    chosen += [Entry(draft, setting) for setting in choose(cell, self.plan)]
            if rows:
                found[workload.name] = [_PLAIN, *sorted(chosen, key=rank)]
        return found

    def _fitting(self, chosen: dict[str, list[Entry]]) -> dict[str, list[Entry]]:
        """As much of it as there is time to repeat; plain decoding and the first in any case."""
        repetitions = min(_LEAST_REPETITIONS, self.plan.repetitions)
        for size in range(max(map(len, chosen.values()), default=0), 1, -1):
            cut = {workload: entries[:size] for workload, entries in chosen.items()}
            takes_s = repetitions * sum(self._takes_s(w, entries) for w, entries in cut.items())
            if takes_s <= self._left_s or size == 2:
                return cut
        return chosen

    def _takes_s(self, workload: str, entries: Sequence[Entry]) -> float:
        predicted: dict[Entry, float] = {}
        for row in self.subject.of(PredictionRow, workload=workload):
            predicted[Entry(row.draft, row.setting)] = sum(case.seconds for case in row.cases)
            predicted.setdefault(_PLAIN, sum(case.plain_s for case in row.cases))
        prompts_s = sum(answer.prefill_s for _, answer in self._cases(workload))
        return _SLOWNESS * sum(predicted.get(entry, 0.0) for entry in entries) + prompts_s

    def _is_done(self, number: int, workload: str, entries: Sequence[Entry]) -> bool:
        """Whether the block is there with all of this: one that had less time is run again."""
        block = self._block_id(number, workload)
        ran = {Entry(row.draft, row.setting) for row in self.subject.of(RunRow, block=block)}
        return bool(self.subject.of(BlockRow, block=block)) and ran >= set(entries)

    def _block_id(self, number: int, workload: str) -> str:
        return f"{self.subject.name} | {workload} | {number + 1}"

    def _cases(self, workload: str) -> list[tuple[Case, AnswerRow]]:
        return [pair for pair in self.subject.cases() if pair[1].workload == workload]

    def _load(self, stack: ExitStack, wanted: set[str | None]) -> None:
        for name, file in self.subject.drafts.items():
            if name not in wanted:
                continue
            self.subject.say("loading", name)
            what = f"real runs of {name} for {self.subject.name}"
            try:
                loaded = self.subject.loader.draft(file, self.subject.target)
            except (ModelFileError, BackendError) as error:  # all of them at once take more memory
                self.subject.skip(what, f"it could not be loaded: {error.why}")
                continue
            assert not isinstance(loaded, PairRow), "it did line up before"
            self._drafts[name] = loaded[0]
            stack.callback(loaded[0].close)

    # Running it

    def _block(self, number: int, workload: str, entries: Sequence[Entry], place: tuple[int, int]) -> None:
        """Every request once; a row says in the end that the block is complete. `place`: which block of how
        many it is."""
        work, block = self.subject, self._block_id(number, workload)
        started_s = perf_counter()
        runners = [
            _Runner(work.target, Setting.of(setting), self._drafts.get(draft or ""), work.prices(draft))
            for draft, setting in entries
        ]
        cases = self._cases(workload)
        total, done = len(cases) * len(runners), 0
        for case, answer in cases:
            turns = [*runners]
            random.Random(f"{self.plan.seed} {block} {case.id}").shuffle(turns)
            for engine in {runner.engine for runner in runners}:
                engine.reset()
            for order, runner in enumerate(turns):
                done += 1
                what = f"{work.name}: {workload}, round {number + 1}, {done} of {total}"
                work.say("running", what, (place[0] + done / total) / place[1])
                at_s = perf_counter() - started_s
                if (made := self._request(runner, case, answer, number)) is not None:
                    made |= {"block": block, "target": work.name, "workload": workload, "case": answer.case}
                    made |= {"repetition": number, "order": order, "started_s": at_s}
                    work.append(RunRow(**made))
        work.append(BlockRow(block=block, target=work.name, workload=workload, repetition=number))

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
            what = f"{runner.setting.name}{drafted} for {self.subject.name}: {answer.workload} {case.id}"
            self.subject.skip(what, f"round {repetition + 1}: {error.why}")
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


def predicted_ratio(row: PredictionRow) -> float:
    """Geometric mean over the cases of plain decoding's seconds over this setting's."""
    ratios = [case.plain_s / case.seconds for case in row.cases if case.seconds > 0]
    return geometric_mean(ratios) if ratios else 1.0


def choose(rows: Sequence[PredictionRow], plan: SweepPlan) -> list[str]:
    """The settings of one cell that run for real, what matters most first: the automatic choice, the
    finalists (of those that would do the same the first), the controls. `rows` are its predictions."""
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
