"""The target answers, many prompts in one call, with its most likely tokens at every position."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from outrider.backends.gguf import GgufModel, LoadOptions
from outrider.core.contracts import Constraint, Model
from outrider.core.data import Logits, Row, Span
from outrider.core.errors import ConstraintError, ModelFileError, OutriderError
from outrider.distill.checkpoint import ARCHITECTURES, read_gguf
from outrider.distill.examples import Example, example_path, read_example, write_example
from outrider.distill.network import Network, TorchModel, device_of, has_fast_half
from outrider.distill.plan import DistillPlan
from outrider.distill.questions import Question, conversation_hash
from outrider.lab.loaded import LoadedTarget
from outrider.lab.models import ModelFile
from outrider.session.loading import load_weights, template_of

DEFAULT_TOP = 64
_AT_ONCE = {"llama.cpp": 32, "torch": 192}
"""Answers under way at once: llama.cpp's calls grow with every token, PyTorch's hardly do at first."""
_MAX_LENGTH_RATIO = 2
"""of prompts that are read together, since a call may be padded to its longest"""
_REFILL_SHARE = 8
"""New prompts are read when an eighth of the sequences are free: reading few at a time is slow."""
_SORTED_ROUNDS = 6
"""times as many questions as are answered at once are ordered by length"""
_MIN_LOG = -100.0
"""of a token that has no probability"""

Ids = npt.NDArray[np.int32]
LogProbs = npt.NDArray[np.float16]

OnDone = Callable[[str, int], None]
"""Called for every question that is done: why it was passed over (or ""), and its answer's tokens."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """A target that answers: `target` encodes and constrains, `model` makes the calls."""

    target: LoadedTarget
    model: Model


@contextmanager
def open_teacher(file: ModelFile, plan: DistillPlan, notices: list[str]) -> Iterator[Teacher]:
    """The target of a plan, open for its answers; a notice says who makes the calls, and why.
    Raises ModelFileError or OutOfMemory."""
    uses_torch, why = _choose(file, plan)
    at_once = plan.data.parallel or _AT_ONCE["torch" if uses_torch else "llama.cpp"]
    weights = load_weights(file.path, file.card, LoadOptions(threads=plan.threads), notices)
    try:
        length = min(plan.context, weights.trained_context)
        native = weights.open(length, max_sequences=1 if uses_torch else at_once)
        target = LoadedTarget(file.name, native, template_of(weights, file.card))
        model: Model = native
        if uses_torch:
            model = _in_torch(file, native, at_once, length)
        notices.append(why)
        yield Teacher(target, model)
    finally:
        weights.close()


def _choose(file: ModelFile, plan: DistillPlan) -> tuple[bool, str]:
    if plan.data.teacher == "llama.cpp":
        return False, "llama.cpp answers, as asked"
    if file.card.architecture not in ARCHITECTURES:
        if plan.data.teacher == "torch":
            known = ", ".join(ARCHITECTURES)
            reason = f"PyTorch runs no {file.card.architecture} here (known: {known})"
            raise ModelFileError(str(file.path), reason, "Leave out --teacher torch.")
        return False, f"llama.cpp answers: PyTorch runs no {file.card.architecture} here"
    if plan.data.teacher == "torch":
        return True, "PyTorch answers, as asked"
    device = device_of()
    if has_fast_half(device):
        return True, f"PyTorch answers: on this {device.type} its batches are faster than llama.cpp's"
    return False, "llama.cpp answers: this machine has no fast 16-bit products for PyTorch"


def _in_torch(file: ModelFile, native: GgufModel, at_once: int, length: int) -> TorchModel:
    device = device_of()
    dtype = torch.bfloat16 if has_fast_half(device) else torch.float32
    network = Network.of(read_gguf(file.path), length + 1, dtype=dtype, device=device)
    return TorchModel(file.name, network, native.vocabulary, at_once, length)


# The answers


