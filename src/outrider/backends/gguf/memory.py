"""What models take on the host and on each GPU, counted from their headers before anything is loaded.

Everything is the least that it can be: what is refused here cannot work, what passes may still fail in the
library. Layers are given to devices as llama.cpp's `load_tensors` does it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, Keys

from outrider.backends.gguf.devices import NO_DEVICE, free_bytes, list_devices
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.machine import available_bytes
from outrider.core.errors import OutOfMemory
from outrider.models.header import Header, read_header
from outrider.models.reference import local_shards

if TYPE_CHECKING:
    from outrider.backends.gguf.library import Library

HOST = "host"
_LAYER = re.compile(r"blk\.(\d+)\.")
_FLOAT_BYTES = 4
_NO_PLAIN_CACHE = (".ssm.", ".shortconv.", ".wkv.", "_lora_rank", ".shared_kv_layers", "attention.indexer")
"""Keys of models some of whose layers keep no KV, or another than by their heads."""
_MIN_CONTEXT = 256
_GB = 10**9


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What a model's header says of its size: bytes of each tensor, and values of K and V that a layer keeps
    of a token (0 where layers differ)."""

    name: str
    tensors: Mapping[str, int]
    num_layers: int
    num_cached: int
    """layers that keep KV"""
    key_values: int
    value_values: int
    window_tokens: int
    vocabulary: int
    trained_context: int


@dataclass(frozen=True, slots=True)
class Contexts:
    """One model with its load options and the KV cells that are opened on it."""

    sizes: ModelSizes
    options: LoadOptions
    capacity_tokens: int = 0


@dataclass(slots=True)
class Need:
    """Bytes on one device: weights, KV and the logits of a call."""

    weights: int = 0
    cache: int = 0
    logits: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.logits


def read_sizes(path: Path) -> ModelSizes:
    """The sizes of a model, in however many files. Raises ModelFileError."""
    headers = [read_header(file) for file in local_shards(path)]
    first, tensors = headers[0], [tensor for header in headers for tensor in header.tensors]
    arch = first.text(Keys.General.ARCHITECTURE) or ""

    def number(key: str) -> int:
        return first.number(key.format(arch=arch)) or 0

    heads = number(Keys.Attention.HEAD_COUNT)
    usual = number(Keys.LLM.EMBEDDING_LENGTH) // heads if heads else 0
    kv_heads = 0 if _differs(first, arch) else number(Keys.Attention.HEAD_COUNT_KV)
    embedding = next((t for t in tensors if t.name == "token_embd.weight"), None)
    num_layers = number(Keys.LLM.BLOCK_COUNT)
    return ModelSizes(
        name=path.stem,
        tensors={tensor.name: tensor.num_bytes or 0 for tensor in tensors},
        num_layers=num_layers,
        num_cached=num_layers - number(Keys.LLM.NEXTN_PREDICT_LAYERS),
        key_values=kv_heads * (number(Keys.Attention.KEY_LENGTH) or usual),
        value_values=kv_heads * (number(Keys.Attention.VALUE_LENGTH) or usual),
        window_tokens=number(Keys.Attention.SLIDING_WINDOW),
        vocabulary=embedding.shape[-1] if embedding else 0,
        trained_context=number(Keys.LLM.CONTEXT_LENGTH),
    )


def _differs(header: Header, arch: str) -> bool:
    return any(part in key for key in header.fields if key.startswith(arch) for part in _NO_PLAIN_CACHE)


