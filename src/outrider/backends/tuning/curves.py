"""The cost curve of a loaded model: from the cache, or measured now and kept."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from outrider.backends.bitwise import BitwiseModel
from outrider.backends.gguf import GgufModel, physical_cores, processor_name
from outrider.backends.native.cpu import cpu_id
from outrider.costs import CallCosts, Subject, calibrate, fingerprint, load_costs, store_costs, store_refined
from outrider.costs.calibrate import DEFAULT_SECONDS, Progress
from outrider.costs.timing import Rows

Loaded = GgufModel | BitwiseModel
"""A target as a session has it."""

_MIN_POINTS = 8
_TOO_BUSY = "the machine was too busy to measure what calls cost: next time it is tried again"


def native_of(model: Loaded) -> GgufModel:
    """The context that computes, or one of them."""
    native = model.inner if isinstance(model, BitwiseModel) else model
    assert isinstance(native, GgufModel), "no other model is loaded from a file"
    return native


def costs_of(
    model: Loaded,
    *,
    rows: Rows = "all",
    seconds: float = DEFAULT_SECONDS,
    fresh: bool = False,
    progress: Progress | None = None,
) -> tuple[CallCosts, list[str]]:
    """What calls of `model` cost, and lines for the user.

    Taken from the cache; where it has nothing (or `fresh`), measured for about `seconds` and kept. Then the
    model's sequences are emptied, so ask before anything is generated. `rows` are the logits that the
    model is asked for: all for a target, the last for a draft model.
    """
    subject = subject_of(model, rows)
    costs, notice = (None, None) if fresh else load_costs(subject)
    notices = [notice] if notice else []
    if costs is None:
        costs = calibrate(model, seconds=seconds, rows=rows, progress=progress)
        notice = store_costs(subject, costs) if len(costs.points) >= _MIN_POINTS else _TOO_BUSY
        notices += [notice] if notice else []
    return costs, notices


def keep_costs(model: Loaded, costs: CallCosts, *, rows: Rows = "all") -> str | None:
    """At the end of a session: let the stored curve learn from its calls. A line where that fails."""
    return store_refined(subject_of(model, rows), costs)


def subject_of(model: Loaded, rows: Rows) -> Subject:
    """What the model's curve depends on."""
    native = native_of(model)
    weights, options = native.weights.options, native.options
    settings: dict[str, str | int | bool] = {
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
    if isinstance(model, BitwiseModel):
        settings["equal_sizes"] = str(model.sizes)
    return Subject(
        model=model.name,
        file=file_id(native.weights.path),
        build=native.weights.library.build_id,
        machine=machine_id(native.weights.library.device_names),
        settings=tuple(settings.items()),
    )


def machine_id(devices: Sequence[str] = ()) -> str:
    """Names processor, cores, and GPUs (the `devices` of a library); two machines of one kind are one."""
    names = dict.fromkeys([processor_name(), *devices])
    return f"{', '.join(names)}; {physical_cores()} cores; instruction set {cpu_id()}"


def file_id(path: Path) -> str:
    """The fingerprint of a model's file, read once for each state of it."""
    status = path.stat()
    return _file_id(path, status.st_size, status.st_mtime_ns)


@cache
def _file_id(path: Path, _bytes: int, _changed_ns: int) -> str:
    return fingerprint(path)
