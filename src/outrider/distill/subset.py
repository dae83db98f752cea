"""A reduced vocabulary: the tokens of the target that its answers really use.

The output layer is often most of a small draft's cost, and most of a vocabulary is hardly ever drafted
(FR-Spec, arXiv 2502.14856). What the draft does not know, it reads as one token more and says with it that
something else comes next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.core.contracts import Vocabulary
from outrider.core.errors import SettingError

__all__ = ["OTHER", "Subset", "choose_subset", "coverage"]

OTHER = "<|other|>"
"""The token that stands for all that a draft does not know."""

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Subset:
    """Which of a target's tokens a draft knows.

    `to_target` (draft tokens,): the target's ids in ascending order; with `has_other`, the last entry is -1,
    for the token that stands for all others. `to_draft` (target tokens,): a draft id for every token of the
    target, that of the last token for those that are not known.
    """

    to_target: Ids
    to_draft: Ids
    has_other: bool

    @property
    def size(self) -> int:
        """Tokens of the draft, `<|other|>` included."""
        return len(self.to_target)

    @classmethod
    def whole(cls, size: int) -> Subset:
        """Every token of the target."""
        return cls(np.arange(size), np.arange(size), has_other=False)

    @classmethod
    def of(cls, kept: Sequence[int], size: int) -> Subset:
        """These tokens of a target's vocabulary of `size`, and one for all others."""
        tokens = np.unique(np.asarray(kept, dtype=np.int64))
        to_draft = np.full(size, len(tokens), dtype=np.int64)
        to_draft[tokens] = np.arange(len(tokens))
        return cls(np.append(tokens, -1), to_draft, has_other=True)


def choose_subset(vocabulary: Vocabulary, counts: Ids, size: int) -> Subset:
    """The `size` - 1 tokens that count most, and one for the others; `counts`: uses of each token.

    Control tokens, tokens of a single byte and all that end an answer are kept in any case: without them
    some text cannot be written at all. Tokens that never occur are taken in the order of their ids, where
    the merges that were learned first, which are the most usual ones, come first.
    Raises SettingError when `size` leaves no room for those.
    """
    total = vocabulary.size
    if size >= total:
        return Subset.whole(total)
    needed = [t for t in range(total) if _is_needed(vocabulary, t)]
    if size <= len(needed) + 1:
        reason = f"{size} tokens are too few: {len(needed) + 1} are needed in any case"
        raise SettingError("vocabulary", reason, "Ask for more, or for 0: all of them.")
    order = np.lexsort((np.arange(total), -counts))
    is_needed = np.zeros(total, dtype=bool)
    is_needed[needed] = True
    others = order[~is_needed[order]][: size - 1 - len(needed)]
    return Subset.of([*needed, *others.tolist()], total)


def _is_needed(vocabulary: Vocabulary, token: int) -> bool:
    if vocabulary.is_control(token) or vocabulary.ends_generation(token):
        return True
    return len(vocabulary.piece(token)) <= 1


def coverage(subset: Subset, texts: Iterable[npt.NDArray[np.int32]]) -> float:
    """Share of the tokens of some texts that the draft knows, 0-1; 1 for no text."""
    known = total = 0
    for text in texts:
        known += int((subset.to_draft[text] != subset.size - subset.has_other).sum()) if len(text) else 0
        total += len(text)
    return known / total if total else 1.0
