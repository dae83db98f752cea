"""Which tokens matter: how often each is used in prompts and the target's answers, what no draft can do
without, what fewer tokens lose."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
import numpy.typing as npt

from outrider.core.contracts import Vocabulary
from outrider.core.data import Completion, Request
from outrider.core.params import SamplingParams
from outrider.engine import Engine
from outrider.lab.prompts import Prompt, Workload, conversation_hash, is_held_out
from outrider.lab.record import answered
from outrider.lab.workloads import BUILT_IN, load_workload, text_of
from outrider.lab.written_prompts import written_prompts
from outrider.models.vocab.subset import Ids, ranked

_BUNDLED = 1200
"""bundled prompts that are counted; the order is always the same"""
_HELD_OUT_SHARE = 0.25
"""of prompts of the user's own"""
_MIN_HELD_OUT = 4
ANSWER_TOKENS = 96
"""of an answer: many short ones tell more about others than few long ones"""
_TOP = 64
"""tokens of each place that are counted, by their probability"""
_FOLDS = 8

Uses = npt.NDArray[np.float64]
"""how often each token is used, or how likely it was, added up"""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts whose tokens and answers are counted, and workloads with which a draft is measured; the two
    have no conversation in common. `origin`: the first, in words."""

    counted: tuple[Prompt, ...]
    measured: tuple[Workload, ...]
    origin: str


def prompts_of(own: Sequence[Workload]) -> Prompts:
    """The prompts of the user's own workloads, a part of which measures; without any the bundled ones, and
    the built-in workloads to measure with."""
    built_in = tuple(map(load_workload, BUILT_IN))
    if not own:
        counted = tuple(written.prompt for written in written_prompts(_BUNDLED))
        return Prompts(counted, built_in, "the bundled prompts")
    held_out = [tuple(p for p in w.prompts if is_held_out(p, _HELD_OUT_SHARE)) for w in own]
    measured = tuple(replace(w, prompts=some) for w, some in zip(own, held_out, strict=True) if some)
    if sum(map(len, held_out)) < _MIN_HELD_OUT:
        measured = built_in
    never = {conversation_hash(prompt) for workload in measured for prompt in workload.prompts}
    counted = tuple(p for w in own for p in w.prompts if conversation_hash(p) not in never)
    return Prompts(counted, measured, ", ".join(workload.name for workload in own))


def uses_in(vocabulary: Vocabulary, texts: Iterable[str]) -> Uses:
    """How often each token is used in some texts."""
    uses = np.zeros(vocabulary.size)
    for text in texts:
        np.add.at(uses, np.asarray(vocabulary.tokenize(text, add_special=False), dtype=np.int64), 1)
    return uses


def texts_of(prompts: Iterable[Prompt]) -> Iterable[str]:
    """Every text of some prompts, each once: templates share long ones."""
    found: dict[str, None] = {}
    for prompt in prompts:
        if isinstance(prompt.messages, str):
            found[prompt.messages] = None
        else:
            found |= dict.fromkeys(text_of(message.get("content")) or "" for message in prompt.messages)
        found |= dict.fromkeys(prompt.follow_ups)
    return found


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the target's in the draft's ids, -1 for what the draft lacks; `mass`: how likely each
    token was, added up over its places, None where that is not known."""

    tokens: Ids
    mass: npt.NDArray[np.float32] | None = None


def answer_prompts(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    seconds: float,
    progress: Callable[[float], None] = lambda _part: None,
    clock: Callable[[], float] = perf_counter,
) -> list[Answer]:
    """The target's most likely answers, in its own ids, to as many prompts as the time allows, as many at
    once as it has sequences; those that leave no room are passed over. The engine stores nothing before and
    after. Raises BackendError when a call fails."""
    started, greedy = clock(), SamplingParams(temperature=0)
    room = engine.target.capacity_tokens // engine.target.max_sequences - ANSWER_TOKENS
    fitting = (tuple(prompt) for prompt in prompts if 0 < len(prompt) <= room)

    def following() -> tuple[None, Request] | None:
        prompt = next(fitting, None)
        return None if prompt is None else (None, Request(prompt, greedy, ANSWER_TOKENS, logprobs=_TOP))

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


@dataclass(frozen=True, slots=True)
class Usage:
    """How a draft's vocabulary is used: by answers of the target, and by `other` texts. Tokens that are not
    `usable` are never kept."""

    answers: tuple[Answer, ...]
    other: Uses
    usable: npt.NDArray[np.bool_]
    floor: Ids

    def order(self, left_out: Collection[int] = ()) -> Ids:
        """All tokens in the order in which they are kept, by their uses in all texts but some answers."""
        uses = self.other.copy()
        for number, answer in enumerate(self.answers):
            if number not in left_out:
                uses += np.bincount(answer.tokens[answer.tokens >= 0], minlength=len(uses))
                uses += 0 if answer.mass is None else answer.mass
        uses[~self.usable] = -1
        return ranked(uses, self.floor)

    def lost(self, sizes: Sequence[int], held_out: Sequence[Answer] = ()) -> list[float]:
        """For vocabularies of each size the share of the answers' tokens, 0-1, that they lack: of every
        answer by the uses in the others alone, and of those that nothing is counted in. Without any it is 0.
        """
        folds = [range(i, len(self.answers), _FOLDS) for i in range(min(_FOLDS, len(self.answers)))]
        tested = [([self.answers[number] for number in numbers], numbers) for numbers in folds]
        found, total = np.zeros(len(sizes)), 0
        for answers, left_out in [*tested, (held_out, range(0))]:
            places = np.full(len(self.other) + 1, len(self.other))  # the last: what the draft lacks
            order = self.order(left_out)
            places[order] = np.arange(len(order))
            for answer in answers:
                found += [(places[answer.tokens] >= size - 1).sum() for size in sizes]
                total += len(answer.tokens)
        return [float(count) / max(total, 1) for count in found]
