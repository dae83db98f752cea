"""The target answers, many prompts in one call, and says at every token what else it held likely."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from outrider.core.contracts import Model
from outrider.distill.answering import Answering, Question, Running, likeliest
from outrider.distill.examples import Example, example_path, read_example, write_example
from outrider.lab.loaded import LoadedTarget

__all__ = ["DEFAULT_TOP", "Question", "generate", "likeliest"]

DEFAULT_TOP = 64
_REFILLED_SHARE = 8
"""New prompts are read when an eighth of the sequences are free: reading few at a time is slow."""

_STRETCH = 6
"""times as many questions as are answered at once are ordered by length"""

_Waiting = deque[tuple[Question, tuple[str, ...]]]
"""questions, and the answers that stand before them"""

Told = Callable[[str, int], None]
"""Told of every question that is done: why it was passed over (or ""), and its answer's tokens."""


def generate(
    target: LoadedTarget,
    questions: Sequence[Question],
    folder: Path,
    *,
    model: Model | None = None,
    max_tokens: int = 256,
    top: int = DEFAULT_TOP,
    seed: int = 0,
    told: Told | None = None,
) -> None:
    """Let the target answer every question that has no file in `folder` yet, and its follow-ups behind it.

    `model` makes the calls (None: the target's own); it is empty before and afterwards. Tokens are drawn
    from the `top` most likely at the question's temperature (0: the likeliest), from a stream of its own for
    each question, so that an answer does not depend on what else is under way. Questions that do not fit, or
    whose grammar leaves no way on, are passed over, and told.
    Raises BackendError when a call fails, SettingError when the disk is full.
    """
    model = model or target.model
    answering = Answering(target, model, top, max_tokens, seed)
    waiting: _Waiting = deque((question, ()) for question in _by_length(questions, model.max_sequences))
    try:
        _answer_all(answering, waiting, folder, told or _tell_nobody)
    finally:
        for sequence in range(model.max_sequences):
            model.truncate(sequence, 0)


def _tell_nobody(why: str, tokens: int) -> None:
    del why, tokens


def _answer_all(answering: Answering, waiting: _Waiting, folder: Path, told: Told) -> None:
    num_sequences = answering.model.max_sequences
    free = list(range(num_sequences))
    while waiting or answering.running:
        new: dict[int, Running] = {}
        if len(free) * _REFILLED_SHARE >= num_sequences or not answering.running:
            for started in islice(_started(answering, waiting, folder, told), len(free)):
                new[free.pop(0)] = started
        ended = answering.read(new) if new else []
        ended += answering.step() if answering.running and not ended else []
        for sequence in ended:
            running = answering.running[sequence]
            _keep(answering.finish(sequence), running, waiting, folder, told)
            free.append(sequence)
        free.sort()


def _keep(answer: Example | str, running: Running, waiting: _Waiting, folder: Path, told: Told) -> None:
    if isinstance(answer, str):
        told(answer, 0)
        return
    write_example(folder, answer)
    told("", len(answer.answer))
    _follow(waiting, running.question, (*running.earlier, answer.text))


def _by_length(questions: Sequence[Question], at_once: int) -> Iterator[Question]:
    """Questions of like length near each other, since attention costs as much as the longest text of a call
    has it; stretch by stretch, so that what an interrupted run leaves is still of all kinds."""
    size = _STRETCH * at_once
    for at in range(0, len(questions), size):
        yield from sorted(questions[at : at + size], key=lambda q: len(repr(q.prompt.messages)))


def _started(answering: Answering, waiting: _Waiting, folder: Path, told: Told) -> Iterator[Running]:
    """The next questions that have no answer yet; those behind an answer that is there join the queue."""
    while waiting:
        question, earlier = waiting.popleft()
        path = example_path(folder, question.id)
        if path.exists():
            told("", 0)
            _follow(waiting, question, (*earlier, read_example(path).text))
            continue
        started = answering.start(question, earlier)
        if isinstance(started, str):
            told(started, 0)
        else:
            yield started


def _follow(waiting: _Waiting, question: Question, answers: tuple[str, ...]) -> None:
    if question.turn < len(question.prompt.follow_ups):
        waiting.append((replace(question, turn=question.turn + 1), answers))
