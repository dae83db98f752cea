"""The target answers, many prompts at once, with its most likely tokens at every position."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import numpy as np

from outrider.backends.gguf.options import LoadOptions
from outrider.core.contracts import Vocabulary
from outrider.core.data import Completion, Request
from outrider.core.errors import OutriderError
from outrider.core.params import SamplingParams
from outrider.lab.distill.examples import Example, example_path, read_example, write_example
from outrider.lab.distill.plan import DistillPlan
from outrider.lab.distill.questions import Question
from outrider.lab.loaded import LoadedTarget
from outrider.lab.models import ModelFile
from outrider.lab.record import answered
from outrider.policy.fixed import FixedPolicy
from outrider.session.loading import load_weights, template_of

TOP = 64
"""of a target's most likely tokens that are recorded at each place"""
_AT_ONCE = 32
"""answers under way"""
MIN_LOG = -100.0
"""of a token that has no probability"""

OnDone = Callable[[str, int], None]
"""Called for every question that is done: why it was passed over (or ""), and its answer's tokens."""


@contextmanager
def open_target(file: ModelFile, plan: DistillPlan) -> Iterator[LoadedTarget]:
    """The target of a plan, open for its answers. Raises ModelFileError or OutOfMemory."""
    with closing(load_weights(file.card, LoadOptions(threads=plan.threads), measure=True)) as weights:
        model = weights.open(min(plan.context, weights.trained_context), max_sequences=_AT_ONCE)
        yield LoadedTarget(file.name, model, template_of(weights, file.card.chat_template))


def generate(
    target: LoadedTarget,
    questions: Sequence[Question],
    folder: Path,
    *,
    max_tokens: int = 256,
    top: int = TOP,
    seed: int = 0,
    on_done: OnDone = lambda _why, _tokens: None,
) -> None:
    """Let the target answer every question that has no file in `folder` yet, and its follow-ups after it.

    Its model is empty before and afterwards. Tokens are drawn at the question's temperature (0: the argmax)
    from a stream of its own for each question, so that an answer does not depend on what else is under way.
    Questions that do not fit, or whose grammar leaves no way on, are passed over, and reported.
    Raises BackendError when a call fails, SettingError when the disk is full.
    """
    waiting: deque[tuple[Question, tuple[str, ...]]] = deque((question, ()) for question in questions)

    def is_done(question: Question, answers: tuple[str, ...], num_tokens: int) -> None:
        on_done("", num_tokens)
        if question.turn < len(question.prompt.follow_ups):
            waiting.append((replace(question, turn=question.turn + 1), answers))

    def following() -> tuple[tuple[Question, tuple[str, ...], Request], Request] | None:
        while waiting:
            question, earlier = waiting.popleft()
            path = example_path(folder, question.id)
            if path.exists():
                is_done(question, (*earlier, read_example(path).text), 0)
                continue
            try:
                request = _request(target, question, earlier, max_tokens, top, seed)
            except OutriderError as error:
                on_done(str(error), 0)
                continue
            return (question, earlier, request), request
        return None

    target.engine.equip((), FixedPolicy(0))
    with closing(answered(target.engine, following)) as answers:
        for (question, earlier, request), ended in answers:
            if isinstance(ended, OutriderError):
                on_done(str(ended), 0)
                continue
            example = _example(question, request.prompt, ended, target.model.vocabulary)
            write_example(folder, example)
            is_done(question, (*earlier, example.text), len(example.answer))


def _request(
    target: LoadedTarget, question: Question, earlier: Sequence[str], max_tokens: int, top: int, seed: int
) -> Request:
    """Raises what encoding a prompt does, and PromptError for one that does not fit."""
    prompt, salt = question.prompt, str(seed).encode()[:16]
    own_seed = int.from_bytes(blake2b(question.id.encode(), digest_size=8, salt=salt).digest())
    return Request(
        target.encode(prompt, earlier),
        SamplingParams(temperature=question.temperature, top_k=0, top_p=1.0, min_p=0.0, seed=own_seed),
        min(prompt.max_tokens or max_tokens, max_tokens),
        speculate=False,
        logprobs=top,
        grammar=prompt.grammar,
    )


def _example(
    question: Question, prompt: Sequence[int], completion: Completion, vocabulary: Vocabulary
) -> Example:
    """What is stored of an answer."""
    likely = np.array([scored.top for scored in completion.logprobs])  # (answer, top, 2)
    log_probs = likely[..., 1].clip(min=MIN_LOG)
    return Example(
        question.id,
        question.category,
        np.asarray(prompt, dtype=np.int32),
        np.asarray(completion.tokens, dtype=np.int32),
        likely[..., 0].astype(np.int32),
        log_probs.astype(np.float16),
        (1 - np.exp(log_probs).sum(-1)).clip(min=0).astype(np.float16),
        question.temperature,
        b"".join(map(vocabulary.piece, completion.tokens)).decode("utf-8", errors="replace"),
    )
