"""A network in PyTorch behind the Model contract: many sequences in one call, each with its KV."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as attention

from outrider.core.contracts import RewindKind, Vocabulary
from outrider.core.data import Logits, Span
from outrider.core.errors import BackendError
from outrider.distill.network import Attend, Network

__all__ = ["TorchModel"]

_DENSE = 0.5
"""share of the sequences of a run that must be wanted"""
_STRETCH = 32
"""lines whose attention is computed at once"""

_Stretch = tuple[slice, Callable[[Tensor], tuple[Tensor, Tensor]], Tensor]


class TorchModel:
    """A Model over a network. Its calls are padded to the longest span: give spans of one length together.

    `context_length` is in tokens of one sequence; the KV of all sequences is allocated at once.
    """

    rewind: RewindKind = "free"

    def __init__(
        self, name: str, network: Network, vocabulary: Vocabulary, max_sequences: int, context_length: int
    ) -> None:
        self.name = name
        self.vocabulary = vocabulary
        self.context_length = context_length
        self.max_sequences = max_sequences
        self.capacity_tokens = max_sequences * context_length
        self.max_batch_tokens = self.capacity_tokens
        self.max_rows = self.capacity_tokens
        self._network = network
        network.reach(context_length + 1)
        shape = network.shape
        self._lengths = [0] * max_sequences
        # The last place is written by padding alone.
        size = (2, max_sequences, shape.kv_heads, context_length + 1, shape.head_width)
        like = network.weights["token_embd.weight"]
        self._cache = [like.new_zeros(size) for _ in range(shape.layers)]

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        self._check(spans)
        with torch.inference_mode():
            rows = self._decode(spans)
        for span in spans:
            self._lengths[span.sequence] = span.start + len(span.tokens)
        return rows

    def _decode(self, spans: Sequence[Span]) -> list[Logits]:
        lines = {span.sequence: span for span in spans}
        sequences = self._sequences(lines)
        longest = max(len(span.tokens) for span in spans)
        tokens = torch.zeros(len(sequences), longest, dtype=torch.long)
        starts = torch.full((len(sequences),), self.context_length)
        for line, sequence in enumerate(sequences):
            if span := lines.get(sequence):
                tokens[line, : len(span.tokens)] = torch.tensor(span.tokens)
                starts[line] = span.start
        # Padding that runs past the end goes to the cache's last place, which nothing else looks at.
        positions = (starts[:, None] + torch.arange(longest)).clamp(max=self.context_length)
        tokens, positions = tokens.to(self._network.device), positions.to(self._network.device)
        states = self._network.hidden(tokens, positions, self._attend(sequences, positions))
        at = {sequence: line for line, sequence in enumerate(sequences)}
        rows = [states[at[s.sequence], len(s.tokens) - s.rows : len(s.tokens)] for s in spans]
        logits = self._network.logits(torch.cat(rows)).float().cpu().numpy()
        ends = np.cumsum([span.rows for span in spans])
        return [logits[end - span.rows : end] for end, span in zip(ends, spans, strict=True)]

    def _sequences(self, wanted: Collection[int]) -> range | list[int]:
        """Those of a call. Where few are missing between the first and the last, these are run along with
        nothing to read: the cache of a run of sequences need not be copied."""
        run = range(min(wanted), max(wanted) + 1)
        return run if len(wanted) >= _DENSE * len(run) else sorted(wanted)

    def _check(self, spans: Sequence[Span]) -> None:
        if len({span.sequence for span in spans}) < len(spans):
            raise BackendError(self.name, "two spans of one sequence in one call")
        for span in spans:
            if span.start != self._lengths[span.sequence]:
                raise BackendError(self.name, f"sequence {span.sequence} does not hold {span.start} tokens")
            if span.start + len(span.tokens) > self.context_length:
                reason = (
                    f"{span.start + len(span.tokens)} tokens do not fit its context of {self.context_length}"
                )
                raise BackendError(self.name, reason, "Give it a larger one.")

    def _attend(self, sequences: range | list[int], positions: Tensor) -> Attend:
        """Attention over each sequence's cache, up to each token's own place."""
        places = torch.tensor(sequences, device=positions.device)
        stretches = list(self._stretches(sequences, positions))

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            cache = self._cache[layer]
            for stored, new in zip(cache, (keys, values), strict=True):
                stored[places[:, None], :, positions] = new.transpose(1, 2)
            # The queries that share a key head are laid side by side: no key is copied for them.
            batch, heads, tokens, width = queries.shape
            groups = heads // keys.shape[1]
            stacked = queries.reshape(batch, keys.shape[1], groups * tokens, width)
            mixed = []
            for lines, held, visible in stretches:
                mask = visible[:, None].repeat(1, 1, groups, 1)
                stored_keys, stored_values = held(cache)
                mixed.append(attention(stacked[lines], stored_keys, stored_values, attn_mask=mask))
            return torch.cat(mixed).reshape(batch, heads, tokens, width)

        return attend

    def _stretches(self, sequences: range | list[int], positions: Tensor) -> Iterator[_Stretch]:
        """A call's lines in pieces, since each costs as much as the longest text among them: which, what
        takes theirs from the cache, and what of that each token sees (lines, tokens, places)."""
        lengths = [self._lengths[sequence] for sequence in sequences]
        for at in range(0, len(sequences), _STRETCH):
            lines = slice(at, at + _STRETCH)
            end = min(max(lengths[lines]) + positions.shape[1], self.context_length + 1)
            visible = torch.arange(end, device=positions.device) <= positions[lines, :, None]
            chosen: slice | Tensor
            if isinstance(sequences, range):
                piece = sequences[lines]
                chosen = slice(piece.start, piece.stop)
            else:
                chosen = torch.tensor(sequences[lines], device=positions.device)
            yield lines, partial(_held, sequences=chosen, end=end), visible

    def length(self, sequence: int) -> int:
        return self._lengths[sequence]

    def truncate(self, sequence: int, length: int) -> None:
        self._lengths[sequence] = min(length, self._lengths[sequence])

    def copy(self, source: int, sequence: int, length: int) -> None:
        for cache in self._cache:
            cache[:, sequence, :, :length] = cache[:, source, :, :length]
        self._lengths[sequence] = length

    def close(self) -> None:
        self._cache.clear()
        vars(self).pop("_network", None)  # whoever made the network may keep it


def _held(cache: Tensor, sequences: slice | Tensor, end: int) -> tuple[Tensor, Tensor]:
    """Keys and values of some sequences, up to a place."""
    return cache[0, sequences, :, :end], cache[1, sequences, :, :end]
