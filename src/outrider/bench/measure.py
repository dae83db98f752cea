"""Real runs: plain decoding, the chosen settings and other engines, in turn over the same cases.

A block is one workload, once: for every case all contestants in an order of its own, so that a machine that
slows down does so for all of them. Our own settings share the target and the KV of the prompt, which is
read once a case; draft models read it anew each time, for they are charged with it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Protocol

from outrider.bench.contestants import Answer
from outrider.bench.loaded import LoadedDraft, LoadedTarget
from outrider.bench.predict import Prices, outcome_of
from outrider.bench.record import Case, request_of
from outrider.bench.rows import AnswerRow, BlockRow, RunRow
from outrider.bench.settings import PLAIN, Setting
from outrider.core.contracts import Drafter
from outrider.core.data import Completion, StepRecord
from outrider.drafters.model import ModelDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine import Spelling
from outrider.policy.forced import FORCED

__all__ = ["Block", "Entry", "Rival", "run_block"]

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
        """Its answer to a case whose earlier turns were answered so."""
        ...


@dataclass(frozen=True, slots=True)
class Block:
    """Who runs on which cases. `draft` is noted of rivals that were given one."""

    id: str
    workload: str
    repetition: int
    cases: Sequence[tuple[Case, AnswerRow]]
    entries: Sequence[Entry]
    rivals: Sequence[Rival] = ()
    seed: int = 0


def run_block(target: LoadedTarget, block: Block) -> Iterator[RunRow | BlockRow]:
    """Run a block; its last row says that it is complete. Raises BackendError when a call fails."""
    runners = [_Runner(target, entry) for entry in block.entries]
    started = perf_counter()
    calls_s: list[float] = []
    answered = {answer.case: answer for _, answer in block.cases}
    for case, answer in block.cases:
        turns: list[_Runner | Rival] = [*runners, *block.rivals]
        random.Random(f"{block.seed} {block.id} {case.id}").shuffle(turns)
        target.engine.reset()
        for order, runner in enumerate(turns):
            at_s = perf_counter() - started
            if isinstance(runner, _Runner):
                completion = runner.run(case, answer, _seed(answer, block.repetition))
                calls_s += [r.verify_s for r in completion.records if _is_single(r)]
                row = _own_row(block, target.name, runner.entry, answer, completion)
            else:
                reply = runner.answer(case, answered, _seed(answer, block.repetition))
                row = _rival_row(block, target.name, runner.name, answer, reply)
            yield row.model_copy(update={"order": order, "started_s": at_s})
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
        self._policy = entry.setting.policy(entry.prices.target, entry.prices.drafts(entry.setting))
        self._spelling = Spelling()
        self._drafters: list[Drafter] = [SuffixDrafter()] if entry.setting.uses_lookup else []
        if entry.setting.uses_model and entry.draft is not None:
            self._drafters.append(ModelDrafter(entry.draft.model, entry.draft.alignment))

    def run(self, case: Case, answer: AnswerRow, seed: int) -> Completion:
        self._target.engine.equip(self._drafters, self._policy, self._spelling)
        request = request_of(case, answer.prompt, seed, speculate=self.entry.setting != PLAIN)
        try:
            return self._target.engine.generate(request)
        finally:
            for drafter in self._drafters:
                drafter.reset()


def _own_row(block: Block, target: str, entry: Entry, answer: AnswerRow, completion: Completion) -> RunRow:
    made = outcome_of(answer.case, completion.records, 0.0)
    equal, divergence = _compared(completion.tokens, answer, block)
    forced = sum(source == FORCED for r in completion.records for source in r.draft.sources[: r.num_accepted])
    return RunRow(
        block=block.id,
        target=target,
        draft=entry.draft.name if entry.draft is not None else None,
        setting=entry.setting.name,
        workload=block.workload,
        case=answer.case,
        repetition=block.repetition,
        order=0,
        tokens=made.tokens,
        timed_tokens=made.tokens,
        prefill_s=sum(r.total_s for r in completion.records if r.kind == "prefill"),
        decode_s=made.seconds,
        target_calls=made.target_calls,
        draft_calls=made.draft_calls,
        drafted=made.drafted,
        accepted=made.accepted,
        draft_s=made.draft_s,
        verify_s=made.verify_s,
        forced=forced,
        equal=equal,
        divergence=divergence,
        finish_reason=completion.finish_reason,
        seed=completion.seed,
    )


def _compared(tokens: Sequence[int], answer: AnswerRow, block: Block) -> tuple[bool | None, int | None]:
    [case] = [case for case, known in block.cases if known is answer]
    if not case.workload.sampling.is_greedy:
        return None, None
    if tuple(tokens) == answer.tokens:
        return True, None
    pairs = zip(tokens, answer.tokens, strict=False)
    shorter = min(len(tokens), len(answer.tokens))
    return False, next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), shorter)


def _rival_row(block: Block, target: str, name: str, answer: AnswerRow, reply: Answer) -> RunRow:
    drafted = None if reply.drafted is None else (reply.drafted,)
    accepted = None if reply.accepted is None else (reply.accepted,)
    return RunRow(
        block=block.id,
        target=target,
        draft=None,
        contestant=name,
        setting=name,
        workload=block.workload,
        case=answer.case,
        repetition=block.repetition,
        order=0,
        tokens=reply.tokens,
        timed_tokens=reply.timed_tokens,
        prefill_s=reply.prefill_s,
        decode_s=reply.decode_s,
        target_calls=None,
        draft_calls=None,
        drafted=drafted,
        accepted=accepted,
        equal=None if block.cases[0][0].workload.sampling.temperature else reply.text == answer.text,
        finish_reason=reply.finish_reason,
    )