def generate(
    target: LoadedTarget,
    questions: Sequence[Question],
    folder: Path,
    *,
    model: Model | None = None,
    max_tokens: int = 256,
    top: int = DEFAULT_TOP,
    seed: int = 0,
    on_done: OnDone = lambda _why, _tokens: None,
) -> None:
    """Let the target answer every question that has no file in `folder` yet, and its follow-ups after it.

    `model` makes the calls (None: the target's own); it is empty before and afterwards. Tokens are drawn
    from the `top` most likely at the question's temperature (0: the argmax), from a stream of its own for
    each question, so that an answer does not depend on what else is under way. Questions that do not fit, or
    whose grammar leaves no way on, are passed over, and reported.
    Raises BackendError when a call fails, SettingError when the disk is full.
    """
    model = model or target.model
    generation = _Generation(target, model, folder, top, max_tokens, seed, on_done)
    try:
        generation.run(_by_length(questions, model.max_sequences))
    finally:
        for sequence in range(model.max_sequences):
            model.truncate(sequence, 0)


def top_tokens(rows: Logits, top: int) -> tuple[Ids, LogProbs, npt.NDArray[np.float16]]:
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


def _by_length(questions: Sequence[Question], at_once: int) -> Iterator[Question]:
    """Questions of like length near each other, since attention costs as much as the longest text of a call
    has it; in rounds, so that what an interrupted run leaves is still of all kinds."""
    size = _SORTED_ROUNDS * at_once
    for at in range(0, len(questions), size):
        yield from sorted(questions[at : at + size], key=lambda q: len(repr(q.prompt.messages)))


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

    def append(self, ids: Ids, log_probs: LogProbs, rest: np.float16) -> None:
        """Go on with one of the most likely tokens."""
        place = 0
        if self.question.temperature > 0:
            above = (log_probs.astype(np.float64) - log_probs[0]) / self.question.temperature
            weights = np.where(log_probs > _MIN_LOG, np.exp(above), 0)
            place = int(self.random.choice(len(weights), p=weights / weights.sum()))
        self.labels.append((ids, log_probs, rest))
        self.tokens.append(int(ids[place]))
        if self.constraint is not None:
            self.constraint.accept((self.tokens[-1],))


