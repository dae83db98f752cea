"""The target answers, many prompts in one call, and says at every token what else it held likely."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from outrider.bench.loaded import LoadedTarget
from outrider.bench.prompts import Prompt
from outrider.core.contracts import Constraint, Model
from outrider.core.data import Row, Span
from outrider.core.errors import OutriderError
from outrider.distill.examples import Example, example_path, read_example, write_example

__all__ = ["DEFAULT_TOP", "Question", "generate", "likeliest"]

DEFAULT_TOP = 64
_REFILLED_SHARE = 8
"""New prompts are read when an eighth of the sequences are free: reading few at a time is slow."""

_UNLIKE = 2
"""Calls may be padded to their longest prompt: no prompt is read together with one so many times as long."""

_STRETCH = 6
"""times as many questions as are answered at once are ordered by length"""

_LEAST_LOG = -100.0


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, or one of its follow-ups, and how it is answered."""

    prompt: Prompt
    category: str
    temperature: float
    turn: int = 0

    @property
    def id(self) -> str:
        """Names what is asked and how: prompts of two files may have the same id."""
        prompt = self.prompt
        asked = (prompt.messages, prompt.follow_ups, prompt.grammar, prompt.tools, prompt.max_tokens)
        digest = blake2b(repr(asked).encode(), digest_size=6).hexdigest()
        return f"{prompt.id}#{digest}/{self.turn + 1}@{self.temperature:g}"


@dataclass(slots=True)
class _Running:
    question: Question
    prompt: tuple[int, ...]
    earlier: tuple[str, ...]
    constraint: Constraint | None
    random: np.random.Generator
    max_tokens: int
    answer: list[int] = field(default_factory=list)
    labels: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.float16], np.float16]] = field(
        default_factory=list
    )


_Waiting = deque[tuple[Question, tuple[str, ...]]]
"""questions, and the answers that stand before them"""

Told = Callable[[str, int], None]
"""Told of every question that is done: why it was passed over (or ""), and its answer's tokens."""


class _Generation:
    def __init__(self, target: LoadedTarget, model: Model, top: int, max_tokens: int, seed: int) -> None:
        self.target = target
        self.model = model
        self.top = top
        self.max_tokens = max_tokens
        self.seed = seed
        self.running: dict[int, _Running] = {}

    def start(self, question: Question, earlier: tuple[str, ...]) -> _Running | str:
        """What is to be answered, or why it cannot be."""
        try:
            tokens = self.target.encode(question.prompt, earlier)
            begin = self.target.constrain(question.prompt.grammar)
        except OutriderError as error:
            return str(error)
        room = self.model.context_length - len(tokens)
        if not tokens or room < 1:
            return f"its {len(tokens)} tokens do not fit {self.model.context_length}"
        most = min(question.prompt.max_tokens or self.max_tokens, self.max_tokens, room)
        digest = blake2b(question.id.encode(), digest_size=8, salt=str(self.seed).encode()[:16]).digest()
        random = np.random.default_rng(int.from_bytes(digest))
        return _Running(question, tokens, earlier, begin and begin(), random, most)

    def read(self, new: dict[int, _Running]) -> list[int]:
        """Read new prompts, as many in a call as fit; which of them ended with their first token."""
        ended = []
        for group in _groups(new, self.model.max_batch_tokens):
            spans = []
            for sequence in group:
                prompt, at = new[sequence].prompt, 0
                while len(prompt) - at > self.model.max_batch_tokens:
                    chunk = prompt[at : at + self.model.max_batch_tokens]
                    self.model.decode([Span(sequence, chunk, at, 0)])
                    at += len(chunk)
                spans.append(Span(sequence, prompt[at:], at, 1))
            ended += self._take(group, self.model.decode(spans), new)
        self.running |= new
        return ended

    def step(self) -> list[int]:
        """One more token of every answer; which of them ended."""
        sequences = sorted(self.running)
        spans = [
            Span(s, (r.answer[-1],), len(r.prompt) + len(r.answer) - 1, 1)
            for s, r in ((s, self.running[s]) for s in sequences)
        ]
        ended, size = [], min(self.model.max_batch_tokens, self.model.max_rows)
        for at in range(0, len(spans), size):
            logits = self.model.decode(spans[at : at + size])
            ended += self._take(sequences[at : at + size], logits, self.running)
        return ended

    def _take(
        self, sequences: Sequence[int], logits: Sequence[npt.NDArray[np.float32]], among: dict[int, _Running]
    ) -> list[int]:
        rows = np.concatenate([found[-1:] for found in logits])
        for row, sequence in zip(rows, sequences, strict=True):
            _mask(row, among[sequence].constraint)
        ids, log_probs, rest = likeliest(rows, self.top)
        ended = []
        for i, sequence in enumerate(sequences):
            running = among[sequence]
            token = int(ids[i, _draw(log_probs[i], running)])
            running.labels.append((ids[i], log_probs[i], rest[i]))
            running.answer.append(token)
            if running.constraint is not None:
                running.constraint.accept((token,))
            if self._is_over(running, token):
                ended.append(sequence)
        return ended

    def _is_over(self, running: _Running, token: int) -> bool:
        if len(running.answer) >= running.max_tokens or self.model.vocabulary.ends_generation(token):
            return True
        return running.constraint is not None and running.constraint.is_complete

    def finish(self, sequence: int) -> Example:
        running = self.running.pop(sequence)
        self.model.truncate(sequence, 0)
        ids, log_probs, rest = zip(*running.labels, strict=True)
        vocabulary = self.model.vocabulary
        text = b"".join(map(vocabulary.piece, running.answer)).decode("utf-8", errors="replace")
        return Example(
            running.question.id,
            running.question.category,
            np.asarray(running.prompt, dtype=np.int32),
            np.asarray(running.answer, dtype=np.int32),
            np.stack(ids),
            np.stack(log_probs),
            np.asarray(rest),
            running.question.temperature,
            text,
        )


