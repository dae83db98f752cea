"""What is kept of a model, written as a GGUF file: tokens, layers, and the types of matrices."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.constants import Keys

from outrider.backends.gguf import LoadOptions, Weights
from outrider.backends.gguf.retyping import Bytes, as_floats, of_floats, retyped, row_bytes
from outrider.core.contracts import Vocabulary
from outrider.core.errors import SettingError, VocabularyMismatch
from outrider.core.files import reason_of
from outrider.lab.trim.source import EMBEDDING, OUTPUT, Source, Tensor
from outrider.models.fields import Field
from outrider.models.reduced import OTHER_TOKEN, READS_PIECES, TARGET_TOKENIZER, TARGET_TOKENS
from outrider.models.vocab import align, tokenizer_id
from outrider.models.vocab.subset import Ids, Subset, tokenizer_fields
from outrider.policy.pretrained import CALIBRATION_KEY

_PREFIX = "outrider.trim."
_OF_THE_FILE = (Keys.General.ARCHITECTURE, Keys.General.ALIGNMENT, CALIBRATION_KEY)
"""Fields that the writer makes itself, or that are no longer true"""
_SAMPLE_ROWS = 64
_MEAN_ROWS = 8192


@dataclass(frozen=True, slots=True)
class Cut:
    """What is kept: tokens, the numbers of layers, and the types of matrices by name, where they change. A
    type for "output.weight" gives a model whose output layer is its embedding one of its own."""

    subset: Subset
    layers: tuple[int, ...]
    types: Mapping[str, GGMLQuantizationType] = field(default_factory=dict)


def outer_layers(layers: int, count: int) -> tuple[int, ...]:
    """The first and the last of the layers, `count` together, the odd one at the front: more of them agree
    with the target than at even distances. Raises SettingError."""
    if not 2 <= count <= layers:
        raise SettingError(f"--layers {count}", f"it has {layers} layers", f"Give 2 to {layers}.")
    first = (count + 1) // 2
    return (*range(first), *range(layers - (count - first), layers))


def write_trimmed(
    source: Source, cut: Cut, path: Path, target: Vocabulary, to_target: Ids, origin: Mapping[str, str]
) -> tuple[str, ...]:
    """Write a draft to `path`, whole or not at all, after llama.cpp has read its vocabulary and it lined up
    with the target's; lines for the user.

    `to_target` has the target's id of each of the source's tokens. `origin`: how the draft was made, by name.
    Raises SettingError (room on the disk) and VocabularyMismatch.
    """
    fields, notes = tokenizer_fields(source.fields, cut.subset, source.vocabulary)
    if cut.subset.has_other:
        ids = np.append(to_target[cut.subset.to_target[:-1]], -1).tolist()
        fields[TARGET_TOKENS] = Field(ids, GGUFValueType.ARRAY, GGUFValueType.INT32)
        fields[OTHER_TOKEN] = Field(cut.subset.size - 1, GGUFValueType.UINT32)
        fields[READS_PIECES] = Field(True, GGUFValueType.BOOL)
        fields[TARGET_TOKENIZER] = Field(tokenizer_id(target), GGUFValueType.STRING)
    fields |= {f"{_PREFIX}{name}": Field(text, GGUFValueType.STRING) for name, text in origin.items()}
    place = path.resolve()
    partial = place.with_name(f".{place.stem}.{os.getpid()}.partial.gguf")
    try:
        write_cut(source, cut, partial, fields)
        _check_map(partial, path, target, cut.subset)
        partial.replace(place)
    except OSError as error:
        reason = f"the draft could not be written ({reason_of(error)})"
        raise SettingError(str(path), reason, "Free some space, or name another file.") from error
    finally:
        partial.unlink(missing_ok=True)
    return tuple(notes)


def _check_map(written: Path, path: Path, target: Vocabulary, subset: Subset) -> None:
    options = LoadOptions(threads=1, gpu_layers=0, extra_buffer_types=False)
    with closing(Weights(written, options)) as weights:
        alignment = align(target, weights.vocabulary)
    if subset.has_other and alignment.report.common_tokens != subset.size - 1:
        raise VocabularyMismatch(str(path), "llama.cpp reads other tokens in it", "Report this.")


def write_cut(
    source: Source, cut: Cut, path: Path, tokenizer: Mapping[str, Field], *, is_sample: bool = False
) -> None:
    """Write the file itself. In a sample, what changes its type has the right size and values like the real
    ones, for measuring. Raises OSError, SettingError where the disk has no room."""
    kept = list(_kept(source, cut))
    needed = sum(_num_bytes(tensor, kind) for tensor, kind in kept)
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        why = f"it has {free / 1e6:,.0f} MB free, and the file needs {needed / 1e6:,.0f} MB"
        raise SettingError(str(path.parent), why, "Free some space, or name another place (-o).")
    writer = GGUFWriter(path, source.architecture)
    try:
        for key, found in {**_own_fields(source, cut), **tokenizer}.items():
            writer.add_key_value(key, found.value, found.kind, found.items)
        for tensor, kind in kept:
            size = _num_bytes(tensor, kind)
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor, kind in kept:
            writer.write_tensor_data(_values(source, cut, tensor, kind, is_sample))
    finally:
        writer.close()


def _num_bytes(tensor: Tensor, kind: GGMLQuantizationType) -> int:
    return int(np.prod(tensor.shape[:-1])) * row_bytes(kind, tensor.columns)


def _own_fields(source: Source, cut: Cut) -> dict[str, Field]:
    """All but the tokenizer's: numbers and lists of layers and tokens are those of what is kept."""
    prefix = f"{source.architecture}."
    dropped = ("tokenizer.", "split.")
    fields = {
        key: found
        for key, found in source.fields.items()
        if key not in _OF_THE_FILE and not key.startswith(dropped)
    }
    for key, found in fields.items():
        if key == Keys.LLM.BLOCK_COUNT.format(arch=source.architecture):
            fields[key] = replace(found, value=len(cut.layers))
        elif key == Keys.LLM.VOCAB_SIZE.format(arch=source.architecture):
            fields[key] = replace(found, value=cut.subset.size)
        elif key.startswith(prefix) and found.items is not None and len(found.value) == source.layers:
            fields[key] = replace(found, value=[found.value[layer] for layer in cut.layers])
    return fields


