"""The least memory that models take: what cannot fit is refused before anything is loaded. Weights and KV are
counted from the files' headers, on the host and on all GPUs together. What passes here may still not fit:
then the library fails while it loads, and says so."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.backends.gguf.devices import NO_DEVICE, free_bytes, list_devices
from outrider.backends.gguf.library import Library
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.machine import available_bytes
from outrider.core.errors import OutOfMemory
from outrider.core.notices import notify
from outrider.core.numbers import gigabytes
from outrider.models.gguf import Layout

HOST, GPUS = "host", "GPUs"
_LAYER = re.compile(r"blk\.(\d+)\.")
_MIN_CONTEXT = 256
_MARGIN_BYTES = 2**30
"""of every GPU that is left for what is computed and for other programs, as llama.cpp does"""
_FULL = 0.8
"""A library is asked what fits where weights and KV take a larger part of what is free."""


@dataclass(frozen=True, slots=True)
class Contexts:
    """One model with its load options, and the KV cells that are opened on it over all sequences: its own,
    and those of its MTP layers. `kept_bytes`: of its states that are kept on the host for a head."""

    layout: Layout
    options: LoadOptions
    capacity_tokens: int = 0
    head_tokens: int = 0
    kept_bytes: int = 0

    def needed(self, *, on_gpus: bool) -> dict[str, tuple[float, float]]:
        """The bytes of weights and KV on the host and on the GPUs, if there are any. Weights that are only
        mapped count as nothing on the host: the system reads them as it finds room."""
        layout, options = self.layout, self.options
        uses_gpus = on_gpus and options.gpu_layers != 0 and options.devices != (NO_DEVICE,)
        num_layers = len(layout.layers)
        # The last layers go to GPUs, and the output before all of them.
        first = num_layers + 1 - options.gpu_layers if options.gpu_layers >= 0 else 0
        is_mapped = options.mmap and not options.mlock
        weights, kv = {HOST: 0.0, GPUS: 0.0}, {HOST: float(self.kept_bytes), GPUS: 0.0}
        for tensor, size in layout.tensors.items():
            found = _LAYER.match(tensor)
            layer = int(found[1]) if found else num_layers if tensor.startswith("output") else -1
            if num_layers - layout.num_heads <= layer < num_layers and not self.head_tokens:
                continue
            is_there = uses_gpus and layer >= max(first, 0)
            place = GPUS if is_there and not _stays_on_host(tensor, options) else HOST
            weights[place] += size if place == GPUS or not is_mapped else 0
        for layer, kept in enumerate(layout.layers):
            is_head = layer >= num_layers - layout.num_heads
            tokens = self.head_tokens if is_head else self.capacity_tokens
            place = GPUS if uses_gpus and layer >= first and options.kv_offload else HOST
            if options.full_window or not kept.has_window:  # what a window alone keeps is little
                kv[place] += tokens * kept.cell_bytes(options.cache_type_k, options.cache_type_v)
        return {place: (weights[place], kv[place]) for place in weights}


def _stays_on_host(tensor: str, options: LoadOptions) -> bool:
    parts = (text.rpartition("=") for text in options.tensor_overrides)
    return next((buffer == "CPU" for pattern, _, buffer in parts if re.search(pattern, tensor)), False)


def free_memory(library: Library, options: Sequence[LoadOptions]) -> dict[str, float]:
    """The free bytes of the host, and of all GPUs with memory of their own, if the options may use any."""
    gpus = [device for device in list_devices(library) if device.is_gpu and not device.shares_memory]
    if not gpus or not any(map(library.uses_gpu, options)):
        return {HOST: available_bytes()}
    named = {name for given in options for name in given.devices}
    used = [gpu for gpu in gpus if not named or gpu.name in named]
    return {HOST: available_bytes(), GPUS: sum(free_bytes(library, gpu) for gpu in used)}


def place_layers(library: Library, path: Path, models: Sequence[Contexts]) -> LoadOptions:
    """The load options of the first model, the target: where nothing is said of its layers, so many of them
    on the GPUs as fit beside the other models. A line for the user says so where some do not."""
    target, *others = models
    free = free_memory(library, [model.options for model in models])
    if GPUS not in free or target.options.gpu_layers >= 0:
        return target.options
    names = target.options.devices or [device.name for device in list_devices(library) if device.is_gpu]
    room, num_layers = {**free, GPUS: free[GPUS] - len(names) * _MARGIN_BYTES}, len(target.layout.layers) + 1
    beside = sum(sum(model.needed(on_gpus=True)[GPUS]) for model in others)
    if sum(target.needed(on_gpus=True)[GPUS]) + beside <= _FULL * room[GPUS]:
        return target.options
    spare = _MARGIN_BYTES + round(beside / len(names))
    chosen = library.fit(path, target.options, target.capacity_tokens, spare)
    if chosen is None:
        counts, on_gpus = range(num_layers + 1), {GPUS: room[GPUS]}
        fitting = _largest(counts, lambda count: [_with(target, gpu_layers=count), *others], on_gpus)
        chosen = replace(target.options, gpu_layers=fitting or 0)
    is_moved = chosen.tensor_overrides != target.options.tensor_overrides
    if not (is_moved or 0 <= chosen.gpu_layers < num_layers):
        return target.options
    count = num_layers if chosen.gpu_layers < 0 else min(chosen.gpu_layers, num_layers)
    what = f"{count} of {num_layers} layers of {target.layout.name} fit on the GPUs"
    what += ", but for some experts" if is_moved else ""
    notify(f"{what}, of which {gigabytes(free[GPUS])} are free; the rest is computed on the processor (-ngl)")
    return chosen


def what_would_fit(library: Library, model: Contexts, *, is_loaded: bool = False) -> str:
    """What of a model would fit on the GPUs, if it uses any. `is_loaded`: its weights are there."""
    free = free_memory(library, [model.options])
    if GPUS not in free:
        return ""
    spare = -_MARGIN_BYTES + (model.needed(on_gpus=True)[GPUS][0] if is_loaded else 0)
    return _way_out([model], {**free, GPUS: free[GPUS] + spare})


def check_memory(models: Sequence[Contexts], free: Mapping[str, float]) -> None:
    """Raise OutOfMemory where models need more than there is of free bytes (of HOST, and of GPUS if there are
    any), with what would fit. The first model is the target."""
    for place, available in free.items():
        parts = [model.needed(on_gpus=GPUS in free)[place] for model in models]
        weights, kv = (sum(sizes) for sizes in zip(*parts, strict=True))
        if weights + kv > available:
            where = " on the GPUs" if place == GPUS else ""
            why = f"weights and KV cache take at least {gigabytes(weights)} and {gigabytes(kv)}{where}"
            what = " and ".join(model.layout.name for model in models)
            if tokens := models[0].capacity_tokens:
                what += f" with a context of {tokens} tokens"
            raise OutOfMemory(what, f"{why}, and {gigabytes(available)} are free", _way_out(models, free))


def _fits(models: Sequence[Contexts], free: Mapping[str, float]) -> bool:
    needs = [model.needed(on_gpus=GPUS in free) for model in models]
    return all(sum(sum(need[place]) for need in needs) <= free[place] for place in free)


def _largest(
    counts: range, models: Callable[[int], Sequence[Contexts]], free: Mapping[str, float]
) -> int | None:
    index = bisect_left(counts, True, key=lambda count: not _fits(models(count), free))
    return counts[index - 1] if index else None


def _with(model: Contexts, **options: Any) -> Contexts:
    return replace(model, options=replace(model.options, **options))


def _way_out(models: Sequence[Contexts], free: Mapping[str, float]) -> str:
    """Single changes that make everything fit, the most useful first; of numbers the largest that do."""
    target, *others = models
    tokens = target.capacity_tokens

    def shorter(count: int) -> list[Contexts]:
        return [
            replace(
                model,
                capacity_tokens=model.capacity_tokens * count // tokens,
                head_tokens=model.head_tokens * count // tokens,
            )
            for model in models
        ]

    def helps(changed: Sequence[Contexts]) -> bool:
        return [*changed] != [*models] and _fits(changed, free)

    context = _largest(range(_MIN_CONTEXT, tokens + 1, _MIN_CONTEXT), shorter, free)
    layers = range(len(target.layout.layers) + 2 if GPUS in free else 0)
    on_gpu = _largest(layers, lambda count: [_with(target, gpu_layers=count), *others], free)
    types = dict.fromkeys(("cache_type_k", "cache_type_v"), "q8_0")
    can_shrink = tokens and target.options.flash_attention != "off"
    changes = {
        f"a smaller context (-c: {context} tokens over all requests)": context is not None,
        f"{on_gpu} layers on the GPU (-ngl)": on_gpu is not None,
        "a smaller cache type (-ctk q8_0 -ctv q8_0)": can_shrink
        and helps([_with(model, **types) for model in models]),
        "no draft model (-md none)": helps([target]),
        "weights that are mapped (--mmap, without --mlock)": helps(
            [_with(model, mmap=True, mlock=False) for model in models]
        ),
    }
    if not (found := [text for text, fits in changes.items() if fits]):
        return "Choose a smaller quantization, or a smaller cache type (-ctk, -ctv)."
    return f"What would fit: {'; or '.join(found)}."
