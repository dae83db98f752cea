"""What models take on the host and on each GPU, counted from their headers before anything is loaded.

Weights, KV and recurrent states are what the library will allocate, or less where a header does not say it;
compute buffers are estimated a little high, from the widest of what exists at once in llama.cpp's graphs.
Layers are given to devices as llama.cpp's `load_tensors` does it.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from outrider.backends.gguf.context import attends_without_flash
from outrider.backends.gguf.devices import NO_DEVICE, free_bytes, list_devices
from outrider.backends.gguf.heads import MAX_STATES_BYTES
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.gguf.rewinding import MAX_SEQUENCES
from outrider.backends.gguf.sizes import FLOAT_BYTES, ModelSizes
from outrider.backends.machine import available_bytes
from outrider.core.errors import OutOfMemory

if TYPE_CHECKING:
    from outrider.backends.gguf.library import Library

HOST = "host"
_LAYER = re.compile(r"blk\.(\d+)\.")
_CHECKPOINTS = 2
"""copies of a sequence's recurrent state"""
_WINDOW_STEP = 256
"""cells that a window's cache is rounded up to"""
_SMALL_BYTES = 2**20
"""for what is small in a compute buffer: positions, the choice of experts, gaps between tensors"""
_MIN_CONTEXT = 256
_GB = 10**9


