"""The target answers, many prompts in one call, with its most likely tokens at every position."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from outrider.backends.gguf import LoadOptions
from outrider.core.contracts import Constraint, Vocabulary
from outrider.core.data import Logits, Row, Span
from outrider.core.errors import ConstraintError, OutriderError
from outrider.lab.distill.examples import Example, example_path, read_example, write_example
from outrider.lab.distill.plan import DistillPlan
from outrider.lab.distill.questions import Question
from outrider.lab.loaded import LoadedTarget
from outrider.lab.models import ModelFile
from outrider.lab.teacher_forced import teacher_forced
from outrider.session.loading import load_weights, template_of

TOP = 64
"""of a target's most likely tokens that are recorded at each place"""
_AT_ONCE = 32
"""answers under way"""
_REFILL_SHARE = 8
"""New prompts are read when an eighth of the sequences are free: reading few at a time is slow."""
_MIN_LOG = -100.0
"""of a token that has no probability"""

Ids = npt.NDArray[np.int32]
LogProbs = npt.NDArray[np.float16]

OnDone = Callable[[str, int], None]
"""Called for every question that is done: why it was passed over (or ""), and its answer's tokens."""


@contextmanager
def open_target(file: ModelFile, plan: DistillPlan) -> Iterator[LoadedTarget]:
    """The target of a plan, open for its answers. Raises ModelFileError or OutOfMemory."""
    with closing(load_weights(file.card, LoadOptions(threads=plan.threads), measure=True)) as weights:
        model = weights.open(min(plan.context, weights.trained_context), max_sequences=_AT_ONCE)
        yield LoadedTarget(file.name, model, template_of(weights, file.card.chat_template))


