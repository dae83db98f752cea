"""A draft as a GGUF file that any llama.cpp loads, with provenance and what Outrider needs in its header."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.constants import Keys
from gguf.quants import quantize as encoded

from outrider.backends.gguf import LoadOptions, Weights
from outrider.backends.gguf.quantizer import quantize, read_type
from outrider.core.contracts import Vocabulary
from outrider.core.errors import ModelFileError, SettingError, VocabularyMismatch
from outrider.core.files import check_writable
from outrider.distill.checkpoint import Array, Checkpoint, Shape, interleaved
from outrider.distill.subset import Field, Subset, read_field, tokenizer_fields
from outrider.models.header import read_header
from outrider.models.reduced import OTHER_TOKEN, TARGET_TOKENIZER, TARGET_TOKENS, WINDOW
from outrider.models.vocab import align, tokenizer_id
from outrider.policy.pretrained import CALIBRATION_KEY, PretrainedCalibration

_PREFIX = "outrider.distill."
_TEXTS = ("teacher", "teacher_sha256", "data", "version")
_NUMBERS = ("tokens", "steps", "seed")


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


def add_provenance(writer: GGUFWriter, provenance: Provenance) -> None:
    """Put it into the header of a file that is being written."""
    for name in _TEXTS:
        writer.add_string(_PREFIX + name, getattr(provenance, name))
    for name in _NUMBERS:
        writer.add_int64(_PREFIX + name, getattr(provenance, name))
    if provenance.licence:
        writer.add_license(provenance.licence)


def read_provenance(path: Path) -> Provenance | None:
    """How a draft was made, by its file; None for one that was not distilled here.

    Raises ModelFileError when the header cannot be read, or says it in part only.
    """
    header = read_header(path)
    if not any(key.startswith(_PREFIX) for key in header.fields):
        return None
    texts = {name: header.text(_PREFIX + name) for name in _TEXTS}
    numbers = {name: header.number(_PREFIX + name) for name in _NUMBERS}
    lacking = [name for name, value in (texts | numbers).items() if value is None]
    if lacking:
        reason = f"its header lacks {', '.join(_PREFIX + name for name in lacking)}"
        raise ModelFileError(str(path), reason, "Fetch the draft anew, or make it again.")
    licence = header.text(Keys.General.LICENSE)
    return Provenance(**texts, **numbers, licence=licence)  # type: ignore[arg-type]  # none is None


_WAY_OUT = "Take a draft that was made for this target, or start from the target itself."


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
    embedding_quantization: str | None = None,
    threads: int = 1,
) -> Written:
    """Write a draft that knows `subset` of `target`'s tokens. What is at `path` is replaced once the new file
    is complete, and llama.cpp has read its vocabulary.

    `checkpoint` has the draft's weights, and the metadata of its target or of a draft with the same tokens.
    `window` goes into the map of a reduced vocabulary: the last tokens of a text that the draft reads, 0 all.
    `prior`: what to expect of its acceptance.
    `quantization` is any type of `outrider quantize`; `embedding_quantization` another one for the embedding
    and the output layer; None: what llama.cpp takes for them beside it.

    Raises SettingError (type, place, room on the disk, weights that are no numbers, a tokenizer that is not
    the target's), VocabularyMismatch, and what `backends.llama_cpp.quantizer.quantize` raises.
    """
    to = read_type(quantization)
    ends = read_type(embedding_quantization) if embedding_quantization else None
    if checkpoint.shape.vocabulary != subset.size or len(subset.to_draft) != target.size:
        reason = f"its {checkpoint.shape.vocabulary:,} tokens are not those of its map ({subset.size:,})"
        raise SettingError("the draft", reason, "Restrict its weights to the same tokens first.")
    check_writable(path, "draft")
    fields, notes = tokenizer_fields(checkpoint.metadata, subset, target.size)
    fields |= _licence(checkpoint) | _map(subset, target, window)
    if prior is not None:
        fields[CALIBRATION_KEY] = Field(json.dumps(prior), GGUFValueType.STRING)
    floats = "F32" if {to, ends} & {"F32", "BF16"} else "F16"
    with _partial(path) as partial:
        _write_floats(checkpoint, partial, floats, fields, provenance)
        if not np.array_equal(read_subset(partial, target).to_target, subset.to_target):
            raise VocabularyMismatch(str(path), "llama.cpp reads other tokens in it", "Report this.")
        if to == (ends or to) == floats:
            partial.replace(path.resolve())
            return Written(path, path.stat().st_size, {to: 1.0}, tuple(notes))
        made = quantize(partial, to, path, ends=ends, threads=threads, force=True)
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


@contextmanager
def _partial(path: Path) -> Iterator[Path]:
    """A name beside a file's own, gone in the end. Raises SettingError, naming `path`, where it cannot be
    written."""
    place = path.resolve()
    partial = place.with_name(f".{place.stem}.{os.getpid()}.partial.gguf")
    try:
        yield partial
    except OSError as error:
        reason = f"the draft could not be written ({(error.strerror or str(error)).lower()})"
        raise SettingError(str(path), reason, "Free some space, or name another file.") from error
    finally:
        partial.unlink(missing_ok=True)


def _map(subset: Subset, target: Vocabulary, window: int) -> dict[str, Field]:
    if not subset.has_other:
        return {}
    return {
        TARGET_TOKENS: Field(subset.to_target.tolist(), GGUFValueType.ARRAY, GGUFValueType.INT32),
        OTHER_TOKEN: Field(subset.size - 1, GGUFValueType.UINT32),
        WINDOW: Field(window, GGUFValueType.UINT32),
        TARGET_TOKENIZER: Field(tokenizer_id(target), GGUFValueType.STRING),
    }


def _licence(checkpoint: Checkpoint) -> dict[str, Field]:
    """What the licence's identifier, which the provenance has, does not say."""
    keys = (Keys.General.LICENSE_NAME, Keys.General.LICENSE_LINK)
    return {key: read_field(checkpoint.metadata[key]) for key in keys if key in checkpoint.metadata}


def _write_floats(
    checkpoint: Checkpoint, path: Path, floats: str, fields: Mapping[str, Field], provenance: Provenance
) -> None:
    """The whole file, with matrices of the type `floats`."""
    writer = GGUFWriter(path, checkpoint.shape.architecture)
    writer.add_name(f"{provenance.teacher} draft")
    writer.add_file_type(LlamaFileType.ALL_F32 if floats == "F32" else LlamaFileType.MOSTLY_F16)
    _add_shape(writer, checkpoint.shape)
    for key, found in fields.items():
        writer.add_key_value(key, found.value, found.kind, found.items)
    add_provenance(writer, provenance)
    for name, values in checkpoint.weights.items():
        _add_weights(writer, name, interleaved(name, values, checkpoint.shape), floats)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _add_shape(writer: GGUFWriter, shape: Shape) -> None:
    writer.add_vocab_size(shape.vocabulary)
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_width)
    writer.add_value_length(shape.head_width)
    writer.add_rope_dimension_count(shape.head_width)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.norm_epsilon)


def _add_weights(writer: GGUFWriter, name: str, values: Array, floats: str) -> None:
    """Matrices in the type `floats`; norms and biases stay 32 bits wide."""
    kind = GGMLQuantizationType[floats if values.ndim > 1 else "F32"]
    with np.errstate(over="ignore"):
        stored = np.ascontiguousarray(encoded(values, kind))
    if not np.isfinite(stored).all():
        reason = f"{name} holds numbers that are infinite, none at all, or too large for 16 bits"
        raise SettingError("the draft", reason, "Train it anew with a lower learning rate.")
    writer.add_tensor(name, stored, raw_dtype=kind)