def generate(
    target: LoadedTarget,
    questions: Sequence[Question],
    folder: Path,
    *,
    model: Model | None = None,
    max_tokens: int = 256,
    top: int = DEFAULT_TOP,
    seed: int = 0,
    told: Told = lambda why, tokens: None,
) -> None:
    """Let the target answer every question that has no file in `folder` yet, and its follow-ups behind it.

    `model` makes the calls (None: the target's own); it is empty before and afterwards. Tokens are drawn
    from the `top` likeliest at the question's temperature (0: the likeliest), from a stream of its own for
    each question, so that an answer does not depend on what else is under way. Questions that do not fit are
    passed over, and told. Raises BackendError when a call fails, SettingError when the disk is full.
    """
    model = model or target.model
    generation = _Generation(target, model, top, max_tokens, seed)
    waiting: _Waiting = deque((question, ()) for question in _by_length(questions, model.max_sequences))
    free = list(range(model.max_sequences))
    while waiting or generation.running:
        new: dict[int, _Running] = {}
        if len(free) * _REFILLED_SHARE >= model.max_sequences or not generation.running:
            for started in _started(generation, waiting, folder, told):
                new[free.pop(0)] = started
                if not free:
                    break
        ended = generation.read(new) if new else []
        ended += generation.step() if generation.running and not ended else []
        for sequence in ended:
            earlier = generation.running[sequence].earlier
            question = generation.running[sequence].question
            example = generation.finish(sequence)
            write_example(folder, example)
            told("", len(example.answer))
            _follow(waiting, question, (*earlier, example.text))
            free.append(sequence)
        free.sort()


def _by_length(questions: Sequence[Question], at_once: int) -> Iterator[Question]:
    """Questions of like length near each other, since attention costs as much as the longest text of a call
    has it; stretch by stretch, so that what an interrupted run leaves is still of all kinds."""
    size = _STRETCH * at_once
    for at in range(0, len(questions), size):
        yield from sorted(questions[at : at + size], key=lambda q: len(repr(q.prompt.messages)))


def _started(generation: _Generation, waiting: _Waiting, folder: Path, told: Told) -> Iterator[_Running]:
    """The next questions that have no answer yet; those behind an answer that is there join the queue."""
    while waiting:
        question, earlier = waiting.popleft()
        path = example_path(folder, question.id)
        if path.exists():
            told("", 0)
            _follow(waiting, question, (*earlier, read_example(path).text))
            continue
        started = generation.start(question, earlier)
        if isinstance(started, str):
            told(started, 0)
        else:
            yield started


def _follow(waiting: _Waiting, question: Question, answers: tuple[str, ...]) -> None:
    if question.turn < len(question.prompt.follow_ups):
        waiting.append((replace(question, turn=question.turn + 1), answers))


def _groups(new: dict[int, _Running], size: int) -> Iterator[list[int]]:
    """Sequences whose prompts fit one call together, those of a length side by side."""
    group: list[int] = []
    for sequence in sorted(new, key=lambda s: len(new[s].prompt)):
        tokens = [min(len(new[s].prompt), size) for s in (*group, sequence)]
        if group and (sum(tokens) > size or max(tokens) > _UNLIKE * min(tokens)):
            yield sorted(group)
            group = []
        group.append(sequence)
    if group:
        yield sorted(group)


def _mask(row: Row, constraint: Constraint | None) -> None:
    mask = constraint.allowed(()) if constraint is not None else None
    if mask is not None:
        row[~mask] = -np.inf


def likeliest(
    rows: npt.NDArray[np.float32], top: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float16], npt.NDArray[np.float16]]:
    """Of rows of logits (n, vocabulary): the `top` likeliest tokens (n, top), the natural logarithms of their
    probabilities (n, top), and the probability of all others together (n,)."""
    logits = torch.from_numpy(rows)
    found = logits.topk(min(top, rows.shape[1]), dim=-1)
    log_probs = found.values - logits.logsumexp(-1, keepdim=True)
    rest = (1 - log_probs.exp().sum(-1)).clamp(min=0)
    return (
        found.indices.to(torch.int32).numpy(),
        log_probs.clamp(min=_LEAST_LOG).half().numpy(),
        rest.half().numpy(),
    )


def _draw(log_probs: npt.NDArray[np.float16], running: _Running) -> int:
    """The place among the likeliest of the token that is taken."""
    if running.question.temperature == 0:
        return 0
    weights = np.exp(log_probs.astype(np.float64) / running.question.temperature)
    return int(running.random.choice(len(weights), p=weights / weights.sum()))