# The answers


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

    Its model is empty before and afterwards. Tokens are drawn from the `top` most likely at the question's
    temperature (0: the argmax), from a stream of its own for each question, so that an answer does not depend
    on what else is under way. Questions that do not fit, or
    whose grammar leaves no way on, are passed over, and reported.
    Raises BackendError when a call fails, SettingError when the disk is full.
    """
    try:
        _Generation(target, folder, top, max_tokens, seed, on_done).run(questions)
    finally:
        for sequence in range(target.model.max_sequences):
            target.model.truncate(sequence, 0)


def top_tokens(rows: Logits, top: int) -> tuple[Ids, LogProbs, npt.NDArray[np.float16]]:
    """Of rows of logits (n, vocabulary): the `top` most likely tokens (n, top), the natural logarithms
    of their probabilities (n, top), and the probability of all others together (n,)."""
    logits = torch.from_numpy(rows)
    found = logits.topk(min(top, rows.shape[1]), dim=-1)
    log_probs = found.values - logits.logsumexp(-1, keepdim=True)
    others = (1 - log_probs.exp().sum(-1)).clamp(min=0)
    clamped = log_probs.clamp(min=_MIN_LOG)
    return found.indices.to(torch.int32).numpy(), clamped.half().numpy(), others.half().numpy()


@dataclass(slots=True)
class _Answer:
    """An answer under way; `earlier` are those to the turns before it."""

    question: Question
    prompt: tuple[int, ...]
    earlier: tuple[str, ...]
    constraint: Constraint | None
    random: np.random.Generator
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    failure: str = ""
    """why it cannot go on: its grammar leaves no token"""
    labels: list[tuple[Ids, LogProbs, np.float16]] = field(default_factory=list)

    def mask(self, row: Row) -> None:
        """Rule out what the grammar does not allow."""
        try:
            mask = self.constraint.allowed(()) if self.constraint is not None else None
        except ConstraintError as error:
            self.failure = str(error)
            return
        if mask is not None:
            row[~mask] = -np.inf

    def append(self, ids: Ids, log_probs: LogProbs, others: np.float16) -> None:
        """Go on with one of the most likely tokens."""
        place = 0
        if self.question.temperature > 0:
            above = (log_probs.astype(np.float64) - log_probs[0]) / self.question.temperature
            weights = np.where(log_probs > _MIN_LOG, np.exp(above), 0)
            place = int(self.random.choice(len(weights), p=weights / weights.sum()))
        self.labels.append((ids, log_probs, others))
        self.tokens.append(int(ids[place]))
        if self.constraint is not None:
            self.constraint.accept((self.tokens[-1],))

    def is_over(self, vocabulary: Vocabulary) -> bool:
        """Whether its last token ends it."""
        if self.failure or len(self.tokens) >= self.max_tokens or vocabulary.ends_generation(self.tokens[-1]):
            return True
        return self.constraint is not None and self.constraint.is_complete

    def example(self, vocabulary: Vocabulary) -> Example:
        """What is stored of it."""
        question = self.question
        ids, log_probs, others = zip(*self.labels, strict=True)
        return Example(
            question.id,
            question.category,
            np.asarray(self.prompt, dtype=np.int32),
            np.asarray(self.tokens, dtype=np.int32),
            np.stack(ids),
            np.stack(log_probs),
            np.asarray(others),
            question.temperature,
            b"".join(map(vocabulary.piece, self.tokens)).decode("utf-8", errors="replace"),
        )


@dataclass
class _Generation:
    """Answers under way, each in a sequence of the model, and the questions that wait."""

    target: LoadedTarget
    folder: Path
    top: int
    max_tokens: int
    seed: int
    on_done: OnDone
    running: dict[int, _Answer] = field(default_factory=dict)
    waiting: deque[tuple[Question, tuple[str, ...]]] = field(default_factory=deque)
    """questions, and the answers that come before them"""

    def __post_init__(self) -> None:
        self.model = self.target.model

    def run(self, questions: Sequence[Question]) -> None:
        """Answer them all."""
        num_sequences = self.model.max_sequences
        self.waiting.extend((question, ()) for question in questions)
        free = list(range(num_sequences))
        while self.waiting or self.running:
            new: list[int] = []
            if len(free) * _REFILL_SHARE >= num_sequences or not self.running:
                for started in islice(self._started(), len(free)):
                    new.append(free.pop(0))
                    self.running[new[-1]] = started
            ended = self._read(new)
            if self.running and not ended:
                ended = self._step()
            for sequence in ended:
                self._finish(sequence)
            free = sorted([*free, *ended])

    def _started(self) -> Iterator[_Answer]:
        """The next questions that have no answer yet; those that follow on a stored answer join the queue."""
        while self.waiting:
            question, earlier = self.waiting.popleft()
            path = example_path(self.folder, question.id)
            if path.exists():
                self._is_done(question, (*earlier, read_example(path).text), 0)
                continue
            try:
                tokens = self.target.encode(question.prompt, earlier)
                begin = self.target.constrain(question.prompt.grammar)
                constraint = begin and begin()
            except OutriderError as error:
                self.on_done(str(error), 0)
                continue
            room = self.model.context_length - len(tokens)
            if not tokens or room < 1:
                self.on_done(f"its {len(tokens)} tokens do not fit {self.model.context_length}", 0)
                continue
            limit = min(question.prompt.max_tokens or self.max_tokens, self.max_tokens, room)
            digest = blake2b(question.id.encode(), digest_size=8, salt=str(self.seed).encode()[:16]).digest()
            random = np.random.default_rng(int.from_bytes(digest))
            yield _Answer(question, tokens, earlier, constraint, random, limit)

    def _is_done(self, question: Question, answers: tuple[str, ...], num_tokens: int) -> None:
        self.on_done("", num_tokens)
        if question.turn < len(question.prompt.follow_ups):
            self.waiting.append((replace(question, turn=question.turn + 1), answers))

    def _read(self, new: Sequence[int]) -> list[int]:
        """Read new prompts, as many in a call as fit; which of them ended with their first token."""
        ended, size = [], self.model.max_batch_tokens
        for group in self._groups(new):
            spans = []
            for sequence in group:
                prompt = self.running[sequence].prompt
                at = (len(prompt) - 1) // size * size
                for _ in teacher_forced(self.model, prompt[:at], at, sequence=sequence):
                    pass
                spans.append(Span(sequence, prompt[at:], at, 1))
            ended += self._decode(spans)
        return ended

    def _groups(self, new: Sequence[int]) -> Iterator[list[int]]:
        """Sequences whose prompts fit one call together."""
        size, group, used = self.model.max_batch_tokens, list[int](), 0
        for sequence in new:
            tokens = (len(self.running[sequence].prompt) - 1) % size + 1
            if group and (used + tokens > size or len(group) == self.model.max_rows):
                yield group
                group, used = [], 0
            group.append(sequence)
            used += tokens
        if group:
            yield group

    def _step(self) -> list[int]:
        """One more token of every answer; which of them ended."""
        spans = [
            Span(sequence, (answer.tokens[-1],), len(answer.prompt) + len(answer.tokens) - 1, 1)
            for sequence, answer in sorted(self.running.items())
        ]
        ended, size = [], min(self.model.max_batch_tokens, self.model.max_rows)
        for at in range(0, len(spans), size):
            ended += self._decode(spans[at : at + size])
        return ended

    def _decode(self, spans: Sequence[Span]) -> list[int]:
        """Append a token to the answer of each span's sequence; which of them ended."""
        rows = np.concatenate([found[-1:] for found in self.model.decode(spans)])
        answers = {span.sequence: self.running[span.sequence] for span in spans}
        for row, answer in zip(rows, answers.values(), strict=True):
            answer.mask(row)
        likely = zip(answers.values(), *top_tokens(rows, self.top), strict=True)
        for answer, ids, log_probs, others in likely:
            if not answer.failure:
                answer.append(ids, log_probs, others)
        return [s for s, answer in answers.items() if answer.is_over(self.model.vocabulary)]

    def _finish(self, sequence: int) -> None:
        """Store what was answered, or report why it was not; the sequence is free again."""
        answer = self.running.pop(sequence)
        self.model.truncate(sequence, 0)
        if answer.failure:
            self.on_done(answer.failure, 0)
            return
        example = answer.example(self.model.vocabulary)
        write_example(self.folder, example)
        self._is_done(answer.question, (*answer.earlier, example.text), len(example.answer))
