"""A target's own answers, decoded plainly: what everything else is replayed on.

After some answers the target is asked once more with drafts that are known to be right, of every length in
turn: these calls show what it really costs to check so many tokens within the engine, logits and all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from outrider.core.contracts import DraftRequest, StoppingRule
from outrider.core.data import Completion, Draft, DraftWork, Request, StepRecord
from outrider.core.errors import OutriderError
from outrider.lab.loaded import LoadedTarget
from outrider.lab.prompts import Prompt, Workload
from outrider.lab.rows import AnswerRow
from outrider.policy import FixedPolicy

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
    def earlier(self) -> list[str]:
        """The cases whose answers stand in front of it."""
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
        max_tokens=case.prompt.max_tokens or case.workload.max_tokens,
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
    calls = list(map(_call, decode))
    if probe is not None and plain.tokens and engine.target.rewind != "none":
        calls += _probe(target, request, plain, probe)
    return AnswerRow(
        target=target.name,
        workload=case.workload.name,
        case=case.id,
        prompt=tokens,
        tokens=plain.tokens,
        text=plain.text,
        finish_reason=plain.finish_reason,
        prefill_s=sum(record.total_s for record in plain.records if record.kind == "prefill"),
        decode_s=sum(record.total_s for record in decode),
        own_s=sum(record.total_s - record.verify_s for record in decode),
        calls=tuple(calls),
        seed=plain.seed,
    )


def _call(record: StepRecord) -> tuple[int, int, float, float]:
    return record.num_evaluated, record.position, record.verify_s, record.total_s - record.verify_s


def _probe(
    target: LoadedTarget, request: Request, plain: Completion, number: int
) -> Iterator[tuple[int, int, float, float]]:
    """Calls over every number of tokens; the prompt's KV is still there."""
    engine = target.engine
    known = _KnownAnswer(plain.tokens, number * _PROBED_CALLS)
    engine.equip((known,), FixedPolicy(max(PROBED_LENGTHS), 0, 0.0))
    try:
        again = engine.generate(replace(request, speculate=True))
    except OutriderError:  # the answer itself is there
        return
    for record in again.records:
        if record.kind == "decode":
            yield _call(record)


class _KnownAnswer:
    """A Drafter that knows the answer, and offers so much of it as the next length says."""

    name = "known answer"
    is_free = True

    def __init__(self, answer: Sequence[int], first: int) -> None:
        self._answer = answer
        self._done = 0
        self._asked = first

    def begin(self, sequence: int, request: Request) -> None:
        del sequence, request
        self._done = 0

    def observe(self, sequence: int, tokens: Sequence[int]) -> None:
        del sequence
        self._done += len(tokens)

    def end(self, sequence: int) -> None:
        """Nothing is left to do."""

    def reset(self) -> None:
        self._done = 0

    def propose(
        self, requests: Sequence[DraftRequest], stopping: StoppingRule
    ) -> tuple[list[Draft], DraftWork]:
        del stopping
        [request] = requests
        length = PROBED_LENGTHS[self._asked % len(PROBED_LENGTHS)]
        self._asked += 1
        start = self._done + len(request.prefix)
        tokens = tuple(self._answer[start : start + min(length, request.max_tokens)])
        size = len(tokens)
        return [Draft(tokens, None, (0.99,) * size, (self.name,) * size)], DraftWork()
