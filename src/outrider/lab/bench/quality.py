"""What a smaller file costs in quality: every quantization of a target scored against the best one.

The reference's distributions at every position of the recorded answers are kept first (`Reference.save`);
then each other quantization reads the same texts (`Reference.compared`). No two models are in memory at once.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.core.contracts import Model
from outrider.core.data import Row
from outrider.core.errors import BackendError, InputError, SettingError
from outrider.core.files import reason_of, write_whole
from outrider.lab.models import ModelFile
from outrider.lab.rows import AnswerRow, QualityRow
from outrider.lab.teacher_forced import teacher_forced
from outrider.models.reference import without_quantization
from outrider.sampling.selection import top_k

_MIN_LOG = -700.0
"""replaces the logarithm of a probability of nothing, so that a sum stays finite"""
_ARRAYS = {"ids": np.int32, "log_probs": np.float16, "rest": np.float32}
"""Of each position the most likely tokens, their log probabilities (nats), the probability of all others."""

_Floats = npt.NDArray[np.float64]


def families(models: Sequence[ModelFile]) -> list[tuple[ModelFile, ...]]:
    """The models in groups that are quantizations of one: of one architecture, shape, tokenizer and name. The
    first of each group is its reference, the one with the most bits a weight; the order is otherwise that of
    `models`."""
    groups: dict[tuple[object, ...], list[ModelFile]] = {}
    for model in models:
        card = model.card
        shape = (card.parameters, card.block_count, card.embedding_length, card.expert_count)
        name = without_quantization(card.name)
        groups.setdefault((card.architecture, shape, card.num_tokens, card.tokenizer, name), []).append(model)
    found = []
    for group in groups.values():
        best = max(group, key=lambda model: model.card.file_bytes / model.card.parameters)
        found.append((best, *(model for model in group if model is not best)))
    return found


@dataclass(frozen=True, slots=True)
class Reference:
    """The target `name`, whose distributions over its answers lie in `folder`, a file a text.

    `top`: how many tokens of a position are kept; all others are merged into one. That can only lower the
    divergence (the data processing inequality): the figure is a lower bound of the one over the whole
    vocabulary. Log probabilities are kept in 16 bits: a model compared with itself comes out at some 1e-6.
    """

    folder: Path
    name: str
    top: int = 256

    def save(self, model: Model, answers: Iterable[AnswerRow]) -> None:
        """Keep the model's distributions at every position of the answers.

        Those that are there and whole are passed over, so that an interrupted run goes on where it was.
        Raises SettingError where nothing can be written, BackendError when a call fails.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = f"it cannot be made ({reason_of(error)})"
            raise SettingError(str(self.folder), why, "Name another folder.") from error
        for answer in answers:
            if answer.tokens and self._load(answer) is None:
                with closing(_rows(model, answer)) as rows:
                    columns = zip(*(self._kept(row) for row in rows), strict=True)
                    arrays = zip(_ARRAYS.items(), columns, strict=True)
                    made = {name: np.array(column, kind) for (name, kind), column in arrays}
                data = io.BytesIO()
                np.savez(data, **made)  # type: ignore[arg-type]
                write_whole(self._path(answer), data.getvalue(), "reference")

    def compared(self, model: Model, target: str, answers: Iterable[AnswerRow]) -> Iterator[QualityRow]:
        """A row about `target` for each answer, as soon as it is worked out; none for an empty answer.

        Raises InputError where a text of the reference is not kept, BackendError when a call fails.
        """
        for answer in filter(lambda answer: answer.tokens, answers):
            if (kept := self._load(answer)) is None:
                why = f"its distributions over {answer.workload} {answer.case} are not kept"
                raise InputError(self.name, why, "Run it again: they are made again.")
            divergences, agrees = [], 0
            with closing(_rows(model, answer)) as rows:
                for ids, log_probs, rest, row in zip(*kept, rows, strict=True):
                    divergences.append(_divergence(ids, log_probs, rest, row))
                    agrees += int(np.argmax(row)) == int(ids[0])
            yield QualityRow(
                target=target,
                reference=self.name,
                workload=answer.workload,
                case=answer.case,
                num_tokens=len(divergences),
                mean_kl=float(np.mean(divergences)),
                top1_agreement=agrees / len(divergences),
            )

    def _kept(self, row: Row) -> tuple[npt.NDArray[Any], _Floats, float]:
        ids, every = top_k(row, min(self.top, len(row))), _log_softmax(row)
        return ids, every[ids], float(np.exp(np.delete(every, ids)).sum())

    def _load(self, answer: AnswerRow) -> Sequence[npt.NDArray[np.generic]] | None:
        """What was kept of an answer; None where it is missing or damaged."""
        try:
            with np.load(io.BytesIO(self._path(answer).read_bytes()), allow_pickle=False) as data:
                found = [data[name] for name in _ARRAYS]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None
        return found if all(len(array) == len(answer.tokens) for array in found) else None

    def _path(self, answer: AnswerRow) -> Path:
        """Names the text, not only the case: a case that is answered again is another text."""
        text = repr((self.name, answer.workload, answer.case, answer.prompt, answer.tokens))
        return self.folder / f"{blake2b(text.encode(), digest_size=12).hexdigest()}.npz"


def _rows(model: Model, answer: AnswerRow) -> Generator[Row, None, None]:
    """The model's logits for each token of an answer, given all before it; each is valid until the next one.
    Sequence 0 of the model is used and left empty. Raises BackendError when a call fails or logits are no
    numbers."""
    try:
        model.truncate(0, 0)
        for rows in teacher_forced(model, [*answer.prompt, *answer.tokens[:-1]], len(answer.prompt) - 1):
            if np.isnan(rows).any():
                way_out = "The file is damaged: make it again."
                raise BackendError(model.name, "its logits are not numbers", way_out)
            yield from rows
    finally:
        model.truncate(0, 0)


def _log_softmax(row: Row) -> _Floats:
    """Log probabilities of a row of logits, worked out in 64 bits."""
    logits = row.astype(np.float64)
    logits -= logits.max()
    return np.asarray(logits - np.log(np.exp(logits).sum()), dtype=np.float64)


def _divergence(
    ids: npt.NDArray[np.int32], log_probs: npt.NDArray[np.float16], rest: float, row: Row
) -> float:
    """KL(reference || model) at a position, in nats."""
    theirs = np.append(np.exp(log_probs.astype(np.float64)), float(rest))
    theirs /= theirs.sum()  # the rounding of what is kept is evened out
    log_mine = _log_softmax(row)
    rest_of_model = float(np.exp(np.delete(log_mine, ids)).sum())
    mine = np.maximum(np.append(log_mine[ids], np.log(max(rest_of_model, 1e-300))), _MIN_LOG)
    held = theirs > 0
    return max(float((theirs[held] * (np.log(theirs[held]) - mine[held])).sum()), 0.0)
