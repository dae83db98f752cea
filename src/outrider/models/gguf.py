"""What a GGUF model says of itself and of its parts, read from its header alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from outrider.core.errors import ModelFileError
from outrider.models.constants import GGML_QUANT_SIZES, GGMLQuantizationType, Keys, LlamaFileType
from outrider.models.header import Array, Header, TensorInfo, read_header
from outrider.models.reference import local_shards
from outrider.models.vocab.subset import TARGET_TOKENIZER

_GUESSED = int(LlamaFileType.GUESSED)
_LAYER = re.compile(r"blk\.(\d+)\.(.*)")
_WINDOW_PERIODS = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2, "cohere2": 4}
"""One layer in so many has no window, by llama.cpp's own defaults for files that do not say it."""

ModelKind = Literal["model", "mtp", "eagle3", "dflash", "assistant"]
"""What a file holds: a model that runs by itself, or what drafts from a target's hidden states: MTP layers
alone, an EAGLE-3 head, a block drafter (DFlash, DFlash2, DSpark), an assistant (which reads its target's KV,
too)"""

HEADS: dict[ModelKind, str] = {
    "mtp": "MTP layers",
    "eagle3": "an EAGLE-3 head",
    "dflash": "a DFlash drafter",
    "assistant": "a Gemma 4 assistant",
}
"""files that are no models of their own, in words"""
_KINDS: dict[str, ModelKind] = {"eagle3": "eagle3", "dflash": "dflash", "gemma4-assistant": "assistant"}
"""by architecture, those of which all files are alike"""


@dataclass(frozen=True, slots=True)
class Layer:
    """How many values of K and V a layer keeps of a token. `has_window`: of the last tokens alone, unless all
    are kept."""

    key_values: int = 0
    value_values: int = 0
    has_window: bool = False

    def cell_bytes(self, type_k: str, type_v: str) -> float:
        parts = ((self.key_values, type_k), (self.value_values, type_v))
        sizes = ((values, GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]) for values, kind in parts)
        return sum(values * size / block for values, (block, size) in sizes)


@dataclass(frozen=True, slots=True)
class Layout:
    """What a model is made of: bytes of each tensor, and its layers. The last `num_heads` of the layers
    predict tokens after the next one (MTP). `attention` is the width of all heads of attention, `head_widths`
    are those of one head in K and in V."""

    name: str
    tensors: Mapping[str, int]
    layers: Sequence[Layer]
    num_heads: int = 0
    attention: int = 0
    attention_heads: int = 0
    head_widths: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What can be known of a model before it is loaded. `path` is the file to load.
    `active_parameters` are those that one token uses; fewer than `parameters` only in mixtures of experts.
    `quantization` is a name such as "Q4_K_M". Lengths are in tokens, sizes in bytes over all files. What the
    header leaves out is None."""

    path: Path
    name: str
    architecture: str
    parameters: int
    active_parameters: int
    bytes_per_token: int
    """of the weights that a call over a single token reads: without the experts that the token passes by,
    without the embedding where that is only looked up, not multiplied with, and without the model's heads"""
    quantization: str
    num_tokens: int | None
    """size of the vocabulary, padding included"""
    context_length: int | None
    """the longest context that the model was trained for"""
    chat_template: str | None
    tokenizer: str
    """the tokenizer's family and pre-tokenizer, as the header names them: "gpt2 (qwen2)\""""
    block_count: int | None
    embedding_length: int | None
    sliding_window: int | None
    """tokens that a sliding-window layer sees"""
    expert_count: int
    expert_used_count: int
    file_bytes: int
    kind: ModelKind = "model"
    output_bytes: int = 0
    """of the weights that give the logits: the output layer, or the embedding where the two are one"""
    mtp_layers: int = 0
    """layers of the file that predict tokens after the next one (`nextn_predict_layers`)"""
    own_head: ModelCard | None = None
    """the first of these beside a model, as if it were a file: its weights, and what a token reads for it"""
    tokens: Array | None = None
    """where the spellings of the tokens lie in the first file"""
    layout: Layout = field(default_factory=lambda: Layout("", {}, ()), compare=False, repr=False)
    """its tensors and layers"""
    has_reduced_vocabulary: bool = False
    """whether it is a draft that knows a part of its target's tokens"""


