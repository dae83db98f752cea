"""The cost curve of a loaded model: from the cache, or measured now and kept."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.backends.bitwise import BitwiseModel
from outrider.backends.gguf.model import GgufModel
from outrider.backends.machine import cpu_id, num_cores, physical_cores, processor_name
from outrider.costs import CallCosts
from outrider.costs.calibrate import DEFAULT_SECONDS, GLANCE_SECONDS, GPU_SECONDS, Progress, Rows, calibrate
from outrider.costs.store import Subject, known_costs
from outrider.costs.store import costs_at_once as known_at_once
from outrider.models.cache import fingerprint

Loaded = GgufModel | BitwiseModel
"""A target as a session has it."""


def native_of(model: Loaded) -> GgufModel:
    """The context that computes, or one of them."""
    native = model.inner if isinstance(model, BitwiseModel) else model
    assert isinstance(native, GgufModel), "no other model is loaded from a file"
    return native


def costs_of(
    model: Loaded,
    *,
    rows: Rows = "all",
    seconds: float | None = None,
    fresh: bool = False,
    progress: Progress = lambda _part: None,
) -> CallCosts:
    """What calls of `model` cost.

    Taken from the cache; where it has nothing (or `fresh`), or what was measured on a busy machine that is
    quiet now, measured for about `seconds` and kept. Then the model's sequences are emptied, so ask before
    anything is generated. `rows` are the logits that the model is asked for: all for a target, the last for a
    draft model.
    """
    return known_costs(
        subject_of(model, rows),
        lambda: calibrate(
            model,
            seconds=_seconds(model) if seconds is None else seconds,
            rows=rows,
            on_gpu=is_on_gpu(model),
            progress=progress,
        ),
        spare_cores=spare_cores(native_of(model)),
        fresh=fresh,
    )


def costs_at_once(model: Loaded, rows: Rows) -> tuple[CallCosts, bool]:
    """What calls of `model` cost as far as that is known or can be estimated in a moment, and whether it is
    to be measured when there is time. What `costs_of` says of sequences holds."""

    def glance() -> CallCosts:
        return calibrate(model, seconds=GLANCE_SECONDS, rows=rows, on_gpu=is_on_gpu(model))

    return known_at_once(subject_of(model, rows), glance)


def is_on_gpu(model: Loaded) -> bool:
    """Whether layers of the model may be computed on a GPU."""
    weights = native_of(model).weights
    return weights.library.uses_gpu(weights.options)


def _seconds(model: Loaded) -> float:
    return GPU_SECONDS if is_on_gpu(model) else DEFAULT_SECONDS


def spare_cores(model: GgufModel) -> float:
    """Cores that the model's threads leave to other programs."""
    return num_cores() - max(model.threads, model.threads_batch)


def subject_of(model: Loaded, rows: Rows) -> Subject:
    """What the model's curve depends on."""
    native = native_of(model)
    weights, options = native.weights.options, native.options
    settings: dict[str, str | int | bool | float] = {
        "rows": rows,
        "several_sequences": model.max_sequences > 1,
        "threads": native.threads,
        "threads_batch": native.threads_batch,
        "micro_batch_tokens": options.micro_batch_tokens,
        "flash_attention": native.flash_attention,
        "cache_type_k": options.cache_type_k,
        "cache_type_v": options.cache_type_v,
        "full_window": options.full_window,
        "gpu_layers": weights.gpu_layers,
        "split_mode": weights.split_mode,
        "main_gpu": weights.main_gpu,
        "extra_buffer_types": weights.extra_buffer_types,
    }
    if native.is_head or native.hidden is not None:
        settings["heads"] = "own" if native.is_head else "fed"
    if model.rewinding.recomputes:
        settings["checkpoints"] = True
    settings |= weights.rarely_set()
    if isinstance(model, BitwiseModel):
        settings["equal_sizes"] = str(model.sizes)
    return Subject(
        model=model.name,
        file=fingerprint(native.weights.path),
        build=native.weights.library.build_id,
        machine=machine_id(native.weights.library.device_names),
        settings=settings,
    )


def machine_id(devices: Sequence[str] = ()) -> str:
    """Names processor, cores, and GPUs (the `devices` of a library); two machines of one kind are one."""
    names = dict.fromkeys([processor_name(), *devices])
    return f"{', '.join(names)}; {physical_cores()} cores; instruction set {cpu_id()}"
