"""Answers of the target, token by token, with what else it held likely at each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch

from outrider.core.contracts import Constraint, Model
from outrider.core.data import Row, Span
from outrider.core.errors import ConstraintError, OutriderError
from outrider.distill.examples import Example
from outrider.distill.split import conversation_hash
from outrider.lab.loaded import LoadedTarget
from outrider.lab.prompts import Prompt

__all__ = ["Answering", "Question", "Running", "likeliest"]

_UNLIKE = 2
"""Calls may be padded to their longest prompt: no prompt is read together with one so many times as long."""

_MIN_LOG = -100.0
"""of a token that has no probability"""

Ids = npt.NDArray[np.int32]
LogProbs = npt.NDArray[np.float16]


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
class Running:
    """An answer under way."""

    question: Question
    prompt: tuple[int, ...]
    earlier: tuple[str, ...]
    constraint: Constraint | None
    random: np.random.Generator
    max_tokens: int
    answer: list[int] = field(default_factory=list)
    failure: str = ""
    """why it cannot go on: its grammar leaves no token"""
    labels: list[tuple[Ids, LogProbs, np.float16]] = field(default_factory=list)


class Answering:
    """Answers under way, each in a sequence of the model."""

    def __init__(self, target: LoadedTarget, model: Model, top: int, max_tokens: int, seed: int) -> None:
        self.target = target
        self.model = model
        self.top = top
        self.max_tokens = max_tokens
        self.seed = seed
        self.running: dict[int, Running] = {}

    def start(self, question: Question, earlier: tuple[str, ...]) -> Running | str:
        """What is to be answered, or why it cannot be."""
        try:
            tokens = self.target.encode(question.prompt, earlier)
            begin = self.target.constrain(question.prompt.grammar)
            constraint = begin and begin()
        except OutriderError as error:
            return str(error)
        room = self.model.context_length - len(tokens)
        if not tokens or room < 1:
            return f"its {len(tokens)} tokens do not fit {self.model.context_length}"
        most = min(question.prompt.max_tokens or self.max_tokens, self.max_tokens, room)
        digest = blake2b(question.id.encode(), digest_size=8, salt=str(self.seed).encode()[:16]).digest()
        random = np.random.default_rng(int.from_bytes(digest))
        return Running(question, tokens, earlier, constraint, random, most)

    def read(self, new: dict[int, Running]) -> list[int]:
        """Read new prompts, as many in a call as fit; which of them ended with their first token."""
        ended = []
        for group in _groups(new, self.model.max_batch_tokens, self.model.max_rows):
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
        self, sequences: Sequence[int], logits: Sequence[npt.NDArray[np.float32]], among: dict[int, Running]
    ) -> list[int]:
        rows = np.concatenate([found[-1:] for found in logits])
        for row, sequence in zip(rows, sequences, strict=True):
            _mask(row, among[sequence])
        ids, log_probs, rest = likeliest(rows, self.top)
        for i, sequence in enumerate(sequences):
            if not among[sequence].failure:
                _append(among[sequence], ids[i], log_probs[i], rest[i])
        return [sequence for sequence in sequences if self._is_over(among[sequence])]

    def _is_over(self, running: Running) -> bool:
        if running.failure or len(running.answer) >= running.max_tokens:
            return True
        if self.model.vocabulary.ends_generation(running.answer[-1]):
            return True
        return running.constraint is not None and running.constraint.is_complete

    def finish(self, sequence: int) -> Example | str:
        """What was answered, or why it was not; the sequence is free again."""
        running = self.running.pop(sequence)
        self.model.truncate(sequence, 0)
        if running.failure:
            return running.failure
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
            conversation_hash(running.question.prompt),
        )


def _groups(new: dict[int, Running], size: int, rows: int) -> Iterator[list[int]]:
    """Sequences whose prompts fit one call together, those of a length side by side."""
    group: list[int] = []
    for sequence in sorted(new, key=lambda s: len(new[s].prompt)):
        tokens = [min(len(new[s].prompt), size) for s in (*group, sequence)]
        is_full = len(group) == rows or sum(tokens) > size
        if group and (is_full or max(tokens) > _UNLIKE * min(tokens)):
            yield sorted(group)
            group = []
        group.append(sequence)
    if group:
        yield sorted(group)


def _mask(row: Row, running: Running) -> None:
    try:
        mask = running.constraint.allowed(()) if running.constraint is not None else None
    except ConstraintError as error:
        running.failure = str(error)
        return
    if mask is not None:
        row[~mask] = -np.inf


def likeliest(rows: npt.NDArray[np.float32], top: int) -> tuple[Ids, LogProbs, npt.NDArray[np.float16]]:
    """Of rows of logits (n, vocabulary): the `top` most likely tokens (n, top), the natural logarithms
    of their probabilities (n, top), and the probability of all others together (n,)."""
    logits = torch.from_numpy(rows)
    found = logits.topk(min(top, rows.shape[1]), dim=-1)
    log_probs = found.values - logits.logsumexp(-1, keepdim=True)
    rest = (1 - log_probs.exp().sum(-1)).clamp(min=0)
    return (
        found.indices.to(torch.int32).numpy(),
        log_probs.clamp(min=_MIN_LOG).half().numpy(),
        rest.half().numpy(),
    )


def _append(running: Running, ids: Ids, log_probs: LogProbs, rest: np.float16) -> None:
    """Let the answer go on with one of the most likely tokens."""
    token = int(ids[_draw(log_probs, running)])
    running.labels.append((ids, log_probs, rest))
    running.answer.append(token)
    if running.constraint is not None:
        running.constraint.accept((token,))


def _draw(log_probs: LogProbs, running: Running) -> int:
    """The place among the most likely of the token that is taken."""
    if running.question.temperature == 0:
        return 0
    above = (log_probs.astype(np.float64) - log_probs[0]) / running.question.temperature
    weights = np.where(log_probs > _MIN_LOG, np.exp(above), 0)
    return int(running.random.choice(len(weights), p=weights / weights.sum()))
