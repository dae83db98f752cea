"""The target answers many prompts at once, and what it would have said at each place is counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from time import perf_counter

import numpy as np

from outrider.core.data import Completion, Request
from outrider.core.params import SamplingParams
from outrider.engine import Engine
from outrider.lab.record import answered
from outrider.lab.trim.tokens import Answer

_MAX_TOKENS = 96
"""of an answer: many short ones tell more about others than few long ones"""
_TOP = 64
"""tokens of each place that are counted, by their probability"""


def answer_prompts(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    seconds: float,
    progress: Callable[[float], None] = lambda _part: None,
    clock: Callable[[], float] = perf_counter,
) -> list[Answer]:
    """The target's most likely answers, in its own ids, to as many prompts as the time allows, as many at
    once as it has sequences. The engine stores nothing before and after. Raises BackendError when a call
    fails."""
    started, greedy = clock(), SamplingParams(temperature=0)
    room = engine.target.capacity_tokens // engine.target.max_sequences - _MAX_TOKENS
    fitting = (tuple(prompt) for prompt in prompts if 0 < len(prompt) <= room)

    def following() -> tuple[None, Request] | None:
        prompt = next(fitting, None)
        return None if prompt is None else (None, Request(prompt, greedy, _MAX_TOKENS, logprobs=_TOP))

    def is_over() -> bool:
        spent = clock() - started
        progress(min(spent / seconds, 1.0))
        return spent >= seconds

    with closing(answered(engine, following, is_over)) as ended:
        done = [found for _, found in ended if isinstance(found, Completion) and found.tokens]
    return [_counted(completion, engine.target.vocabulary.size) for completion in done]


def _counted(completion: Completion, size: int) -> Answer:
    mass = np.zeros(size, dtype=np.float32)
    for scored in completion.logprobs:
        tokens, log_probs = zip(*scored.top, strict=True)
        mass[list(tokens)] += np.exp(log_probs, dtype=np.float32)
    return Answer(np.array(completion.tokens), mass)
