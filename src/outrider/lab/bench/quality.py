"""What a smaller file costs in quality: every quantization of a target scored against the best one.

The reference's distributions at every position of the recorded answers are kept first (`Reference.save`);
then each other quantization reads the same texts (`Reference.compared`). No two models are in memory at once.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.core.contracts import Model
from outrider.core.data import Row
from outrider.core.errors import BackendError, InputError, SettingError, VocabularyMismatch
from outrider.core.files import reason_of, write_whole
from outrider.lab.models import ModelFile
from outrider.lab.rows import AnswerRow, QualityRow
from outrider.lab.teacher_forced import teacher_forced
from outrider.models.reference import without_quantization
from outrider.sampling.selection import top_k

TOP = 256
"""tokens of a reference whose probabilities are kept at each position"""
_MIN_LOG = -700.0
"""replaces the logarithm of a probability of nothing, so that a sum stays finite"""
_ARRAYS = {"ids": np.int32, "log_probs": np.float16, "rest": np.float32, "vocabulary_size": np.int32}

_Floats = npt.NDArray[np.float64]


def families(models: Sequence[ModelFile], references: Collection[str] = ()) -> list[tuple[ModelFile, ...]]:
    """The models in groups that are quantizations of one: of one architecture, shape, tokenizer and name.

    The first of each group is its reference: the one whose name is among `references`, else the one with
    the most bits a weight. The order is otherwise that of `models`.
    Raises SettingError when a group has two named references.
    """
    groups: dict[tuple[object, ...], list[ModelFile]] = {}
    for model in models:
        card = model.card
        shape = (card.parameters, card.block_count, card.embedding_length, card.expert_count)
        name = without_quantization(card.name)
        groups.setdefault((card.architecture, shape, card.num_tokens, card.tokenizer, name), []).append(model)
    found = []
    for group in groups.values():
        named = [model for model in group if model.name in references]
        if len(named) > 1:
            both = " and ".join(model.name for model in named)
            raise SettingError(both, "both are to be the reference of one model", "Name one of them.")
        best = max(named or group, key=lambda model: model.card.file_bytes / model.card.parameters)
        found.append((best, *(model for model in group if model is not best)))
    return found


@dataclass(frozen=True, slots=True)
class Reference:
    """The target `name`, whose distributions over its answers lie in `folder`, a file a text."""

    folder: Path
    name: str

    def save(self, model: Model, answers: Iterable[AnswerRow]) -> None:
        """Keep the model's distributions at every position of the answers.

        Those that are there and whole are passed over, so that an interrupted run goes on where it was.
        Raises SettingError where nothing can be written, BackendError when a text does not fit the context.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = f"it cannot be made ({reason_of(error)})"
            raise SettingError(str(self.folder), why, "Name another folder.") from error
        for answer in filter(lambda answer: answer.tokens, answers):
            path = self._path(answer)
            with suppress(InputError):
                if len(Teacher.load(path).ids) == len(answer.tokens):
                    continue
            with closing(score(model, answer.prompt, answer.tokens)) as rows:
                Teacher.of(rows).save(path)

    def compared(self, model: Model, target: str, answers: Iterable[AnswerRow]) -> Iterator[QualityRow]:
        """A row about `target` for each answer, as soon as it is worked out; none for an empty answer.

        Raises InputError where a text of the reference is not kept, BackendError when one does not fit.
        """
        for answer in filter(lambda answer: answer.tokens, answers):
            teacher = Teacher.load(self._path(answer))
            with closing(score(model, answer.prompt, answer.tokens)) as rows:
                found = asdict(compare(teacher, rows)) | {"workload": answer.workload, "case": answer.case}
            yield QualityRow(target=target, reference=self.name, **found)

    def _path(self, answer: AnswerRow) -> Path:
        """Names the text, not only the case: a case that is answered again is another text."""
        text = repr((self.name, answer.workload, answer.case, answer.prompt, answer.tokens))
        return self.folder / f"{blake2b(text.encode(), digest_size=12).hexdigest()}.npz"


def score(model: Model, prompt: Sequence[int], answer: Sequence[int]) -> Generator[Row, None, None]:
    """The model's logits for each token of `answer`, given all before it, in a few batched calls.

    A row is valid until the next one is asked for. Sequence 0 of the model is used and left empty, also
    when the generator is closed early. Raises BackendError when a call fails, the text does not fit, or the
    logits are no numbers.
    """
    tokens = [*prompt, *answer[:-1]]
    if not prompt:
        raise BackendError(model.name, "nothing comes before the text to be scored", "Give a prompt.")
    if len(tokens) > model.context_length:
        reason = f"{len(tokens)} tokens do not fit its context of {model.context_length}"
        raise BackendError(model.name, reason, "Give a larger one.")
    try:
        model.truncate(0, 0)
        for rows in teacher_forced(model, tokens, len(prompt) - 1):
            if np.isnan(rows).any():
                way_out = "The file is damaged: make it again."
                raise BackendError(model.name, "its logits are no numbers", way_out)
            yield from rows
    finally:
        model.truncate(0, 0)


