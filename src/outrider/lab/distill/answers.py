"""What a draft is trained on and measured by: which questions, and the target's answers to them, with its
most likely tokens at every position.

Each answer is a file of its own, written whole or not at all, so that a run which is stopped loses nothing
but the answers under way.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from outrider.backends.gguf.options import LoadOptions
from outrider.core.contracts import Vocabulary
from outrider.core.data import Completion, Request
from outrider.core.errors import InputError, OutriderError, SettingError
from outrider.core.files import write_whole
from outrider.core.params import SamplingParams
from outrider.lab.distill.plan import Data, DistillPlan
from outrider.lab.loaded import LoadedTarget
from outrider.lab.prompts import Prompt, conversation_hash, is_held_out
from outrider.lab.record import answered
from outrider.lab.workloads import BUILT_IN, load_workload
from outrider.lab.written import written_prompts
from outrider.policy.fixed import FixedPolicy
from outrider.session.loading import load_weights, template_of

_DEFAULT_PROMPTS = 2000
"""of the bundled ones"""
_TOP = 64
"""of a target's most likely tokens that are recorded at each place"""
_AT_ONCE = 32
"""answers under way"""
MIN_LOG = -100.0
"""of a token that has no probability"""

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, or one of its follow-ups, and how it is answered."""

    prompt: Prompt
    category: str
    temperature: float
    turn: int = 0

    @property
    def turns(self) -> list[Question]:
        return [replace(self, turn=turn) for turn in range(1 + len(self.prompt.follow_ups))]

    @property
    def id(self) -> str:
        """Names what is asked and how: prompts of two files may have the same id."""
        prompt = self.prompt
        asked = (prompt.messages, prompt.follow_ups, prompt.grammar, prompt.tools, prompt.max_tokens)
        digest = blake2b(repr(asked).encode(), digest_size=6).hexdigest()
        return f"{prompt.id}#{digest}/{self.turn + 1}@{self.temperature:g}"


class Asked(NamedTuple):
    """The questions of a plan; the two sides have no conversation in common."""

    training: list[Question]
    held_out: list[Question]


def asked(plan: Data) -> Asked:
    """The questions that a plan names, each prompt at one of its temperatures, which take turns.

    Some of those held out are asked at temperature 0 whatever the plan says: a draft's agreement and expected
    speed are measured along the target's most likely answers.
    Raises PromptError for a file that cannot be read, SettingError when one side of the split is empty.
    """
    if not plan.prompts:
        prompts: Sequence[tuple[str, Prompt]] = written_prompts(plan.num_prompts or _DEFAULT_PROMPTS)
    else:
        prompts = [found for name in dict.fromkeys(plan.prompts) for found in _of_file(name)]
        prompts = prompts[: plan.num_prompts]
    fresh = [item for item in prompts if conversation_hash(item[1]) not in _measured()]
    held_out = [is_held_out(prompt) for _, prompt in fresh]
    if all(held_out) or not any(held_out):
        reason = f"of {len(fresh)} prompts {sum(held_out)} are held out, and both sides need some"
        if known := len(prompts) - len(fresh):
            reason += f"; {known} more are of the built-in workloads, which drafts are measured on"
        raise SettingError("prompts", reason, "Give more prompts: one of sixteen is held out.")
    with_zero = plan.temperatures if 0 in plan.temperatures else (0.0, *plan.temperatures)
    sides = Asked([], [])
    for (category, prompt), held in zip(fresh, held_out, strict=True):
        temperatures = sorted(with_zero) if held else plan.temperatures
        side = sides[held]
        side.append(Question(prompt, category, temperatures[len(side) % len(temperatures)]))
    return sides


@cache
def _measured() -> frozenset[str]:
    """The conversations of the built-in workloads, which drafts are measured on by `check` and `bench`."""
    workloads = map(load_workload, BUILT_IN)
    return frozenset(conversation_hash(prompt) for workload in workloads for prompt in workload.prompts)


def _of_file(name: str) -> list[tuple[str, Prompt]]:
    if name in BUILT_IN:
        reason = "drafts are measured on the built-in workloads, and must not be trained on them"
        raise SettingError(
            f"--prompts {name}", reason, "Name a file; without one the bundled prompts are used."
        )
    return [(Path(name).stem, prompt) for prompt in load_workload(name).prompts]


@dataclass(frozen=True, slots=True)
class Example:
    """One answer of the target, in its token ids. At position i of the answer `ids[i]` (K of them, the most
    likely first) are the target's most likely tokens, given all before it, `log_probs[i]` the natural
    logarithms of their probabilities, and `rest[i]` the probability of all other tokens. Under a grammar they
    are the target's own, before its mask. `text` is the answer as text, for a follow-up question."""

    id: str
    category: str
    prompt: Tokens
    answer: Tokens
    ids: Tokens
    log_probs: npt.NDArray[np.float16]
    rest: npt.NDArray[np.float16]
    temperature: float
    text: str


