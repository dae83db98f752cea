"""A model with some of its tokens, written as a GGUF file. Rows are copied as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from gguf import GGUFValueType, GGUFWriter
from gguf.constants import Keys

from outrider.backends.gguf.model import Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.core.contracts import Vocabulary
from outrider.core.errors import SettingError, VocabularyMismatch
from outrider.core.files import check_room, reason_of
from outrider.lab.trim.source import BY_TOKEN, Source, Tensor
from outrider.models.header import Field
from outrider.models.vocab import align
from outrider.models.vocab.subset import Ids, Subset, part_fields, tokenizer_fields
from outrider.policy.state import CALIBRATION_KEY

_PREFIX = "outrider.trim."
_OF_THE_FILE = (Keys.General.ARCHITECTURE, Keys.General.ALIGNMENT, CALIBRATION_KEY)
"""Fields that the writer makes itself, or that are no longer true"""


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

    @property
    def rows(self) -> Ids:
        """The model's row of each token that the draft has."""
        subset = self.subset
        return np.append(subset.to_target[:-1], self.order[self.size - 1]) if subset.has_other else self.order


def write_trimmed(
    source: Source, cut: Cut, path: Path, target: Vocabulary, to_target: Ids, origin: Mapping[str, str]
) -> tuple[str, ...]:
    """Write a draft, which llama.cpp reads and which lines up with the target; lines for the user.

    Args:
        source: What is trimmed.
        cut: What is kept of it.
        path: The file; where writing fails, a part of it is left there.
        target: The vocabulary that it lines up with.
        to_target: The target's id of each of the source's tokens.
        origin: How the draft was made, by name.

    Raises SettingError (room on the disk) and VocabularyMismatch.
    """
    subset = cut.subset
    fields, notes = tokenizer_fields(source.fields, subset, source.vocabulary)
    if subset.has_other:
        ids = np.append(to_target[subset.to_target[:-1]], -1).tolist()
        fields |= part_fields(ids, target, reads_pieces=True)
    fields |= {f"{_PREFIX}{name}": Field(text, GGUFValueType.STRING) for name, text in origin.items()}
    try:
        _write(source, cut, path, _own_fields(source, subset.size) | fields)
    except OSError as error:
        reason = f"the draft could not be written ({reason_of(error)})"
        raise SettingError(path.name, reason, "Free some space, or name another file.") from error
    options = LoadOptions(threads=1, gpu_layers=0, extra_buffer_types=False)
    with closing(Weights(path, options)) as weights:
        known = align(target, weights.vocabulary).report.common_tokens
    if subset.has_other and known != subset.size - 1:
        raise VocabularyMismatch(path.name, "llama.cpp reads other tokens in it", "Report this.")
    return tuple(notes)


def _write(source: Source, cut: Cut, path: Path, fields: Mapping[str, Field]) -> None:
    kept = list(_kept(source, cut))
    needed = sum(tensor.rows.nbytes for tensor in kept)
    way_out = "Free some space, or name another place (-o)."
    check_room(path.parent, needed, lambda why: SettingError(path.name, why, way_out))
    writer = GGUFWriter(path, source.architecture)
    try:
        for key, found in fields.items():
            writer.add_key_value(key, found.value, found.kind, found.items)
        for tensor in kept:
            size = tensor.rows.nbytes
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size, tensor.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in kept:
            writer.write_tensor_data(tensor.rows)
    finally:
        writer.close()


def _own_fields(source: Source, size: int) -> dict[str, Field]:
    """All but the tokenizer's."""
    dropped = ("tokenizer.", "split.")
    fields = {
        key: found
        for key, found in source.fields.items()
        if key not in _OF_THE_FILE and not key.startswith(dropped)
    }
    key = Keys.LLM.VOCAB_SIZE.format(arch=source.architecture)
    return fields | ({key: replace(fields[key], value=size)} if key in fields else {})


def _kept(source: Source, cut: Cut) -> Iterator[Tensor]:
    """Every tensor of the file."""
    is_cut, rows = cut.size < source.vocabulary, cut.rows
    for name, tensor in source.tensors.items():
        if is_cut and name in BY_TOKEN:
            tensor = replace(tensor, shape=(len(rows), *tensor.shape[1:]), rows=tensor.rows[rows])
        yield tensor