def read_card(path: Path) -> ModelCard:
    """Read a model's card from its GGUF header, or headers when it is split. Raises ModelFileError when a
    file is damaged, when the parts do not belong together, or when it holds something else than a model."""
    files = local_shards(path)
    headers = [read_header(file) for file in files]
    first, tensors = headers[0], [tensor for header in headers for tensor in header.tensors]
    architecture = first.text(Keys.General.ARCHITECTURE) or ""
    _check_parts(files, headers)
    _check_model(files[0], first, architecture, tensors)

    def number(key: str) -> int | None:
        return first.number(key.format(arch=architecture))

    family, pre = first.text(Keys.Tokenizer.MODEL) or "none", first.text(Keys.Tokenizer.PRE)
    used = number(Keys.LLM.EXPERT_USED_COUNT) or 0
    parameters = sum(tensor.num_parameters for tensor in tensors)
    file_bytes = sum(header.file_bytes for header in headers)
    tokens = first.fields.get(Keys.Tokenizer.LIST)
    layers, mtp_layers = number(Keys.LLM.BLOCK_COUNT) or 0, number(Keys.LLM.NEXTN_PREDICT_LAYERS) or 0
    kind = _kind(architecture, layers, mtp_layers, tensors)
    first_head = max(layers - mtp_layers, 0)
    heads = [tensor for tensor in tensors if kind == "model" and _layer(tensor) >= first_head]
    bytes_per_parameter = file_bytes / max(parameters, 1)
    read = _bytes_per_token([t for t in tensors if t not in heads], used, bytes_per_parameter)
    card = ModelCard(
        path=files[0],
        name=first.text(Keys.General.NAME) or files[0].stem,
        architecture=architecture,
        parameters=parameters,
        active_parameters=parameters - sum(_idle_parameters(tensor, used) for tensor in tensors),
        bytes_per_token=read,
        quantization=_quantization(first, tensors),
        num_tokens=tokens.length if isinstance(tokens, Array) else number(Keys.LLM.VOCAB_SIZE),
        context_length=number(Keys.LLM.CONTEXT_LENGTH),
        chat_template=first.text(Keys.Tokenizer.CHAT_TEMPLATE),
        tokenizer=f"{family} ({pre})" if pre else family,
        block_count=number(Keys.LLM.BLOCK_COUNT),
        embedding_length=number(Keys.LLM.EMBEDDING_LENGTH),
        sliding_window=number(Keys.Attention.SLIDING_WINDOW),
        expert_count=number(Keys.LLM.EXPERT_COUNT) or 0,
        expert_used_count=used,
        file_bytes=file_bytes,
        kind=kind,
        output_bytes=_output_bytes(tensors),
        mtp_layers=mtp_layers,
        tokens=tokens if isinstance(tokens, Array) else None,
        layout=_layout_of(first, tensors, files[0].stem),
        has_reduced_vocabulary=first.text(TARGET_TOKENIZER) is not None,
    )
    own = [tensor for tensor in heads if _layer(tensor) == first_head]
    return replace(card, own_head=_head(card, own, bytes_per_parameter)) if own else card


def _head(card: ModelCard, tensors: Sequence[TensorInfo], bytes_per_parameter: float) -> ModelCard:
    """The card of a model's own head of these tensors; embedding and (usually) output are the model's."""
    parameters = sum(tensor.num_parameters for tensor in tensors)
    read = [tensor for tensor in tensors if "nextn.embed_tokens" not in tensor.name]
    has_output = any("nextn.shared_head_head" in tensor.name for tensor in tensors)
    output_bytes = 0 if has_output else card.output_bytes
    return replace(
        card,
        name=f"{card.name}, MTP head",
        kind="mtp",
        parameters=parameters,
        active_parameters=parameters - sum(_idle_parameters(t, card.expert_used_count) for t in tensors),
        bytes_per_token=output_bytes + _bytes_per_token(read, card.expert_used_count, bytes_per_parameter),
        file_bytes=round(sum(_size(tensor, bytes_per_parameter) for tensor in tensors)),
    )


def check_whole(card: ModelCard) -> None:
    """Raise ModelFileError for a file of heads, which cannot run by itself."""
    if card.kind != "model":
        why = f"it holds {HEADS[card.kind]} alone, which runs beside its model"
        raise ModelFileError(str(card.path), why, "Name its model here, and this file as the draft.")


def _check_parts(files: tuple[Path, ...], headers: list[Header]) -> None:
    count = headers[0].number(Keys.Split.LLM_KV_SPLIT_COUNT) or 1
    if count != len(files):
        reason = f"its header speaks of {count} parts, its name of {len(files)}"
        way_out = f"Restore its name, which ends in -00001-of-{count:05d}.gguf."
        raise ModelFileError(str(files[0]), reason, way_out)
    promised = headers[0].number(Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT)
    found = sum(len(header.tensors) for header in headers)
    if count > 1 and promised is not None and promised != found:
        reason = f"its parts hold {found} tensors instead of {promised}"
        raise ModelFileError(str(files[0]), reason, "They are not of one model: download all parts again.")


def _check_model(path: Path, header: Header, architecture: str, tensors: list[TensorInfo]) -> None:
    kind = "mmproj" if architecture == "clip" else header.text(Keys.General.TYPE) or "model"
    reason, way_out = "", "Name the model's own file."
    if kind != "model":
        what = {"adapter": "a LoRA adapter", "mmproj": "an image or sound projector"}.get(kind, repr(kind))
        reason = f"it holds {what}, not a language model"
    elif not architecture:
        reason, way_out = "its header names no architecture", "Download it again."
    elif not tensors:
        reason = "it holds a vocabulary and no weights"
    if reason:
        raise ModelFileError(str(path), reason, way_out)


def _kind(architecture: str, layers: int, mtp_layers: int, tensors: Iterable[TensorInfo]) -> ModelKind:
    """MTP layers are a model's last ones: a file of them alone has none of the layers before."""
    if kind := _KINDS.get(architecture):
        return kind
    held = {layer for tensor in tensors if (layer := _layer(tensor)) >= 0}
    return "mtp" if mtp_layers and held and min(held) >= layers - mtp_layers else "model"


