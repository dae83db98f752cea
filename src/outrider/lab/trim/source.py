"""A model that is trimmed: its fields and tensors, row by row, and the file that is made of some of them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from gguf import GGUFValueType
from gguf.constants import Keys

from outrider.backends.gguf.model import Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.core.contracts import Vocabulary
from outrider.core.errors import ModelFileError, SettingError, VocabularyMismatch
from outrider.core.files import check_room, reason_of
from outrider.lab.model_file import Tensor, read_tensors, write_model_file
from outrider.models.gguf import read_card
from outrider.models.header import Field, fields_of
from outrider.models.vocab import align
from outrider.models.vocab.subset import TARGET_TOKENS, Ids, Subset, part_fields, tokenizer_fields
from outrider.policy.state import CALIBRATION_KEY

EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
BY_TOKEN = (EMBEDDING, OUTPUT, "output.bias", "per_layer_token_embd.weight")
"""Tensors with a row for each token."""
_OF_THE_FILE = (Keys.General.ARCHITECTURE, Keys.General.ALIGNMENT, CALIBRATION_KEY)
"""Fields that the writer makes itself, or that are no longer true"""


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
    card, (header, tensors) = read_card(path), read_tensors(path)
    fields, size, name = fields_of(card.path, header), card.num_tokens or 0, str(card.path)
    if TARGET_TOKENS in fields:
        raise ModelFileError(name, "it is trimmed already", "Trim the file that it was made of.")
    if EMBEDDING not in tensors or Keys.Tokenizer.LIST not in fields:
        lacking = "a tokenizer" if Keys.Tokenizer.LIST not in fields else EMBEDDING
        raise ModelFileError(name, f"it lacks {lacking}", "Name a whole model.")
    for part, tensor in tensors.items():
        has_token_rows = tensor.shape[0] == size
        if part in BY_TOKEN and not has_token_rows:
            why = f"its {part} has {tensor.shape[0]:,} rows, and its tokenizer {size:,} tokens"
            raise ModelFileError(name, why, "Download it again.")
        if has_token_rows and part not in BY_TOKEN:
            why = f"its {part} has a row for each token, and how it is used is not known here"
            raise ModelFileError(name, why, "Use another draft.")
    return Source(card.path, card.architecture, size, fields, tensors)


@dataclass(frozen=True, slots=True)
class Cut:
    """What is kept of a model: the first `size` - 1 of its tokens, which are in the `order` of their use, and
    one token for all others; or all of them.

    An untrained model has no row for "all others". It takes that of the most used token that is dropped: a
    draft ends where that one would have been drafted.
    """

    order: Ids
    size: int

    @property
    def subset(self) -> Subset:
        total = len(self.order)
        if self.size >= total:
            return Subset.whole(total)
        return Subset.of(self.order[: self.size - 1].tolist(), total)


def write_trimmed(
    source: Source, cut: Cut, path: Path, target: Vocabulary, to_target: Ids, origin: Mapping[str, str]
) -> None:
    """Write a draft, which llama.cpp reads and which lines up with `target`; rows are copied as they are, and
    where writing fails, a part of the file is left. `to_target` are the target's ids of the source's tokens,
    `origin` says by name how the draft was made. Raises SettingError (no room) and VocabularyMismatch."""
    subset, tensors = cut.subset, dict(source.tensors)
    fields = tokenizer_fields(source.fields, subset, source.vocabulary)
    if subset.has_other:
        rows = np.append(subset.to_target[:-1], cut.order[cut.size - 1])
        for name in tensors.keys() & set(BY_TOKEN):
            whole = tensors[name]
            tensors[name] = replace(whole, shape=(len(rows), *whole.shape[1:]), rows=whole.rows[rows])
        ids = np.append(to_target[subset.to_target[:-1]], -1).tolist()
        fields |= part_fields(ids, target, reads_pieces=True)
    fields |= {f"outrider.trim.{name}": Field(text, GGUFValueType.STRING) for name, text in origin.items()}
    needed, way_out = sum(tensor.rows.nbytes for tensor in tensors.values()), "Free some space, or change -o."
    try:
        check_room(path.parent, needed, lambda why: SettingError(path.name, why, way_out))
        write_model_file(path, source.architecture, _own_fields(source, subset.size) | fields, tensors)
    except OSError as error:
        reason = f"the draft could not be written ({reason_of(error)})"
        raise SettingError(path.name, reason, way_out) from error
    options = LoadOptions(threads=1, gpu_layers=0, extra_buffer_types=False)
    with closing(Weights(path, options)) as weights:
        known = align(target, weights.vocabulary).report.common_tokens
    if subset.has_other and known != subset.size - 1:
        raise VocabularyMismatch(path.name, "llama.cpp reads other tokens in it", "Report this.")


def _own_fields(source: Source, size: int) -> dict[str, Field]:
    fields = {
        key: found
        for key, found in source.fields.items()
        if key not in _OF_THE_FILE and not key.startswith(("tokenizer.", "split."))
    }
    key = Keys.LLM.VOCAB_SIZE.format(arch=source.architecture)
    return fields | ({key: replace(fields[key], value=size)} if key in fields else {})
