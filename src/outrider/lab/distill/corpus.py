"""The target's answers as a draft is trained on them: in its own token ids, in batches of like length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from outrider.lab.distill.examples import Example
from outrider.lab.distill.losses import Labels
from outrider.lab.distill.states import read_states
from outrider.models.vocab.subset import Subset

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Text:
    """One answer after its prompt, in the draft's ids; `tokens` of a head's are the target's.

    `tokens` (prompt and answer but its last token) are read; at the last `len(ids)` of them the target's
    distribution is known: `ids` and `probs` (answer, K + 1; the last column is
    `<|other|>`), `rest` (answer,).
    """

    category: str
    tokens: npt.NDArray[np.int32]
    ids: npt.NDArray[np.int32]
    probs: npt.NDArray[np.float16]
    rest: npt.NDArray[np.float16]
    is_greedy: bool
    has_other: bool
    """whether the last column is for tokens that the draft does not know"""
    states: Path | None = None
    """of a head's text: the file of what goes into the target's layers, which ends as `tokens` does"""


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Texts side by side: `tokens` (texts, longest) padded at the end, the labels of all their positions in
    the order of the texts, and where these positions are, as indices into the flattened `tokens`, and in
    their answers, as numbers from 0. `states` (texts, longest, values): what a head reads of the target."""

    tokens: Tensor
    places: Tensor
    numbers: Tensor
    labels: Labels
    states: Tensor | None = None


def text_of(example: Example, subset: Subset, max_tokens: int) -> Text | None:
    """An example in the draft's ids, cut to its last `max_tokens`; None when nothing of it is left."""
    known = subset.to_draft[example.ids]
    probs = np.exp(example.log_probs.astype(np.float32))
    rest = example.rest.astype(np.float32)
    total = probs.sum(-1) + rest  # the rounding of what is stored is evened out
    probs, rest = probs / total[:, None], rest / total
    other = np.zeros(len(rest), dtype=np.float32)
    other_id = subset.size - 1
    if subset.has_other:
        unknown = known == other_id
        other = (probs * unknown).sum(-1)
        probs = np.where(unknown, 0, probs)
    ids = np.concatenate([known, np.full((len(rest), 1), other_id)], axis=1).astype(np.int32)
    probs = np.concatenate([probs, other[:, None]], axis=1).astype(np.float16)
    tokens = subset.to_draft[np.concatenate([example.prompt, example.answer[:-1]])].astype(np.int32)
    size = min(len(ids), max_tokens)
    if not size:
        return None
    return Text(
        example.category, tokens[-max_tokens:], ids[-size:], probs[-size:], rest[-size:].astype(np.float16),
        example.temperature == 0, subset.has_other,
    )  # fmt: skip


class Corpus:
    """Texts to train on; an order of batches for every epoch that depends on the seed alone."""

    def __init__(self, texts: Iterable[Text], *, batch_tokens: int, seed: int) -> None:
        self.texts = list(texts)
        self._batch_tokens = batch_tokens
        self._seed = seed

    def batches(self) -> Iterator[list[int]]:
        """The texts of each batch, by their numbers, epoch after epoch without an end."""
        epoch = 0
        while self.texts:
            yield from self._epoch(epoch)
            epoch += 1

    def _epoch(self, epoch: int) -> list[list[int]]:
        """Texts of like length together, so that little is padding; batches in random order."""
        random = np.random.default_rng((self._seed, epoch))
        lengths = np.array([len(text.tokens) for text in self.texts])
        # Lengths are blurred, so that the same texts do not meet in every epoch.
        order = np.argsort(lengths * random.uniform(0.9, 1.1, len(lengths)))
        batches = packed(lengths, order, self._batch_tokens)
        return [batches[i] for i in random.permutation(len(batches))]


def packed(lengths: Ints, order: Ints, batch_tokens: int) -> list[list[int]]:
    """Texts of these lengths, taken in this order, in batches of up to `batch_tokens` with their padding."""
    batches: list[list[int]] = []
    longest = 0
    for i in order.tolist():
        longest = max(longest, int(lengths[i]))
        if not batches or longest * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
            longest = int(lengths[i])
        batches[-1].append(i)
    return batches


def batch_of(texts: Sequence[Text], device: torch.device) -> TrainingBatch:
    """Texts as tensors on a device."""
    tokens = pad_sequence([torch.from_numpy(text.tokens).long() for text in texts], batch_first=True)
    ends = [row * tokens.shape[1] + len(text.tokens) for row, text in enumerate(texts)]
    places = [torch.arange(end - len(text.ids), end) for text, end in zip(texts, ends, strict=True)]
    widest = max(text.ids.shape[1] for text in texts)

    def joined(arrays: Iterable[npt.NDArray[Any]]) -> Tensor:
        """Rows of K + 1 columns; those of other texts may have more."""
        return torch.cat(
            [pad(found, (0, widest - found.shape[1])) for found in map(torch.from_numpy, arrays)]
        )

    labels = Labels(
        joined(text.ids for text in texts).long().to(device),
        joined(text.probs for text in texts).float().to(device),
        torch.from_numpy(np.concatenate([text.rest for text in texts])).float().to(device),
    )
    numbers = torch.cat([torch.arange(len(text.ids)) for text in texts])
    return TrainingBatch(
        tokens.to(device), torch.cat(places).to(device), numbers.to(device), labels, _states(texts, device)
    )


def _states(texts: Sequence[Text], device: torch.device) -> Tensor | None:
    """Those of the target along the texts, padded at the end; None where no head is trained."""
    rows = [
        torch.from_numpy(read_states(text.states)[-len(text.tokens) :])
        for text in texts
        if text.states is not None
    ]
    return pad_sequence(rows, batch_first=True).float().to(device) if rows else None