def _layer(tensor: TensorInfo) -> int:
    match = _LAYER.match(tensor.name)
    return int(match[1]) if match else -1


def _idle_parameters(tensor: TensorInfo, used: int) -> int:
    """Parameters of the experts that a token passes by; experts are a tensor's last dimension."""
    experts = tensor.shape[-1] if "_exps." in tensor.name and tensor.shape else 0
    if not 0 < used < experts:
        return 0
    return tensor.num_parameters // experts * (experts - used)


def _bytes_per_token(tensors: Sequence[TensorInfo], used: int, bytes_per_parameter: float) -> int:
    """`bytes_per_parameter` is taken for tensors of a type that the `gguf` package does not know."""
    has_output = any(tensor.name == "output.weight" for tensor in tensors)
    total = 0.0
    for tensor in tensors:
        if has_output and tensor.name == "token_embd.weight":
            continue
        is_read = 1 - _idle_parameters(tensor, used) / max(tensor.num_parameters, 1)
        total += _size(tensor, bytes_per_parameter) * is_read
    return round(total)


def _size(tensor: TensorInfo, bytes_per_parameter: float) -> float:
    return tensor.num_parameters * bytes_per_parameter if tensor.num_bytes is None else tensor.num_bytes


def _output_bytes(tensors: Sequence[TensorInfo]) -> int:
    sizes = {tensor.name: tensor.num_bytes or 0 for tensor in tensors}
    return sizes.get("output.weight", sizes.get("token_embd.weight", 0))


def _quantization(header: Header, tensors: Iterable[TensorInfo]) -> str:
    declared = header.number(Keys.General.FILE_TYPE)
    if declared is not None and not declared & _GUESSED:
        try:
            return LlamaFileType(declared).name.removeprefix("MOSTLY_").removeprefix("ALL_")
        except ValueError:
            # A label newer than the `gguf` package; the tensors show as much.
            pass
    weight: Counter[str] = Counter()
    for tensor in tensors:
        weight[tensor.type_name] += tensor.num_bytes or 0
    return weight.most_common(1)[0][0]


def _layout_of(header: Header, tensors: Sequence[TensorInfo], name: str) -> Layout:
    arch = header.text(Keys.General.ARCHITECTURE) or ""

    def number(key: str) -> int:
        return header.number(key.format(arch=arch)) or 0

    num_layers, heads = number(Keys.LLM.BLOCK_COUNT), number(Keys.Attention.HEAD_COUNT)
    shapes: list[dict[str, tuple[int, ...]]] = [{} for _ in range(num_layers)]
    """of each layer's tensors"""
    for tensor in tensors:
        found = _LAYER.match(tensor.name)
        if tensor.shape and found and int(found[1]) < num_layers:
            shapes[int(found[1])][found[2].removesuffix(".weight")] = tensor.shape
    attention = max((layer["attn_output"][0] for layer in shapes if "attn_output" in layer), default=0)
    usual = number(Keys.LLM.EMBEDDING_LENGTH) // heads if heads else attention
    keys, values = (number(key) or usual for key in (Keys.Attention.KEY_LENGTH, Keys.Attention.VALUE_LENGTH))
    kv_heads = number(Keys.Attention.HEAD_COUNT_KV) if heads else 0
    num_cached = num_layers - number(Keys.Attention.SHARED_KV_LAYERS)
    period = number(Keys.Attention.SLIDING_WINDOW_PATTERN) or _WINDOW_PERIODS.get(arch, 0)
    layers = []
    for i, layer in enumerate(shapes):
        if i >= num_cached:
            layers.append(Layer())
            continue
        # Where the file's own pattern is a list, all are taken to have one: the least that it can be.
        has_window = number(Keys.Attention.SLIDING_WINDOW) > 0 and (not period or i % period < period - 1)
        layers.append(Layer(*_kept(layer, kv_heads * keys, kv_heads * values), has_window))
    return Layout(
        name=name,
        tensors={tensor.name: tensor.num_bytes or 0 for tensor in tensors},
        layers=layers,
        num_heads=number(Keys.LLM.NEXTN_PREDICT_LAYERS),
        attention=attention,
        attention_heads=attention // values if values else 0,
        head_widths=(keys, values),
    )


def _kept(shapes: Mapping[str, tuple[int, ...]], keys: int, values: int) -> tuple[int, int]:
    """The values of K and V that a layer keeps of a token; `keys`, `values`: where one tensor holds both."""
    if "attn_k_b" in shapes:  # compressed (MLA): V is computed from what is kept as K
        return shapes.get("attn_kv_a_mqa", (0,))[-1], 0
    if "attn_k" in shapes:
        return shapes["attn_k"][-1], shapes.get("attn_v", shapes["attn_k"])[-1]
    is_recurrent = any(name.startswith(("ssm_", "time_mix", "shortconv")) for name in shapes)
    return (keys, values) if "attn_qkv" in shapes and not is_recurrent else (0, 0)
