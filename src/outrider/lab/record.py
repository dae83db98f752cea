"""A target's own answers, decoded plainly: what everything else is replayed on.

After some answers the target is asked once more with drafts that are known to be right, of every length in
turn: these calls show what it really costs to check so many tokens within the engine, logits and all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from time import perf_counter
from typing import TypeVar

from outrider.core.data import Completion, DraftToken, Request, StepRecord
from outrider.core.errors import ConstraintError, GrammarError, OutriderError, PromptError
from outrider.core.notices import collect_notices, notify
from outrider.costs import CallCosts
from outrider.drafters.prediction import PredictionDrafter
from outrider.engine import Engine
from outrider.lab.loaded import LoadedTarget
from outrider.lab.prompts import Prompt, Workload
from outrider.lab.recording import Offers, Recording
from outrider.lab.rows import AnswerRow
from outrider.policy.fixed import FixedPolicy

_Key = TypeVar("_Key")

PROBED_LENGTHS = (3, 1, 7, 2, 5, 15, 4, 11, 6, 8, 0, 12, 10, 16, 9, 13, 14)
"""Drafted tokens of successive probing calls; lengths that are often drafted come first."""

_PROBED_CALLS = 8
"""About so many fit an answer; the next probed one continues after them."""


@dataclass(frozen=True, slots=True)
class Case:
    """One answer of a workload: a prompt, or a follow-up after the answers to what came before."""

    workload: Workload
    prompt: Prompt
    turn: int

    @property
    def id(self) -> str:
        """Its name within the workload: the prompt's, "PROMPT/2" for its second turn."""
        return self.prompt.id if self.turn == 0 else f"{self.prompt.id}/{self.turn + 1}"

    @property
    def max_tokens(self) -> int:
        return self.prompt.max_tokens or self.workload.max_tokens

    @property
    def earlier(self) -> list[str]:
        return [Case(self.workload, self.prompt, turn).id for turn in range(self.turn)]


def cases_of(workload: Workload) -> list[Case]:
    """All cases of a workload, in the order in which they are answered."""
    return [
        Case(workload, prompt, turn)
        for prompt in workload.prompts
        for turn in range(1 + len(prompt.follow_ups))
    ]


def request_of(case: Case, tokens: Sequence[int], seed: int, *, speculate: bool = True) -> Request:
    """The engine's request for a case whose prompt are these tokens."""
    return Request(
        prompt=tuple(tokens),
        sampling=replace(case.workload.sampling, seed=seed),
        max_tokens=case.max_tokens,
        grammar=case.prompt.grammar,
        speculate=speculate,
    )


def record_case(
    target: LoadedTarget,
    case: Case,
    answered: Mapping[str, AnswerRow],
    *,
    seed: int,
    probe: int | None = None,
) -> AnswerRow:
    """Let the target answer a case plainly; `answered` are the cases before it, by their ids.

    With `probe`, its number among those that are, calls over more tokens are timed after it.
    Raises PromptError where the prompt does not fit, BackendError when a call fails, ConstraintError where
    a grammar leaves nothing.
    """
    tokens = target.encode(case.prompt, [answered[earlier].text for earlier in case.earlier])
    request = request_of(case, tokens, seed, speculate=False)
    engine = target.engine
    engine.equip((), FixedPolicy(0))
    engine.reset()
    plain = engine.generate(request)
    decode = [record for record in plain.records if record.kind == "decode"]
    timed = [record for record in decode if not record.read_tokens]
    if probe is not None and plain.tokens and engine.target.rewinding.is_possible:
        timed += [record for record in _probe(engine, request, plain, probe) if record.kind == "decode"]
    return AnswerRow(
        target=target.name,
        workload=case.workload.name,
        case=case.id,
        prompt=tokens,
        tokens=plain.tokens,
        text=plain.text,
        finish_reason=plain.finish_reason,
        prefill_s=sum(r.total_s if r.kind == "prefill" else r.read_s for r in plain.records),
        decode_s=sum(record.total_s - record.read_s for record in decode),
        calls=tuple((r.num_evaluated, r.position, r.verify_s, r.total_s - r.verify_s) for r in timed),
        seed=plain.seed,
    )


def _probe(engine: Engine, request: Request, plain: Completion, number: int) -> Sequence[StepRecord]:
    """Calls over every number of tokens; the prompt's KV is still there."""
    engine.equip((_KnownAnswer(number * _PROBED_CALLS),), FixedPolicy(max(PROBED_LENGTHS), 0.0))
    try:
        return engine.generate(replace(request, speculate=True, prediction=plain.tokens)).records
    except OutriderError:  # the answer itself is there
        return ()


class _KnownAnswer(PredictionDrafter):
    """Offers so much of an answer that is known to be right as the next length says."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self._asked = first

    def propose(self, sequence: int, prefix: Sequence[int]) -> Iterator[DraftToken]:
        length = PROBED_LENGTHS[self._asked % len(PROBED_LENGTHS)]
        self._asked += 1
        return islice(super().propose(sequence, prefix), length)


def recording_of(
    target: LoadedTarget, case: Case, row: AnswerRow, offers: Mapping[str, Offers] | None = None
) -> Recording:
    """The recording of an answer, with these offers by drafter's name."""
    constrain = target.constrain(case.prompt.grammar)
    whole_ratio = len(row.tokens) / case.max_tokens if row.finish_reason == "cancelled" else 1.0
    given = row.case, row.workload, row.prompt, row.tokens, row.finish_reason, offers or {}
    return Recording(*given, constrain=constrain, whole_ratio=whole_ratio)