def _kept(source: Source, cut: Cut) -> Iterator[tuple[Tensor, GGMLQuantizationType]]:
    """Every tensor of the file, under its new name and of its new shape, with its type; `data` is the
    source's."""
    places = {layer: place for place, layer in enumerate(cut.layers)}
    for name, tensor in source.tensors.items():
        layer, kind = source.layer_of(name), cut.types.get(name, tensor.kind)
        if layer is not None and layer not in places:
            continue
        if layer is not None:
            tensor = replace(tensor, name=f"blk.{places[layer]}.{name.split('.', 2)[2]}")
        if source.is_by_token(name):
            tensor = replace(tensor, shape=(cut.subset.size, *tensor.shape[1:]))
        yield tensor, kind
        if name == EMBEDDING and OUTPUT not in source.tensors and OUTPUT in cut.types:
            yield replace(tensor, name=OUTPUT), cut.types[OUTPUT]


def _values(source: Source, cut: Cut, tensor: Tensor, kind: GGMLQuantizationType, is_sample: bool) -> Bytes:
    """The bytes of a tensor as `_kept` gives it."""
    rows = tensor.data
    if source.is_by_token(tensor.name):
        rows = _cut_rows(tensor, cut.subset)
    if tensor.kind == kind:
        return rows
    if is_sample:
        few = retyped(rows[:_SAMPLE_ROWS], tensor.kind, kind)
        return np.resize(few, (len(rows), few.shape[1]))
    return retyped(rows, tensor.kind, kind)


def _cut_rows(tensor: Tensor, subset: Subset) -> Bytes:
    """The rows of the tokens that are kept; that of the others' one token is the mean of theirs."""
    if not subset.has_other:
        return tensor.data
    known = subset.to_target[:-1]
    if len(tensor.shape) == 1:
        values = tensor.data.reshape(-1).view(np.float32)
        return np.append(values[known], np.delete(values, known).mean(dtype=np.float32)).view(np.uint8)
    others = np.setdiff1d(np.arange(len(tensor.data)), known)
    total = np.zeros(tensor.columns)
    for start in range(0, len(others), _MEAN_ROWS):
        total += as_floats(tensor.data[others[start : start + _MEAN_ROWS]], tensor.kind).sum(axis=0)
    mean = np.ascontiguousarray(total[None] / len(others), dtype=np.float32)
    return np.concatenate([tensor.data[known], of_floats(mean, tensor.kind)])