def log_softmax(row: Row) -> _Floats:
    """Log probabilities of a row of logits, worked out in 64 bits."""
    logits = row.astype(np.float64)
    logits -= logits.max()
    return np.asarray(logits - np.log(np.exp(logits).sum()), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Teacher:
    """A model's distributions at the positions of a text, cut to its K most likely tokens.

    `ids` (positions, K) int32: the tokens, the most likely first. `log_probs` (positions, K) float16: theirs,
    in nats. `rest` (positions,) float32: the probability of all other tokens together.
    `vocabulary_size`: how many tokens the model has.
    """

    ids: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float16]
    rest: npt.NDArray[np.float32]
    vocabulary_size: int

    @classmethod
    def of(cls, rows: Iterable[Row], top: int = TOP) -> Teacher:
        """Of rows of logits, one a position and one at least; each is read before the next is asked for."""
        kept: list[tuple[npt.NDArray[Any], _Floats, float]] = []
        for row in rows:
            ids, every = top_k(row, min(top, len(row))), log_softmax(row)
            kept.append((ids, every[ids], float(np.exp(np.delete(every, ids)).sum())))
        tokens, log_probs, rest = map(np.array, zip(*kept, strict=True))
        return cls(tokens.astype(np.int32), log_probs.astype(np.float16), rest.astype(np.float32), len(row))

    def probabilities(self, position: int) -> tuple[_Floats, float]:
        """Of the K tokens, and of the rest. They sum to 1: the rounding of what is stored is evened out."""
        likely = np.exp(self.log_probs[position].astype(np.float64))
        rest = float(self.rest[position])
        total = float(likely.sum()) + rest
        return likely / total, rest / total

    def save(self, path: Path) -> None:
        """Write a .npz file, whole or not at all. Raises SettingError when it cannot be written."""
        data = io.BytesIO()
        arrays = {name: np.asarray(getattr(self, name), kind) for name, kind in _ARRAYS.items()}
        np.savez(data, **arrays)  # type: ignore[arg-type]
        write_whole(path, data.getvalue(), "reference")

    @classmethod
    def load(cls, path: Path) -> Teacher:
        """Read what `save` wrote. Raises InputError when it is missing or damaged."""
        try:
            with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as data:
                ids, log_probs, rest, size = (data[name] for name in _ARRAYS)
        except FileNotFoundError:
            raise InputError(str(path), "there is no such file", "Keep the reference's first.") from None
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise InputError(str(path), f"it is damaged ({error})", "Remove it: it is made again.") from error
        return cls(ids, log_probs, rest, int(size))


@dataclass(frozen=True, slots=True)
class Agreement:
    """How near a model's distributions are to the reference's, over the positions of a text."""

    num_tokens: int
    mean_kl: float
    """in nats; see `compare`"""
    top1_agreement: float
    """share of positions where both have the same most likely token"""


def compare(reference: Teacher, rows: Iterable[Row]) -> Agreement:
    """Mean KL(reference || model) over the positions, and how often both agree on the most likely token.

    `rows` are the model's logits at the same positions. All tokens but the reference's K most likely ones are
    merged into one. That can only lower the divergence (the data processing inequality): the figure is a
    lower bound of the one over the whole vocabulary, and equals it when K is the vocabulary. The reference
    is stored in 16 bits, so a model compared with itself comes out at some 1e-6 instead of 0.
    Raises VocabularyMismatch when the model has another number of tokens, ValueError when the rows are
    not as many as the positions.
    """
    divergences: list[float] = []
    same = 0
    for position, row in enumerate(rows):
        if len(row) != reference.vocabulary_size:
            reason = f"the reference has {reference.vocabulary_size} tokens, this model {len(row)}"
            raise VocabularyMismatch("quality", reason, "Compare quantizations of one model.")
        divergences.append(_divergence(reference, position, log_softmax(row)))
        same += int(np.argmax(row)) == int(reference.ids[position, 0])
    count = len(divergences)
    if count != len(reference.ids):
        raise ValueError(f"{count} rows for {len(reference.ids)} positions")
    return Agreement(count, float(np.mean(divergences)), same / count)


def _divergence(reference: Teacher, position: int, log_probs: _Floats) -> float:
    ids = reference.ids[position]
    likely, rest = reference.probabilities(position)
    rest_of_model = float(np.exp(np.delete(log_probs, ids)).sum())
    mine = np.maximum(np.append(log_probs[ids], np.log(max(rest_of_model, 1e-300))), _MIN_LOG)
    theirs = np.append(likely, rest)
    held = theirs > 0
    return max(float((theirs[held] * (np.log(theirs[held]) - mine[held])).sum()), 0.0)