ANSWER_TOKENS = 64
"""The most of an answer: many short answers tell more about other prompts than few long ones."""
_MIN_TOKENS = 16
SHORT_TOKENS = 8
"""Nothing can be saved on shorter answers, so they say nothing about drafts."""
_MIN_ANSWERS = 4
"""Made even if the time is up: fewer tell too little about others."""
MAX_ANSWERS = 24
_WANTED_ANSWERS = 8
"""An answer may take such a part of the time: a slow target makes shorter ones, not fewer."""


def questions_of(workloads: Sequence[Workload], target: LoadedTarget) -> list[Case]:
    """The prompts of all workloads in turn, those of each in a shuffled order. Of conversations with
    follow-ups the first turn is asked.

    Those that leave no room for an answer are left out, and a notice says so. Raises PromptError where none
    can be asked.
    """
    with collect_notices() as notices:
        columns = [_column(workload, target) for workload in workloads]
    notify(*notices)
    found = [case for row in zip_longest(*columns) for case in row if case is not None]
    if not found:
        why = notices[-1] if notices else "there are none"
        raise PromptError("prompts", why, "Give others (--prompts), or a larger context (-c).")
    return found


def _column(workload: Workload, target: LoadedTarget) -> list[Case]:
    prompts, context = list(workload.prompts), target.model.context_length
    random.Random(0).shuffle(prompts)
    found: list[Case] = []
    too_long = 0
    for prompt in prompts:
        try:
            is_short = len(target.encode(prompt)) + 2 * ANSWER_TOKENS <= context
        except PromptError as error:
            notify(f"{workload.name}, {prompt.id} is left out: {error.why}")
            continue
        found += [Case(workload, prompt, 0)] if is_short else []
        too_long += not is_short
    if too_long:
        of_all = f"{too_long} of the {len(prompts)} prompts of {workload.name}"
        notify(f"{of_all} are left out: they do not fit the target's context of {context} tokens")
    return found


def record_answers(
    target: LoadedTarget,
    questions: Sequence[Case],
    costs: CallCosts,
    *,
    seconds: float,
    most: int = MAX_ANSWERS,
    clock: Callable[[], float] = perf_counter,
    progress: Callable[[float], None] = lambda _part: None,
) -> list[AnswerRow]:
    """The answers to as many questions as the time allows, of the first `most`; notices say what is left out.

    Each may take its part of the time, which `costs` turn into tokens; one that would have gone on is
    "cancelled". After every third answer, calls over more tokens are timed. `progress` is called with the
    part of the time that is spent. Raises PromptError where none is left, BackendError when a call fails.
    """
    started = clock()
    found: list[AnswerRow] = []
    short = 0
    for number, case in enumerate(questions[:most]):
        spent = clock() - started
        progress(min(spent / seconds, 1.0))
        if spent > seconds and len(found) >= _MIN_ANSWERS:
            break
        prompt_tokens = len(target.encode(case.prompt))
        token_s = costs.call_s(1, context=prompt_tokens)
        affordable = int((seconds / _WANTED_ANSWERS - costs.prefill_s(prompt_tokens)) / token_s)
        limit = min(max(affordable, _MIN_TOKENS), ANSWER_TOKENS, case.max_tokens)
        short_case = replace(case, prompt=replace(case.prompt, max_tokens=limit))
        probe = number // 3 if number % 3 == 0 else None
        try:
            row = record_case(target, short_case, {}, seed=case.workload.sampling.seed or 0, probe=probe)
        except (GrammarError, ConstraintError) as error:
            notify(f"{case.workload.name}, {case.prompt.id} is left out: {error.why}")
            continue
        if len(row.tokens) < SHORT_TOKENS:
            short += 1
            continue
        if row.finish_reason == "length" and limit < case.max_tokens:  # no policy is to know where it ends
            row = row.model_copy(update={"finish_reason": "cancelled"})
        found.append(row)
    if short:
        notify(f"left out for ending within a few tokens, where drafts save nothing: {short} of the answers")
    if not found:
        why = f"the target answers none of them with {SHORT_TOKENS} tokens or more"
        raise PromptError("prompts", why, "Give others (--prompts).")
    return found


def answered(
    engine: Engine,
    following: Callable[[], tuple[_Key, Request] | None],
    is_over: Callable[[], bool] = lambda: False,
) -> Generator[tuple[_Key, Completion | OutriderError]]:
    """The requests' completions as they end, or why a request cannot be answered.

    `following` gives the next request under a name of the caller's, None where there is none at the moment.
    Once `is_over`, which is asked before each call, all ends as far as it has come. The engine has no other
    requests, and stores nothing once this is closed. Raises BackendError when a call fails.
    """
    running: dict[int, _Key] = {}
    held: tuple[_Key, Request] | None = None
    try:
        while not is_over():
            while (held := held or following()) is not None and engine.has_room(held[1]):
                (key, request), held = held, None
                try:
                    running[engine.submit(request)] = key
                except OutriderError as error:
                    yield key, error
            if not running:
                return
            for update in engine.step():
                if (ended := update.error or update.completion) is not None:
                    yield running.pop(update.record.request), ended
        for request_id, key in running.items():
            if (completion := engine.cancel(request_id)) is not None:
                yield key, completion
    finally:
        for request_id in running:
            engine.cancel(request_id)
        engine.reset()
