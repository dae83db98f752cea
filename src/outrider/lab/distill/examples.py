"""What a draft is trained on: the target's answers, with its most likely tokens at every position.

Each answer is a file of its own, written whole or not at all, so that a generation which is stopped loses
nothing but the answers under way.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt

from outrider.core.contracts import Vocabulary
from outrider.core.errors import InputError
from outrider.core.files import write_whole
from outrider.lab.distill.plan import USUAL_VOCABULARY
from outrider.models.vocab.subset import Subset, choose_subset

Tokens = npt.NDArray[np.int32]

_ARRAYS = ("prompt", "answer", "ids", "log_probs", "rest")


@dataclass(frozen=True, slots=True)
class Example:
    """One answer of the target.

    `prompt` (int32) and `answer` (int32) are token ids of the target. At position i of the answer
    `ids[i]` (int32, K of them, the most likely first) are the target's most likely tokens, given all before
    it, `log_probs[i]` (float16) the natural logarithms of their probabilities, and `rest[i]` (float16) the
    probability of all other tokens. Under a grammar they are the target's own, before its mask.
    """

    id: str
    category: str
    prompt: Tokens
    answer: Tokens
    ids: Tokens
    log_probs: npt.NDArray[np.float16]
    rest: npt.NDArray[np.float16]
    temperature: float
    text: str
    """the answer as text, for a follow-up question"""


def example_path(folder: Path, id: str) -> Path:
    """Where the answer to a question lies; any text can be its id."""
    return folder / f"{blake2b(id.encode(), digest_size=12).hexdigest()}.npz"


def write_example(folder: Path, example: Example) -> None:
    """Raises SettingError when it cannot be written; nothing is left half-written then."""
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
            temperature = float(data["temperature"])
            return Example(identity, category, **arrays, temperature=temperature, text=text)
    except Exception as error:  # the readers of zip files and arrays raise whatever their parts do
        raise InputError(str(path), f"it is damaged ({error})", "Remove it: it is made again.") from error


def tokens_used(examples: Sequence[Example], vocabulary: Vocabulary, size: int | None) -> Subset:
    """The tokens that the answers use most, so many (0: all; None: the usual number): what a draft knows."""
    counts = np.zeros(vocabulary.size, dtype=np.int64)
    for example in examples:
        counts += np.bincount(example.answer, minlength=vocabulary.size)
    size = USUAL_VOCABULARY if size is None else size
    return choose_subset(vocabulary, counts, size or vocabulary.size)