_ARRAYS = ("prompt", "answer", "ids", "log_probs", "rest")


def example_path(folder: Path, id: str) -> Path:
    """Where the answer to a question lies; any text can be its id."""
    return folder / f"{blake2b(id.encode(), digest_size=12).hexdigest()}.npz"


def write_example(folder: Path, example: Example) -> None:
    """Whole or not at all. Raises SettingError."""
    data = io.BytesIO()
    arrays = {name: getattr(example, name) for name in _ARRAYS}
    words = np.array([example.id, example.category, example.text])
    np.savez(data, words=words, temperature=np.float64(example.temperature), **arrays)
    write_whole(example_path(folder, example.id), data.getvalue(), "answer")


def read_example(path: Path) -> Example:
    """Raises InputError for a file that is missing or damaged."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as data:
            identity, category, text = map(str, data["words"])
            arrays = {name: data[name] for name in _ARRAYS}
            return Example(identity, category, **arrays, temperature=float(data["temperature"]), text=text)
    except Exception as error:  # the readers of zip files and arrays raise whatever their parts do
        raise InputError(str(path), f"it is damaged ({error})", "Remove it: it is made again.") from error


def read_examples(folder: Path, questions: Sequence[Question]) -> list[Example]:
    """The answers that there are to some questions and their follow-ups; none where one was passed over."""
    paths = (example_path(folder, turn.id) for question in questions for turn in question.turns)
    return [read_example(path) for path in paths if path.exists()]


@contextmanager
def open_target(plan: DistillPlan) -> Iterator[LoadedTarget]:
    """The target of a plan, open for its answers. Raises ModelFileError or OutOfMemory."""
    file = plan.file
    with closing(load_weights(file.card, LoadOptions(threads=plan.threads), measure=True)) as weights:
        model = weights.open(min(plan.settings.ctx_size, weights.trained_context), max_sequences=_AT_ONCE)
        yield LoadedTarget(file.name, model, template_of(weights, file.card.chat_template))


def generate(
    target: LoadedTarget,
    questions: Sequence[Question],
    folder: Path,
    *,
    max_tokens: int = 256,
    top: int = _TOP,
    seed: int = 0,
    on_done: Callable[[str, int], None] = lambda _why, _tokens: None,
) -> None:
    """Let the target answer every question that has no file in `folder` yet, and its follow-ups after it.

    Each question has a stream of random numbers of its own, so that an answer does not depend on what else is
    under way. Questions that do not fit, or whose grammar leaves no way on, are passed over. `on_done` is
    called for every question: why it was passed over (or ""), and its answer's tokens.
    Raises BackendError when a call fails, SettingError when the disk is full.
    """
    waiting: deque[tuple[Question, tuple[str, ...]]] = deque((question, ()) for question in questions)

    def is_done(question: Question, answers: tuple[str, ...], num_tokens: int) -> None:
        on_done("", num_tokens)
        waiting.extend((turn, answers) for turn in question.turns[question.turn + 1 :][:1])

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
