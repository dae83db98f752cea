"""The model that is trimmed, as its file has it: fields and tensors, row by row and not yet decoded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf.constants import GGMLQuantizationType, Keys

from outrider.backends.gguf.retyping import Bytes, can_make, row_bytes
from outrider.core.errors import ModelFileError
from outrider.models.fields import Field, fields_of
from outrider.models.gguf import read_card
from outrider.models.header import TensorInfo, read_header
from outrider.models.reduced import TARGET_TOKENS
from outrider.models.reference import local_shards

EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
_BY_TOKEN = (EMBEDDING, OUTPUT, "output.bias", "per_layer_token_embd.weight")
"""Tensors with a row for each token."""
_WINDOW = "attention.sliding_window"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor; `shape` in numpy's order, `data` its rows' bytes (rows, bytes of a row), of a vector one."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    data: Bytes

    @property
    def columns(self) -> int:
        """Numbers in a row."""
        return self.shape[-1]

    @property
    def weights(self) -> int:
        """Numbers in all rows."""
        return len(self.data) * self.columns

    @property
    def is_matrix(self) -> bool:
        """Whether it has rows that a call multiplies with, which may be of any type."""
        return len(self.shape) > 1


@dataclass(frozen=True, slots=True)
class Source:
    """A model that can be trimmed."""

    path: Path
    name: str
    architecture: str
    layers: int
    vocabulary: int
    fields: dict[str, Field]
    tensors: dict[str, Tensor]

    @property
    def output(self) -> Tensor:
        """What gives the logits: the output layer, or the embedding where the two are one."""
        return self.tensors.get(OUTPUT, self.tensors[EMBEDDING])

    def is_by_token(self, name: str) -> bool:
        """Whether a tensor has a row for each token."""
        return name in _BY_TOKEN

    def layer_of(self, name: str) -> int | None:
        """The layer that a tensor belongs to."""
        parts = name.split(".")
        return int(parts[1]) if parts[0] == "blk" and parts[1].isdigit() else None

    def multiplied(self) -> Iterator[tuple[str, Tensor, int | None]]:
        """The matrices that every call multiplies with, by their names (of an embedding that is the output
        layer too, that one's), and their layers, None for the output."""
        for name, tensor in self.tensors.items():
            layer = self.layer_of(name)
            if tensor is self.output:
                yield OUTPUT, tensor, None
            elif tensor.is_matrix and layer is not None:
                yield name, tensor, layer

    def check_layers(self, count: int) -> None:
        """Raise ModelFileError where layers differ in kind, so that none may take another's place."""
        kinds: dict[int, set[str]] = {}
        for name in self.tensors:
            if (layer := self.layer_of(name)) is not None:
                kinds.setdefault(layer, set()).add(name.split(".", 2)[2])
        has_window = any(key.endswith(_WINDOW) for key in self.fields)
        if count < self.layers and (has_window or any(kind != kinds[0] for kind in kinds.values())):
            why = "its layers are of several kinds, so that none can take another's place"
            raise ModelFileError(str(self.path), why, "Leave --layers out.")


def read_source(path: Path) -> Source:
    """Read a model in all its parts; the weights are mapped, not read.

    Raises ModelFileError for a file that is missing, damaged, trimmed already, or without what is trimmed.
    """
    card = read_card(path)
    fields: dict[str, Field] = {}
    tensors: dict[str, Tensor] = {}
    for part in local_shards(card.path):
        header = read_header(part)
        fields = fields or fields_of(part, header)
        data = np.memmap(part, dtype=np.uint8, mode="r")
        for info in header.tensors:
            tensors[info.name] = _tensor(path, data, header.data_byte, info)
    size = card.num_tokens or 0
    source = Source(card.path, card.name, card.architecture, card.block_count or 0, size, fields, tensors)
    _check(source)
    return source


def _tensor(path: Path, data: Bytes, first_byte: int, info: TensorInfo) -> Tensor:
    shape = tuple(reversed(info.shape))
    if info.num_bytes is None or not row_bytes(GGMLQuantizationType[info.type_name], shape[-1]):
        why = f"its {info.name} is of {info.type_name}, whose rows cannot be cut apart here"
        raise ModelFileError(str(path), why, "Trim the file that it was made of.")
    start = first_byte + info.offset_bytes
    rows = data[start : start + info.num_bytes].reshape(int(np.prod(shape[:-1])), -1)
    return Tensor(info.name, shape, GGMLQuantizationType[info.type_name], rows)


def _check(source: Source) -> None:
    path, size = str(source.path), source.vocabulary
    if TARGET_TOKENS in source.fields:
        raise ModelFileError(path, "it is trimmed already", "Trim the file that it was made of.")
    if EMBEDDING not in source.tensors or not source.layers or Keys.Tokenizer.LIST not in source.fields:
        lacking = "a tokenizer" if Keys.Tokenizer.LIST not in source.fields else EMBEDDING
        raise ModelFileError(path, f"it lacks {lacking}", "Name a whole model.")
    for name, tensor in source.tensors.items():
        is_vector = len(tensor.shape) == 1
        has_token_rows = tensor.shape[0] == size
        if source.is_by_token(name) and not has_token_rows:
            why = f"its {name} has {tensor.shape[0]:,} rows, and its tokenizer {size:,} tokens"
            raise ModelFileError(path, why, "Download it again.")
        if has_token_rows and not source.is_by_token(name):
            why = f"its {name} has a row for each token, and how it is used is not known here"
            raise ModelFileError(path, why, "Take another draft.")
        if has_token_rows and not is_vector and not can_make(tensor.kind):
            why = f"its {name} is {tensor.kind.name}, which cannot be cut by rows"
            raise ModelFileError(path, why, "Trim the file that it was made of, or another quantization.")
