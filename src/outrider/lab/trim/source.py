"""The model that is trimmed, as its file has it: fields and tensors, row by row and not decoded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, Keys

from outrider.core.errors import ModelFileError
from outrider.models.gguf import read_card
from outrider.models.header import Field, TensorInfo, fields_of, read_header
from outrider.models.reference import local_shards
from outrider.models.vocab.subset import TARGET_TOKENS

EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
BY_TOKEN = (EMBEDDING, OUTPUT, "output.bias", "per_layer_token_embd.weight")
"""Tensors with a row for each token."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor; `shape` in numpy's order, `rows` their bytes (rows, bytes of a row), of a vector one number
    each."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    rows: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Source:
    """A model that can be trimmed."""

    path: Path
    architecture: str
    vocabulary: int
    fields: dict[str, Field]
    tensors: dict[str, Tensor]

    @property
    def output_ratio(self) -> float:
        """The share of the bytes of a step that are read for the logits: those of the output layer, or of
        the embedding where the two are one."""
        output = self.tensors.get(OUTPUT, self.tensors[EMBEDDING])
        layers = sum(tensor.rows.nbytes for name, tensor in self.tensors.items() if name.startswith("blk."))
        return output.rows.nbytes / (output.rows.nbytes + layers)


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
            tensors[info.name] = _tensor(path, data[header.data_byte :], info)
    source = Source(card.path, card.architecture, card.num_tokens or 0, fields, tensors)
    _check(source)
    return source


def _tensor(path: Path, data: npt.NDArray[np.uint8], info: TensorInfo) -> Tensor:
    shape = tuple(reversed(info.shape))
    kind = GGMLQuantizationType[info.type_name] if info.num_bytes is not None else None
    if kind is None or info.num_bytes is None or shape[-1] % GGML_QUANT_SIZES[kind][0]:
        why = f"its {info.name} is of {info.type_name}, whose rows cannot be cut apart here"
        raise ModelFileError(str(path), why, "Trim the file that it was made of.")
    rows = shape[0] if len(shape) == 1 else int(np.prod(shape[:-1]))
    stored = data[info.offset_bytes : info.offset_bytes + info.num_bytes]
    return Tensor(info.name, shape, kind, stored.reshape(rows, -1))


def _check(source: Source) -> None:
    path, size = str(source.path), source.vocabulary
    if TARGET_TOKENS in source.fields:
        raise ModelFileError(path, "it is trimmed already", "Trim the file that it was made of.")
    if EMBEDDING not in source.tensors or Keys.Tokenizer.LIST not in source.fields:
        lacking = "a tokenizer" if Keys.Tokenizer.LIST not in source.fields else EMBEDDING
        raise ModelFileError(path, f"it lacks {lacking}", "Name a whole model.")
    for name, tensor in source.tensors.items():
        has_token_rows = tensor.shape[0] == size
        if name in BY_TOKEN and not has_token_rows:
            why = f"its {name} has {tensor.shape[0]:,} rows, and its tokenizer {size:,} tokens"
            raise ModelFileError(path, why, "Download it again.")
        if has_token_rows and name not in BY_TOKEN:
            why = f"its {name} has a row for each token, and how it is used is not known here"
            raise ModelFileError(path, why, "Use another draft.")
