"""A few answers of the target's own, decoded plainly within a time: what everything else is replayed on."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from time import perf_counter
from typing import Any

from outrider.core.errors import ConstraintError, GrammarError, PromptError
from outrider.costs import CallCosts
from outrider.lab.loaded import LoadedTarget
from outrider.lab.predict import Scored
from outrider.lab.prompts import Prompt, Workload
from outrider.lab.record import Case, record_case
from outrider.lab.replay import Recording
from outrider.lab.rows import AnswerRow

ANSWER_TOKENS = 64
"""The most of an answer: many short answers tell more about other prompts than few long ones."""
_MIN_TOKENS = 16
_SHORT_TOKENS = 8
"""Nothing can be saved on shorter answers, so they say nothing about drafts."""
_MIN_ANSWERS = 4
"""Made even if the time is up: fewer tell too little about others."""
_MAX_ANSWERS = 24
_WANTED_ANSWERS = 8
"""An answer may take such a part of the time: a slow target makes shorter ones, not fewer."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt of a workload, in tokens too."""

    case: Case
    tokens: tuple[int, ...]

    @property
    def max_tokens(self) -> int:
        """How long its answer may become in earnest."""
        return self.case.prompt.max_tokens or self.case.workload.max_tokens


@dataclass(frozen=True, slots=True)
class Answer:
    """A recorded answer. `whole_ratio` is its part of the answer that it would have become: what is read once
    for the whole answer counts for it in this part."""

    question: Question
    row: AnswerRow
    scored: Scored
    whole_ratio: float


def questions_of(workloads: Sequence[Workload], target: LoadedTarget) -> tuple[list[Question], list[str]]:
    """The prompts of all workloads in turn, those of each in a shuffled order, and lines for the user. Of
    conversations with follow-ups the first turn is asked.

    Raises PromptError where none of them can be asked.
    """
    notices: list[str] = []
    columns = [_column(workload, target, notices) for workload in workloads]
    found = [question for row in zip_longest(*columns) for question in row if question is not None]
    if not found:
        why = notices[-1] if notices else "there are none"
        raise PromptError("prompts", why, "Name a workload or a file (--prompts).")
    return found, notices


def _column(workload: Workload, target: LoadedTarget, notices: list[str]) -> list[Question]:
    prompts = list(workload.prompts)
    random.Random(0).shuffle(prompts)
    if target.template is None and any(not isinstance(prompt.messages, str) for prompt in prompts):
        notices.append(
            f"{target.name} has no chat template: conversations of {workload.name} are read as text"
        )
        prompts = [_as_text(prompt) for prompt in prompts]
    found = []
    for prompt in prompts:
        case = Case(workload, prompt, 0)
        try:
            found.append(Question(case, target.encode(prompt)))
        except PromptError as error:
            notices.append(f"{workload.name}, {prompt.id} is left out: {error.why}")
    return found


def _as_text(prompt: Prompt) -> Prompt:
    if isinstance(prompt.messages, str):
        return prompt
    return replace(prompt, messages="\n\n".join(map(_text, prompt.messages)) + "\n\n")


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)


def record_answers(
    target: LoadedTarget,
    questions: Sequence[Question],
    costs: CallCosts,
    *,
    seconds: float,
    clock: Callable[[], float] = perf_counter,
    progress: Callable[[float], None] = lambda _part: None,
    left_out: Callable[[str], None] = lambda _why: None,
) -> tuple[list[Answer], int]:
    """The answers to as many questions as the time allows, and how many were left out as too short.

    Each may take its part of the time, which `costs` turn into tokens. After every third answer, calls over
    more tokens are timed. `progress` is called with the part of the time that is spent, `left_out` with why a
    question cannot be asked: its grammar cannot be used or leaves nothing to say.

    Raises BackendError when a call fails.
    """
    started = clock()
    found: list[Answer] = []
    short = 0
    for number, question in enumerate(questions[:_MAX_ANSWERS]):
        spent = clock() - started
        progress(min(spent / seconds, 1.0))
        if spent > seconds and len(found) >= _MIN_ANSWERS:
            break
        token_s = costs.call_s(1, context=len(question.tokens))
        affordable = int((seconds / _WANTED_ANSWERS - costs.prefill_s(len(question.tokens))) / token_s)
        limit = min(max(affordable, _MIN_TOKENS), ANSWER_TOKENS, question.max_tokens)
        probe = number // 3 if number % 3 == 0 else None
        try:
            answer = _record(target, question, limit, probe)
        except (GrammarError, ConstraintError) as error:
            case = question.case
            left_out(f"{case.workload.name}, {case.prompt.id} is left out: {error.why}")
            continue
        if answer is None:
            short += 1
        else:
            found.append(answer)
    return found, short


def _record(target: LoadedTarget, question: Question, limit: int, probe: int | None) -> Answer | None:
    case = replace(question.case, prompt=replace(question.case.prompt, max_tokens=limit))
    seed = case.workload.sampling.seed or 0
    row = record_case(target, case, {}, seed=seed, probe=probe)
    if len(row.tokens) < _SHORT_TOKENS:
        return None
    is_cut = row.finish_reason == "length" and limit < question.max_tokens
    # An answer that was cut for time would have gone on: no policy is to know where it ends.
    reason = "cancelled" if is_cut else row.finish_reason
    recording = Recording(row.case, row.workload, row.prompt, row.tokens, reason, {})
    whole_ratio = len(row.tokens) / question.max_tokens if is_cut else 1.0
    return Answer(question, row, Scored(recording, target.constrain(case.prompt.grammar)), whole_ratio)