@dataclass(frozen=True, slots=True)
class Contexts:
    """One model with its load options, and what is opened on it: KV cells over all of `max_sequences`.
    `has_head`: its MTP layers are loaded, and have a context of `head_tokens`. `state_values`: what a head
    reads of each token of its target, which is kept."""

    sizes: ModelSizes
    options: LoadOptions
    capacity_tokens: int = 0
    max_sequences: int = 1
    has_head: bool = False
    head_tokens: int = 0
    state_values: int = 0

    @property
    def snapshots(self) -> int:
        """How many are kept of each sequence's recurrent state."""
        has_some = self.sizes.state_bytes and self.max_sequences <= MAX_SEQUENCES
        return self.options.snapshots if has_some else 0

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens that are computed at once: with windows of several sequences whole calls
        (`Library.open_context`)."""
        options = self.options
        whole = self.sizes.window_tokens > 0 and self.max_sequences > 1
        least = options.max_rows if whole else 0
        return min(max(options.micro_batch_tokens, least), max(options.batch_tokens, options.max_rows))

    @property
    def num_layers(self) -> int:
        """Without those that predict tokens after the next one."""
        return len(self.sizes.layers) - self.sizes.num_heads


WEIGHTS, CACHE, STATES, COMPUTE = "weights", "KV cache", "recurrent states", "compute buffers"

Need = Counter[str]
"""Bytes on one device, of each of these."""


def needed(model: Contexts, gpus: Mapping[str, int]) -> dict[str, Need]:
    """What a model takes, by device. `gpus` are those that the library has, with their free bytes.

    Weights that are only mapped are not counted on the host: the system reads them as it finds room.
    """
    sizes, options = model.sizes, model.options
    found = {HOST: Need()}
    shares = _shares(options, gpus)
    num_layers = len(sizes.layers)
    places = _places(num_layers, options, shares)

    def add(part: str, place: str, size: float, *, spread: bool = False) -> None:
        for name, share in shares.items() if spread and place != HOST else ((place, 1.0),):
            found.setdefault(name, Need())[part] += round(size * share)

    keeps_weights, output = options.mlock or not options.mmap, places[num_layers]
    is_shared, is_split = options.split_mode in ("row", "tensor"), options.split_mode == "tensor"
    for tensor, size in _held(model, output).items():
        own = _own_place(tensor, options, gpus)
        place = own or places[_layer_of(tensor, num_layers)]
        if place != HOST or keeps_weights:
            add(WEIGHTS, place, size, spread=is_shared and own is None)
    for layer, kept in enumerate(sizes.layers):
        place = places[layer] if options.kv_offload else HOST
        add(CACHE, place, _cached_bytes(model, layer), spread=is_split)
        if layer < model.num_layers:
            states = kept.state_bytes * model.max_sequences
            add(STATES, place, states * (1 + model.snapshots), spread=is_split)
            add(STATES, HOST, 0 if model.snapshots else states * _CHECKPOINTS)
    for place, buffer in _buffers(model, places, on_gpu=bool(shares)):
        add(COMPUTE, place, buffer)
    return found


def _buffers(model: Contexts, places: Sequence[str], *, on_gpu: bool) -> Iterator[tuple[str, float]]:
    """What calls are computed in, by place; the logits of a call, and the hidden states that a head reads,
    are on the host."""
    sizes, head = model.sizes, model.head_tokens if model.has_head else 0
    for tokens in filter(None, (model.capacity_tokens, head)):
        for place in {*places[:-1]}:
            yield place, _compute_bytes(model, tokens, on_gpu=on_gpu, output=place == places[-2])
        yield HOST, _rows(model) * sizes.vocabulary * FLOAT_BYTES
    if row := model.state_values * FLOAT_BYTES:
        yield HOST, min((head or model.capacity_tokens) * row, model.max_sequences * MAX_STATES_BYTES)
        yield HOST, model.options.batch_tokens * row  # those of the last call, in the library


def _rows(model: Contexts) -> int:
    return min(model.micro_batch_tokens, model.options.max_rows)


def _compute_bytes(model: Contexts, tokens: int, *, on_gpu: bool, output: bool) -> float:
    """An upper estimate of a compute buffer, as llama.cpp b11434 sizes it for a context of so many tokens:
    the attention mask, and the most of what exists at once in the attention, in the rest of a layer and in
    the output."""
    sizes, options = model.sizes, model.options
    calls = min(model.micro_batch_tokens, tokens)
    scores = calls * tokens * sizes.attention_heads * FLOAT_BYTES
    is_flash = options.flash_attention != "off"
    is_flash = is_flash and not (not on_gpu and attends_without_flash(options, sizes.head_widths[1], scores))
    masks = calls * tokens * (FLOAT_BYTES // 2 if is_flash else FLOAT_BYTES) * (sizes.attention > 0)
    if sizes.window_tokens:
        masks *= 2
    row = calls * FLOAT_BYTES
    attention = 7 * row * max(sizes.width, sizes.attention) + (0 if is_flash else scores)
    layer = row * (3 * sizes.widest + 6 * sizes.width)
    kept = (
        max((layer.state_bytes for layer in sizes.layers), default=0)
        * model.max_sequences
        * (2 + model.snapshots)
    )
    # An EAGLE-3 head computes the logits of all tokens, and spreads them over the target's vocabulary.
    is_eagle = model.state_values and not model.has_head
    rows = 2 * calls if is_eagle else _rows(model)
    logits = rows * sizes.vocabulary * FLOAT_BYTES + 3 * row * sizes.width
    return _SMALL_BYTES + max(masks + attention, masks + layer + kept, logits if output else 0)


def _held(model: Contexts, output: str) -> dict[str, int]:
    """The tensors that are held: with tied embeddings a GPU that has the output layer holds them again."""
    tensors = model.sizes.tensors
    tied = "output.weight" not in tensors and output != HOST
    again = {"output.weight": tensors.get("token_embd.weight", 0)} if tied else {}
    heads = () if model.has_head else range(model.num_layers, len(model.sizes.layers))
    left_out = tuple(f"blk.{layer}." for layer in heads)
    return {name: size for name, size in tensors.items() if not name.startswith(left_out)} | again


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


def _cached_bytes(model: Contexts, layer: int) -> float:
    """Bytes of K and V that a layer keeps."""
    kept, options = model.sizes.layers[layer], model.options
    is_head = layer >= model.num_layers
    tokens = (model.head_tokens if model.has_head else 0) if is_head else model.capacity_tokens
    if kept.has_window and not options.full_window:
        window = model.sizes.window_tokens * model.max_sequences + model.micro_batch_tokens
        tokens = min(tokens, -(-window // _WINDOW_STEP) * _WINDOW_STEP)
    return tokens * kept.cached_bytes(options.cache_type_k, options.cache_type_v)


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
    short = next((name for name, need in needs.items() if need.total() > free.get(name, 0)), None)
    if short is None:
        return
    need, available = needs[short], free.get(short, 0)
    parts = [f"{what} {_shown(need[what])}" for what in (WEIGHTS, CACHE, STATES, COMPUTE) if need[what]]
    where = "" if short == HOST else f" on {short}"
    why = f"{_shown(need.total())} are needed{where} ({', '.join(parts)}), and {_shown(available)} are free"
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
            found.setdefault(name, Need()).update(need)
    return found


def _fits(models: Sequence[Contexts], free: Mapping[str, float]) -> bool:
    return all(need.total() <= free.get(name, 0) for name, need in _total(models, free).items())


_Change = tuple[str, range, Callable[[int], list[Contexts]]]
"""What can be chosen otherwise: in words, the numbers that it can have (one where it has none), and what each
makes of the models."""


def _way_out(models: Sequence[Contexts], free: Mapping[str, float]) -> str:
    """Single changes that make everything fit, the most useful first; of numbers the largest that do."""
    found = []
    for text, counts, change in _changes(models, has_gpus=len(free) > 1):
        index = bisect_left(counts, True, key=lambda count: not _fits(change(count), free))
        found += [text.format(counts[index - 1])] if index else []
    if not found:
        return "Choose a smaller quantization, or a smaller cache type (-ctk, -ctv)."
    return f"What would fit: {'; or '.join(found)}."


def _changes(models: Sequence[Contexts], *, has_gpus: bool) -> list[_Change]:
    target, *others = models
    options, tokens, most = target.options, target.capacity_tokens, target.max_sequences

    def of_share(share: float, **changes: Any) -> list[Contexts]:
        sizes = [(int(m.capacity_tokens * share), int(m.head_tokens * share)) for m in models]
        return [
            replace(model, capacity_tokens=capacity, head_tokens=of_head, **changes)
            for model, (capacity, of_head) in zip(models, sizes, strict=True)
        ]

    def loaded(changed: Sequence[Contexts], **given: Any) -> list[Contexts]:
        return [replace(model, options=replace(model.options, **given)) for model in changed]

    q8 = {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}
    can_shrink = tokens and options.cache_type_k == "f16" and options.flash_attention != "off"
    has_window = target.sizes.window_tokens and options.full_window
    keeps = any(model.options.mlock or not model.options.mmap for model in models)
    layers = range(len(target.sizes.layers) + 2 if has_gpus else 0)
    headless = replace(target, has_head=False, state_values=0)
    smaller = range(_MIN_CONTEXT, tokens + 1, _MIN_CONTEXT)
    return [
        ("a smaller context (-c: {} tokens over all requests)", smaller, lambda n: of_share(n / tokens)),
        (
            "{} at once (--parallel), each with its context",
            range(1, most),
            lambda n: of_share(n / most, max_sequences=n),
        ),
        ("--snapshots {}", range(1, target.snapshots), lambda n: [*loaded([target], snapshots=n), *others]),
        ("{} layers on the GPU (-ngl)", layers, lambda n: [*loaded([target], gpu_layers=n), *others]),
        (
            "a smaller cache type (-ctk q8_0 -ctv q8_0)",
            range(bool(can_shrink)),
            lambda _: loaded(models, **q8),
        ),
        (
            "the KV of its sliding windows alone (--no-swa-full)",
            range(bool(has_window)),
            lambda _: loaded(models, full_window=False),
        ),
        ("no draft model (-md none)", range(bool(others)), lambda _: [target]),
        ("without its own head (--no-mtp)", range(target.has_head), lambda _: [headless, *others]),
        (
            "weights that are mapped (--mmap, without --mlock)",
            range(keeps),
            lambda _: loaded(models, mmap=True, mlock=False),
        ),
    ]
