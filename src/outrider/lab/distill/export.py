"""A draft as a GGUF file that any llama.cpp loads, with provenance and what Outrider needs in its header."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.constants import Keys
from gguf.quants import quantize as encoded

from outrider.backends.gguf.model import Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.gguf.quantizer import quantize, read_type
from outrider.core.contracts import Vocabulary
from outrider.core.errors import ModelFileError, SettingError, VocabularyMismatch
from outrider.core.files import check_writable, reason_of
from outrider.lab.distill.checkpoint import SHAPE_KEYS, Checkpoint, rotation_layout
from outrider.models.header import Field, read_header
from outrider.models.vocab import align
from outrider.models.vocab.subset import Subset, part_fields, tokenizer_fields
from outrider.policy.state import CALIBRATION_KEY, PretrainedCalibration

_PREFIX = "outrider.distill."
_TEXTS = ("teacher", "teacher_sha256", "data", "version")
_NUMBERS = ("tokens", "steps", "seed")
_LICENCE_KEYS = (Keys.General.LICENSE_NAME, Keys.General.LICENSE_LINK)
"""What the licence's identifier, which the provenance has, does not say."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """How a draft was made.

    `teacher`: the target's name; `teacher_sha256`: of its file; `data`: what prompts at which temperatures,
    in one sentence; `tokens`: label positions trained on, each as often as it was; `version`: of Outrider;
    `licence`: the teacher's, None where its file names none. Of a draft that was continued, `tokens` and
    `steps` count what went before too.
    """

    teacher: str
    teacher_sha256: str
    data: str
    tokens: int
    steps: int
    seed: int
    version: str
    licence: str | None = None


def read_provenance(path: Path) -> Provenance | None:
    """How a draft was made, by its file; None for one that was not distilled here.

    Raises ModelFileError when the header cannot be read, or says it in part only.
    """
    header = read_header(path)
    if not any(key.startswith(_PREFIX) for key in header.fields):
        return None
    found: dict[str, Any] = {name: header.text(_PREFIX + name) for name in _TEXTS}
    found |= {name: header.number(_PREFIX + name) for name in _NUMBERS}
    if lacking := [_PREFIX + name for name, value in found.items() if value is None]:
        reason = f"its header lacks {', '.join(lacking)}"
        raise ModelFileError(str(path), reason, "Download the draft again, or make it again.")
    return Provenance(**found, licence=header.text(Keys.General.LICENSE))


_WAY_OUT = "Use a draft that was made for this target, or start from the target itself."


@dataclass(frozen=True, slots=True)
class Written:
    """A file that was written. `tensor_types`: the types of its matrices with their share of the weights, the
    largest first; `notes`: what its user should know."""

    path: Path
    file_bytes: int
    tensor_types: dict[str, float]
    notes: tuple[str, ...]


def write_gguf(
    checkpoint: Checkpoint,
    path: Path,
    *,
    subset: Subset,
    target: Vocabulary,
    provenance: Provenance,
    window: int = 0,
    prior: PretrainedCalibration | None = None,
    quantization: str = "Q4_0",
    embedding_quantization: str = "Q8_0",
    threads: int = 1,
) -> Written:
    """Write a draft. What is at `path` is replaced once the new file is complete, and llama.cpp has read its
    vocabulary.

    Args:
        checkpoint: The draft's weights, and the metadata of its target or of a draft with the same tokens.
        path: The file.
        subset: The tokens of `target` that it knows.
        target: The target's vocabulary.
        provenance: How it was made.
        window: The last tokens of a text that a draft of a reduced vocabulary reads; 0: all.
        prior: What to expect of its acceptance.
        quantization: Any type of `outrider quantize`.
        embedding_quantization: Another one for the embedding and the output layer.
        threads: Of the quantizer.

    Raises SettingError (type, place, room on the disk, weights that are no numbers, a tokenizer that is not
    the target's), VocabularyMismatch, and what `backends.gguf.quantizer.quantize` raises.
    """
    to, ends = read_type(quantization), read_type(embedding_quantization)
    if checkpoint.shape.vocabulary != subset.size or len(subset.to_draft) != target.size:
        reason = f"its {checkpoint.shape.vocabulary:,} tokens are not those of its map ({subset.size:,})"
        raise SettingError("the draft", reason, "Restrict its weights to the same tokens first.")
    fields, notes = tokenizer_fields(checkpoint.metadata, subset, target.size)
    if subset.has_other:
        fields |= part_fields(subset.to_target.tolist(), target, window=window)
    metadata = checkpoint.metadata
    fields |= {key: metadata[key] for key in _LICENCE_KEYS if key in metadata}
    if prior is not None:
        fields[CALIBRATION_KEY] = Field(json.dumps(prior), GGUFValueType.STRING)
    check_writable(path, "draft")
    floats = "F32" if {to, ends} & {"F32", "BF16"} else "F16"
    place = path.resolve()
    partial = place.with_name(f".{place.stem}.{os.getpid()}.partial.gguf")
    try:
        _write_floats(checkpoint, partial, floats, fields, provenance)
        if not np.array_equal(read_subset(partial, target).to_target, subset.to_target):
            raise VocabularyMismatch(str(path), "llama.cpp reads other tokens in it", "Report this.")
        if to == ends == floats:
            partial.replace(place)
            return Written(path, path.stat().st_size, {to: 1.0}, tuple(notes))
        made = quantize(partial, to, path, ends=ends, threads=threads, force=True)
    except OSError as error:
        reason = f"the draft could not be written ({reason_of(error)})"
        raise SettingError(str(path), reason, "Free some space, or name another file.") from error
    finally:
        partial.unlink(missing_ok=True)
    return Written(path, made.file_bytes, made.tensor_types, (*notes, *made.notes))


def read_subset(path: Path, target: Vocabulary) -> Subset:
    """Which of a target's tokens a draft's GGUF file knows.

    Raises VocabularyMismatch when its tokens are another tokenizer's or its map is damaged, ModelFileError
    when it cannot be loaded.
    """
    weights = Weights(path, LoadOptions(threads=1, gpu_layers=0))
    try:
        alignment = align(target, weights.vocabulary)
        num_tokens = weights.vocabulary.size
    finally:
        weights.close()
    known = alignment.to_target[:-1]
    if alignment.identical:
        return Subset.whole(target.size)
    if alignment.other_token is None:
        reason = f"its {num_tokens:,} tokens are not the target's {target.size:,}"
        raise VocabularyMismatch(f"draft {path.stem}", reason, _WAY_OUT)
    if alignment.other_token != num_tokens - 1 or np.any(np.diff(known) <= 0):
        reason = "the tokens of its reduced vocabulary are not in the target's order"
        raise VocabularyMismatch(f"draft {path.stem}", reason, _WAY_OUT)
    return Subset.of(known.tolist(), target.size)


def _write_floats(
    checkpoint: Checkpoint, path: Path, floats: str, fields: Mapping[str, Field], provenance: Provenance
) -> None:
    """The whole file: matrices of the type `floats`, norms and biases of 32 bits."""
    shape = checkpoint.shape
    writer = GGUFWriter(path, shape.architecture)
    writer.add_name(f"{provenance.teacher} draft")
    writer.add_file_type(LlamaFileType.ALL_F32 if floats == "F32" else LlamaFileType.MOSTLY_F16)
    writer.add_vocab_size(shape.vocabulary)
    for field, key in SHAPE_KEYS.items():
        value = getattr(shape, field)
        kind_of_value = GGUFValueType.FLOAT32 if isinstance(value, float) else GGUFValueType.UINT32
        writer.add_key_value(key.format(arch=shape.architecture), value, kind_of_value)
    writer.add_value_length(shape.head_width)
    writer.add_rope_dimension_count(shape.head_width)
    for key, found in fields.items():
        writer.add_key_value(key, found.value, found.kind, found.items)
    for name in _TEXTS:
        writer.add_string(_PREFIX + name, getattr(provenance, name))
    for name in _NUMBERS:
        writer.add_int64(_PREFIX + name, getattr(provenance, name))
    if provenance.licence:
        writer.add_license(provenance.licence)
    for name, weights in checkpoint.weights.items():
        kind = GGMLQuantizationType[floats if weights.ndim > 1 else "F32"]
        with np.errstate(over="ignore"):
            stored = encoded(rotation_layout(name, weights, shape, to_gguf=True), kind)
        if not np.isfinite(stored).all():
            reason = f"{name} holds numbers that are infinite, none at all, or too large for 16 bits"
            raise SettingError("the draft", reason, "Train it again with a lower learning rate.")
        writer.add_tensor(name, np.ascontiguousarray(stored), raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