class _Generation:
    """Answers under way, each in a sequence of the model, and the questions that wait."""

    def __init__(
        self,
        target: LoadedTarget,
        model: Model,
        folder: Path,
        top: int,
        max_tokens: int,
        seed: int,
        on_done: OnDone,
    ) -> None:
        self._target = target
        self._model = model
        self._folder = folder
        self._top = top
        self._max_tokens = max_tokens
        self._seed = seed
        self._on_done = on_done
        self._running: dict[int, _Answer] = {}
        self._waiting: deque[tuple[Question, tuple[str, ...]]] = deque()
        """questions, and the answers that come before them"""

    def run(self, questions: Iterator[Question]) -> None:
        """Answer them all."""
        self._waiting.extend((question, ()) for question in questions)
        num_sequences = self._model.max_sequences
        free = list(range(num_sequences))
        while self._waiting or self._running:
            new: dict[int, _Answer] = {}
            if len(free) * _REFILL_SHARE >= num_sequences or not self._running:
                for started in islice(self._started(), len(free)):
                    new[free.pop(0)] = started
            ended = self._read(new) if new else []
            ended += self._step() if self._running and not ended else []
            for sequence in ended:
                self._finish(sequence)
            free = sorted([*free, *ended])

    def _started(self) -> Iterator[_Answer]:
        """The next questions that have no answer yet; those that follow on a stored answer join the queue."""
        while self._waiting:
            question, earlier = self._waiting.popleft()
            path = example_path(self._folder, question.id)
            if path.exists():
                self._on_done("", 0)
                self._follow_up(question, (*earlier, read_example(path).text))
                continue
            started = self._start(question, earlier)
            if isinstance(started, str):
                self._on_done(started, 0)
            else:
                yield started

    def _follow_up(self, question: Question, answers: tuple[str, ...]) -> None:
        if question.turn < len(question.prompt.follow_ups):
            self._waiting.append((replace(question, turn=question.turn + 1), answers))

    def _start(self, question: Question, earlier: tuple[str, ...]) -> _Answer | str:
        """What is to be answered, or why it cannot be."""
        try:
            tokens = self._target.encode(question.prompt, earlier)
            begin = self._target.constrain(question.prompt.grammar)
            constraint = begin and begin()
        except OutriderError as error:
            return str(error)
        room = self._model.context_length - len(tokens)
        if not tokens or room < 1:
            return f"its {len(tokens)} tokens do not fit {self._model.context_length}"
        limit = min(question.prompt.max_tokens or self._max_tokens, self._max_tokens, room)
        digest = blake2b(question.id.encode(), digest_size=8, salt=str(self._seed).encode()[:16]).digest()
        random = np.random.default_rng(int.from_bytes(digest))
        return _Answer(question, tokens, earlier, constraint, random, limit)

    def _read(self, new: Mapping[int, _Answer]) -> list[int]:
        """Read new prompts, as many in a call as fit; which of them ended with their first token."""
        self._running |= new
        ended = []
        for group in self._groups(new):
            spans = []
            for sequence in group:
                prompt, at = new[sequence].prompt, 0
                while len(prompt) - at > self._model.max_batch_tokens:
                    chunk = prompt[at : at + self._model.max_batch_tokens]
                    self._model.decode([Span(sequence, chunk, at, 0)])
                    at += len(chunk)
                spans.append(Span(sequence, prompt[at:], at, 1))
            ended += self._decode(spans)
        return ended

    def _groups(self, new: Mapping[int, _Answer]) -> Iterator[list[int]]:
        """Sequences whose prompts fit one call together, those of a length side by side."""
        size, group = self._model.max_batch_tokens, list[int]()
        for sequence in sorted(new, key=lambda s: len(new[s].prompt)):
            tokens = [min(len(new[s].prompt), size) for s in (*group, sequence)]
            is_full = len(group) == self._model.max_rows or sum(tokens) > size
            if group and (is_full or max(tokens) > _MAX_LENGTH_RATIO * min(tokens)):
                yield sorted(group)
                group = []
            group.append(sequence)
        if group:
            yield sorted(group)

    def _step(self) -> list[int]:
        """One more token of every answer; which of them ended."""
        spans = [
            Span(sequence, (answer.tokens[-1],), len(answer.prompt) + len(answer.tokens) - 1, 1)
            for sequence, answer in sorted(self._running.items())
        ]
        ended, size = [], min(self._model.max_batch_tokens, self._model.max_rows)
        for at in range(0, len(spans), size):
            ended += self._decode(spans[at : at + size])
        return ended

    def _decode(self, spans: Sequence[Span]) -> list[int]:
        """Append a token to the answer of each span's sequence; which of them ended."""
        rows = np.concatenate([found[-1:] for found in self._model.decode(spans)])
        answers = {span.sequence: self._running[span.sequence] for span in spans}
        for row, answer in zip(rows, answers.values(), strict=True):
            answer.mask(row)
        likely = zip(answers.values(), *top_tokens(rows, self._top), strict=True)
        for answer, ids, log_probs, rest in likely:
            if not answer.failure:
                answer.append(ids, log_probs, rest)
        return [sequence for sequence, answer in answers.items() if self._is_over(answer)]

    def _is_over(self, answer: _Answer) -> bool:
        if answer.failure or len(answer.tokens) >= answer.max_tokens:
            return True
        if self._model.vocabulary.ends_generation(answer.tokens[-1]):
            return True
        return answer.constraint is not None and answer.constraint.is_complete

    def _finish(self, sequence: int) -> None:
        """Store what was answered, or report why it was not; the sequence is free again."""
        answer = self._running.pop(sequence)
        self._model.truncate(sequence, 0)
        if answer.failure:
            self._on_done(answer.failure, 0)
            return
        question = answer.question
        ids, log_probs, rest = zip(*answer.labels, strict=True)
        pieces = map(self._model.vocabulary.piece, answer.tokens)
        example = Example(
            question.id,
            question.category,
            np.asarray(answer.prompt, dtype=np.int32),
            np.asarray(answer.tokens, dtype=np.int32),
            np.stack(ids),
            np.stack(log_probs),
            np.asarray(rest),
            question.temperature,
            b"".join(pieces).decode("utf-8", errors="replace"),
            conversation_hash(question.prompt),
        )
        write_example(self._folder, example)
        self._on_done("", len(example.answer))
        self._follow_up(question, (*answer.earlier, example.text))
