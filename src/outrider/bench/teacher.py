"""What a model says at every position of a text, kept small: its most likely tokens, the mass of the rest."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.core.contracts import Model
from outrider.core.data import Row
from outrider.core.errors import BackendError, InputError
from outrider.core.files import write_whole
from outrider.lab.teacher_forced import teacher_forced
from outrider.sampling.selection import top_k

DEFAULT_TOP = 256

_ARRAYS = {"ids": np.int32, "log_probs": np.float16, "rest": np.float32, "vocabulary_size": np.int32}

Floats64 = npt.NDArray[np.float64]


def score(
    model: Model, prompt: Sequence[int], answer: Sequence[int], *, sequence: int = 0
) -> Generator[Row, None, None]:
    """The model's logits for each token of `answer`, given all before it, in a few batched calls.

    A row is valid until the next one is asked for. The sequence of the model is used and left empty, also
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
        model.truncate(sequence, 0)
        if answer:
            for rows in teacher_forced(model, tokens, len(prompt) - 1, sequence=sequence):
                if np.isnan(rows).any():
                    way_out = "The file is damaged: make it again."
                    raise BackendError(model.name, "its logits are no numbers", way_out)
                yield from rows
    finally:
        model.truncate(sequence, 0)


def log_softmax(row: Row) -> Floats64:
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

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def of(cls, rows: Iterable[Row], top: int = DEFAULT_TOP) -> Teacher:
        """Of rows of logits, one a position; each is read before the next is asked for."""
        ids: list[npt.NDArray[Any]] = []
        log_probs: list[Floats64] = []
        rest: list[float] = []
        size = 0
        for row in rows:
            size, every = len(row), log_softmax(row)
            ids.append(top_k(row, min(top, size)))
            log_probs.append(every[ids[-1]])
            rest.append(float(np.exp(np.delete(every, ids[-1])).sum()))
        shape = (len(ids), len(ids[0]) if ids else top)
        return cls(
            np.asarray(ids, dtype=np.int32).reshape(shape),
            np.asarray(log_probs).astype(np.float16).reshape(shape),
            np.asarray(rest, dtype=np.float32),
            size,
        )

    def probabilities(self, position: int) -> tuple[Floats64, float]:
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
                arrays = {name: data[name] for name in _ARRAYS}
        except FileNotFoundError:
            raise InputError(str(path), "there is no such file", "Check the path.") from None
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise InputError(str(path), f"it is damaged ({error})", "Remove it: it is made again.") from error
        ids, log_probs, rest, size = arrays.values()
        fits = ids.ndim == 2 and log_probs.shape == ids.shape and rest.shape == ids.shape[:1]
        if not fits or any(arrays[name].dtype != kind for name, kind in _ARRAYS.items()):
            raise InputError(str(path), "it holds something else", "Remove it: it is made again.")
        return cls(ids, log_probs, rest, int(size))
