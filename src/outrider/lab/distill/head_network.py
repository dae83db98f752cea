"""An EAGLE-3 head in PyTorch: what it predicts at every place of a draft, all along some answers at once.

At the first place it reads a token with the target's state of the token before, at each later one with its
own state of the place before: the training-time test of EAGLE-3. It attends to the tokens before the draft as
they were read with the target's states, and to those of the draft as they were read in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from outrider.lab.distill.checkpoint import Checkpoint
from outrider.lab.distill.corpus import TrainingBatch
from outrider.lab.distill.head import HeadCheckpoint
from outrider.lab.distill.network import Network

_BLOCK = "blk.0."


class HeadNetwork(Network):
    """A head's weights as tensors. The embedding is the target's, and not among them."""

    embedding: Tensor
    places: int
    has_other: bool

    @classmethod
    def of(cls, checkpoint: Checkpoint, max_tokens: int, *, dtype: torch.dtype, device: torch.device) -> Self:
        assert isinstance(checkpoint, HeadCheckpoint)
        made = super().of(checkpoint, max_tokens, dtype=dtype, device=device)
        made.embedding = torch.tensor(checkpoint.embedding, device=device, dtype=dtype)
        made.places, made.has_other = checkpoint.places, checkpoint.drafted.has_other
        return made

    def logits(self, states: Tensor) -> Tensor:
        """Logits of the tokens that it drafts; -∞ for `<|other|>`."""
        found = super().logits(states)
        return functional.pad(found, (0, 1), value=-torch.inf) if self.has_other else found

    def along(self, batch: TrainingBatch) -> Iterator[Tensor]:
        """The normed states of each place of a draft, at the labelled positions that have so many others
        before them in their answers. The first of these is no text's first token."""
        assert batch.states is not None
        length = batch.tokens.shape[1]
        embedded = self._norm(functional.embedding(batch.tokens, self.embedding), f"{_BLOCK}attn_norm")
        fused = functional.linear(batch.states, self.weights["fc.weight"])
        before = _later(fused, 1)
        everywhere = torch.arange(length, device=self.device).expand_as(batch.tokens)
        keys, values = self._read(embedded, before, everywhere)

        rows, columns = _grid(batch)
        states, embedded = _picked(before, columns), _picked(embedded, columns)
        own: list[tuple[Tensor, Tensor]] = []
        for place in range(self.places):
            if place:
                own.append(self._read(embedded, states, columns))
            ends = columns[..., None] - place
            visible = (everywhere[:, None] >= 1) & (everywhere[:, None] <= ends)
            queries = self._rotation(self._heads(self._joined(embedded, states), f"{_BLOCK}attn_q"), columns)
            mixed = _attended(queries, keys, values, own, visible)
            states = states + self._linear(mixed, f"{_BLOCK}attn_output")
            states = states + self._feed_forward(_BLOCK, self._norm(states, f"{_BLOCK}ffn_norm"))
            wanted = batch.numbers >= place
            yield self._norm(states[rows[wanted], batch.numbers[wanted]], "output_norm")
            states = _later(states, 1)

    def _joined(self, embedded: Tensor, states: Tensor) -> Tensor:
        return torch.cat((embedded, self._norm(states, f"{_BLOCK}attn_norm_2")), dim=-1)

    def _read(self, embedded: Tensor, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (texts, kv_heads, tokens, head_width)."""
        joined = self._joined(embedded, states)
        keys = self._rotation(self._heads(joined, f"{_BLOCK}attn_k"), positions)
        return keys, self._heads(joined, f"{_BLOCK}attn_v")


def _later(values: Tensor, count: int) -> Tensor:
    """Values (…, tokens, width), each so many tokens later; zeros at the start."""
    return functional.pad(values, (0, 0, count, 0))[..., : values.shape[-2], :] if count else values


def _grid(batch: TrainingBatch) -> tuple[Tensor, Tensor]:
    """The row of each labelled position, and their columns as a grid (texts, longest answer), whose rows stay
    at the batch's last column where they run past it."""
    length = batch.tokens.shape[1]
    rows = batch.places // length
    firsts = batch.places.new_zeros(len(batch.tokens))
    firsts[rows] = batch.places % length - batch.numbers
    count = torch.arange(int(batch.numbers.max()) + 1, device=rows.device)
    return rows, (firsts[:, None] + count).clamp(max=length - 1)


def _picked(values: Tensor, columns: Tensor) -> Tensor:
    """Values (texts, tokens, width) at a grid of columns."""
    return values.gather(1, columns[..., None].expand(*columns.shape, values.shape[-1]))


def _attended(
    queries: Tensor, keys: Tensor, values: Tensor, own: Sequence[tuple[Tensor, Tensor]], visible: Tensor
) -> Tensor:
    """What queries (texts, heads, answer, head_width) find in the keys of their texts, as far as they are
    `visible` (texts, answer, tokens), and in those of the places of their own draft: the last of `own` at the
    query's token, the one before it a token earlier, and so on."""
    texts, heads, count, width = queries.shape
    size = (texts, keys.shape[1], heads // keys.shape[1], count)
    # The queries that share a key head are laid side by side.
    stacked = queries.reshape(texts, keys.shape[1], -1, width) * width**-0.5
    scores = (stacked @ keys.transpose(-1, -2)).view(*size, -1)
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    drafted = [
        tuple(_later(part, len(own) - place)[:, :, None] for part in pair)
        for place, pair in enumerate(own, start=1)
    ]
    with_own = [(stacked.view(*size, width) * key).sum(-1, keepdim=True) for key, _ in drafted]
    shares = torch.cat((scores, *with_own), dim=-1).softmax(-1)
    length = keys.shape[-2]
    of_texts = shares[..., :length].reshape(*size[:2], -1, length).to(values.dtype) @ values
    mixed = of_texts.view(*size, width)
    for place, (_, value) in enumerate(drafted):
        mixed = mixed + shares[..., length + place, None] * value
    return mixed.reshape(texts, heads, count, width).transpose(1, 2).flatten(-2)
