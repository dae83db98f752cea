"""GGUF files tensor by tensor: what a draft is made of, and how it is written."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from outrider.backends.gguf.model import Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.core.contracts import Vocabulary
from outrider.core.errors import ModelFileError, SettingError, VocabularyMismatch
from outrider.core.files import check_room, reason_of
from outrider.models.header import Field, Header, TensorInfo, read_header
from outrider.models.reference import local_shards
from outrider.models.vocab import align
from outrider.models.vocab.subset import Ids


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as it is stored: `shape` in numpy's order, `rows` the bytes of each row (rows, bytes); of a
    vector each number is a row."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    rows: npt.NDArray[Any]


def read_tensors(path: Path) -> tuple[Header, dict[str, Tensor]]:
    """The header of a model's first part, and the tensors of all parts, mapped and not read.

    Raises ModelFileError for a file that is missing or damaged, and for rows of a type that is not known.
    """
    headers = {part: read_header(part) for part in local_shards(path)}
    tensors: dict[str, Tensor] = {}
    for part, header in headers.items():
        data = np.memmap(part, dtype=np.uint8, mode="r")[header.data_byte :]
        tensors |= {info.name: _tensor(path, data, info) for info in header.tensors}
    return next(iter(headers.values())), tensors


def _tensor(path: Path, data: npt.NDArray[np.uint8], info: TensorInfo) -> Tensor:
    shape = tuple(reversed(info.shape))
    kind = GGMLQuantizationType[info.type_name] if info.num_bytes is not None else None
    if kind is None or info.num_bytes is None or shape[-1] % GGML_QUANT_SIZES[kind][0]:
        why = f"its {info.name} is of {info.type_name}, whose rows cannot be taken apart here"
        raise ModelFileError(str(path), why, "Name the file that it was made of.")
    rows = shape[0] if len(shape) == 1 else int(np.prod(shape[:-1]))
    stored = data[info.offset_bytes : info.offset_bytes + info.num_bytes]
    return Tensor(shape, kind, stored.reshape(rows, -1))


def write_model_file(
    path: Path, architecture: str, fields: Mapping[str, Field], tensors: Mapping[str, Tensor]
) -> None:
    """Write a draft to one file, of which a part is left where that fails. Raises SettingError."""
    needed, way_out = sum(tensor.rows.nbytes for tensor in tensors.values()), "Free some space, or change -o."
    check_room(path.parent, needed, lambda why: SettingError(path.name, why, way_out))
    try:
        with closing(GGUFWriter(path, architecture)) as writer:
            for key, found in fields.items():
                writer.add_key_value(key, found.value, found.kind, found.items)
            for name, tensor in tensors.items():
                numbers = np.dtype(np.float32)
                writer.add_tensor_info(name, tensor.shape, numbers, tensor.rows.nbytes, tensor.kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor in tensors.values():
                writer.write_tensor_data(tensor.rows)
    except OSError as error:
        reason = f"the draft could not be written ({reason_of(error)})"
        raise SettingError(path.name, reason, way_out) from error


def check_tokens(path: Path, target: Vocabulary, to_target: Ids) -> None:
    """Raise VocabularyMismatch where llama.cpp does not read a draft's tokens as these of the target's."""
    options = LoadOptions(threads=1, gpu_layers=0, extra_buffer_types=False)
    with closing(Weights(path, options)) as weights:
        known = align(target, weights.vocabulary).to_target
    if not np.array_equal(known, to_target):
        raise VocabularyMismatch(path.name, "llama.cpp reads other tokens in it", "Report this.")