def needed(model: Contexts, gpus: Mapping[str, int]) -> dict[str, Need]:
    """What a model takes, by device. `gpus` are those that the library has, with their free bytes.

    Weights that are only mapped are not counted on the host: the system reads them as it finds room.
    """
    sizes, options = model.sizes, model.options
    found: dict[str, Need] = {HOST: Need()}
    shares = _shares(options, gpus)
    places = _places(sizes.num_layers, options, shares)
    is_shared = options.split_mode in ("row", "tensor")

    def add(part: str, place: str, size: float, *, spread: bool) -> None:
        parts = (
            {name: round(size * share) for name, share in shares.items()} if spread else {place: round(size)}
        )
        for name, amount in parts.items():
            need = found.setdefault(name, Need())
            setattr(need, part, getattr(need, part) + amount)

    keeps_weights, output = options.mlock or not options.mmap, places[sizes.num_layers]
    for tensor, size in _held(sizes, output).items():
        own = _own_place(tensor, options, gpus)
        place = own or places[_layer_of(tensor, sizes.num_layers)]
        if place != HOST or keeps_weights:
            add("weights", place, size, spread=is_shared and place != HOST and own is None)
    cache = model.capacity_tokens * _cached_bytes(sizes, options)
    for layer in range(sizes.num_cached):
        place = places[layer] if options.kv_offload else HOST
        add("cache", place, cache, spread=options.split_mode == "tensor" and place != HOST)
    rows = min(options.micro_batch_tokens, options.max_rows)
    add("logits", output, rows * sizes.vocabulary * _FLOAT_BYTES, spread=False)
    return found


def _held(sizes: ModelSizes, output: str) -> dict[str, int]:
    """The tensors that are held: with tied embeddings a GPU that has the output layer holds them again."""
    tied = "output.weight" not in sizes.tensors and output != HOST
    again = {"output.weight": sizes.tensors.get("token_embd.weight", 0)} if tied else {}
    left_out = tuple(f"blk.{layer}." for layer in range(sizes.num_cached, sizes.num_layers))
    return {name: size for name, size in sizes.tensors.items() if not name.startswith(left_out)} | again


def _layer_of(tensor: str, num_layers: int) -> int:
    """The layer of a tensor: after all others the output, and then the input."""
    if found := _LAYER.match(tensor):
        return min(int(found[1]), num_layers)
    return num_layers if tensor.startswith("output") else num_layers + 1


def _places(num_layers: int, options: LoadOptions, shares: Mapping[str, float]) -> list[str]:
    """The device of each layer, of the output, and of the input, which stays on the host."""
    layers = num_layers + 1
    on_gpus = min(layers if options.gpu_layers < 0 else options.gpu_layers, layers) if shares else 0
    names, bounds = list(shares), list(accumulate(shares.values()))
    first = layers - on_gpus
    places = [HOST] * first
    for layer in range(on_gpus):
        places.append(names[min(bisect_right(bounds, layer / on_gpus), len(names) - 1)])
    return [*places, HOST]


def _shares(options: LoadOptions, gpus: Mapping[str, int]) -> dict[str, float]:
    """The part of the layers on the GPU that each GPU gets; empty where none is used."""
    if options.gpu_layers == 0 or options.devices == (NO_DEVICE,):
        return {}
    names = list(options.devices or gpus)
    if options.split_mode == "none" and names:
        return {names[min(options.main_gpu, len(names) - 1)]: 1.0}
    asked = dict(zip(names, (*options.tensor_split, *[0.0] * len(names)), strict=False))
    weights = asked if any(asked.values()) else {name: float(gpus.get(name, 0)) for name in names}
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()} if total else {}


def _own_place(tensor: str, options: LoadOptions, gpus: Mapping[str, int]) -> str | None:
    """Where an override puts a tensor: the first that matches counts."""
    for text in options.tensor_overrides:
        pattern, _, buffer = text.rpartition("=")
        if re.search(pattern, tensor):
            return buffer if buffer in gpus else HOST
    return None


def _cached_bytes(sizes: ModelSizes, options: LoadOptions) -> float:
    """Bytes of K and V of a token in one layer."""
    if sizes.window_tokens and not options.full_window:
        return 0
    parts = ((sizes.key_values, options.cache_type_k), (sizes.value_values, options.cache_type_v))
    return sum(values * _bytes_per_value(kind) for values, kind in parts)


def _bytes_per_value(cache_type: str) -> float:
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[cache_type.upper()]]
    return size / block


# What is there, and what would fit


def free_memory(library: Library, options: Sequence[LoadOptions]) -> dict[str, float]:
    """The free bytes of the host, and of each GPU with memory of its own that the options may use."""
    gpus = [device for device in list_devices(library) if device.is_gpu and not device.shares_memory]
    used = gpus if any(map(library.uses_gpu, options)) else []
    return {HOST: available_bytes(), **{gpu.name: free_bytes(library, gpu) for gpu in used}}


def check_memory(models: Sequence[Contexts], free: Mapping[str, float]) -> None:
    """Raise OutOfMemory where models need more of a device than it has free (`free`: of HOST and of each
    GPU), with what would fit. The first model is the target."""
    needs = _total(models, free)
    short = next((name for name, need in needs.items() if need.total > free.get(name, 0)), None)
    if short is None:
        return
    need, available = needs[short], free.get(short, 0)
    parts = (("weights", need.weights), ("KV cache", need.cache), ("logits", need.logits))
    shown = ", ".join(f"{what} {_shown(size)}" for what, size in parts if size)
    where = "" if short == HOST else f" on {short}"
    why = f"{_shown(need.total)} are needed{where} ({shown}), and {_shown(available)} are free"
    what = " and ".join(model.sizes.name for model in models)
    if tokens := models[0].capacity_tokens:
        what += f" with a context of {tokens} tokens"
    raise OutOfMemory(what, why, _way_out(models, free))


def _shown(size: float) -> str:
    return f"{size / _GB:.1f} GB" if size >= _GB / 10 else f"{size / 1e6:.1f} MB"


def _total(models: Sequence[Contexts], free: Mapping[str, float]) -> dict[str, Need]:
    gpus = {name: int(size) for name, size in free.items() if name != HOST}
    found: dict[str, Need] = {}
    for model in models:
        for name, need in needed(model, gpus).items():
            before = found.get(name, Need())
            found[name] = Need(
                before.weights + need.weights, before.cache + need.cache, before.logits + need.logits
            )
    return found


def _fits(models: Sequence[Contexts], free: Mapping[str, float]) -> bool:
    return all(need.total <= free.get(name, 0) for name, need in _total(models, free).items())


def _way_out(models: Sequence[Contexts], free: Mapping[str, float]) -> str:
    """Single changes that make everything fit, the most useful first."""
    target, *others = models

    def fits_context(tokens: int) -> bool:
        share = tokens / max(target.capacity_tokens, 1)
        changed = [replace(model, capacity_tokens=int(model.capacity_tokens * share)) for model in models]
        return _fits(changed, free)

    def fits_layers(layers: int) -> bool:
        changed = replace(target, options=replace(target.options, gpu_layers=layers))
        return _fits([changed, *others], free)

    found, most = [], target.sizes.num_layers + 1
    if (tokens := _largest(fits_context, _MIN_CONTEXT, target.capacity_tokens)) is not None:
        tokens -= tokens % _MIN_CONTEXT
        found.append(f"a smaller context (-c: {tokens} tokens over all requests)")
    if len(free) > 1 and (layers := _largest(fits_layers, 0, most)) is not None:
        found.append(f"{layers} layers on the GPU (-ngl)")
    if others and _fits([target], free):
        found.append("no draft model (-md none)")
    keeps = any(model.options.mlock or not model.options.mmap for model in models)
    mapped = [replace(model, options=replace(model.options, mmap=True, mlock=False)) for model in models]
    if keeps and _fits(mapped, free):
        found.append("weights that are mapped (--mmap, without --mlock)")
    if not found:
        return "Choose a smaller quantization, or a smaller cache type (-ctk, -ctv)."
    return f"What would fit: {'; or '.join(found)}."


def _largest(fits: Callable[[int], bool], least: int, most: int) -> int | None:
    """The largest number from `least` to `most` that fits, if any; so do all that are smaller."""
    if most < least or not fits(least):
        return None
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return least
