"""Load options from settings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from outrider.backends.gguf.devices import on_processor
from outrider.backends.gguf.options import ALL_LAYERS, LoadOptions
from outrider.core.errors import SettingError
from outrider.core.schema import values_for
from outrider.core.settings import Loading

_MIN_ROWS = 128
"""rows of logits of a call; long drafts need more"""

_RENAMED = {
    "batch_tokens": "batch_size",
    "micro_batch_tokens": "ubatch_size",
    "flash_attention": "flash_attn",
    "full_window": "swa_full",
    "extra_buffer_types": "repack",
    "heads": "mtp",
}
"""Load options whose settings have llama.cpp's names"""


def load_options(settings: Loading, *, draft: bool = False, max_draft: int | None = None) -> LoadOptions:
    """The load options of the target or the draft, for drafts of up to `max_draft` tokens. Raises
    SettingError."""
    experts = None if settings.cpu_moe else settings.n_cpu_moe
    on_host = on_processor(experts=experts, dense=settings.n_cpu_ffn)
    given = values_for(LoadOptions, settings, **_RENAMED) | {
        "gpu_layers": _layers(settings.gpu_layers),
        "devices": _names(settings.device),
        "tensor_split": _shares(settings.tensor_split),
        "tensor_overrides": _overrides(settings.override_tensor, on_host),
        "rope_freq_scale": _rope_freq_scale(settings),
        "threads": max(settings.threads, 0),
        "threads_batch": max(settings.threads_batch, 0),
        "max_rows": max(_MIN_ROWS, (max_draft or 0) + 1),
        "library": str(settings.llama_library or ""),
    }
    options = LoadOptions(**given)
    return _of_draft(options, settings) if draft else options


def _of_draft(options: LoadOptions, settings: Loading) -> LoadOptions:
    threads, threads_batch = settings.threads_draft, settings.threads_batch_draft
    if threads > 0:
        options = replace(options, threads=threads, threads_batch=0)
    layers = settings.gpu_layers_draft
    experts = None if settings.cpu_moe_draft else settings.n_cpu_moe_draft
    return replace(
        options,
        devices=_names(settings.device_draft) or options.devices,
        tensor_overrides=_overrides(settings.override_tensor_draft, on_processor(experts=experts)),
        heads=False,
        gpu_layers=options.gpu_layers if layers is None else _layers(layers),
        threads_batch=threads_batch if threads_batch > 0 else options.threads_batch,
        cache_type_k=settings.cache_type_k_draft or options.cache_type_k,
        cache_type_v=settings.cache_type_v_draft or options.cache_type_v,
    )


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip()) if text else ()


def _shares(text: str | None) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in re.split(r"[,/]+", text)) if text else ()
    except ValueError:
        raise SettingError(f"-ts {text}", "not a list of numbers", "Write, for instance, 3,1.") from None


def _overrides(texts: Sequence[str], more: tuple[str, ...]) -> tuple[str, ...]:
    """Each PATTERN=BUFFER of texts that may hold several; a comma before the = is part of the pattern."""
    found, pattern = [], ""
    for part in ",".join(texts).split(",") if texts else ():
        pattern += part if "=" in part else f"{part},"
        if "=" in part:
            found.append(pattern)
            pattern = ""
    return (*found, *([pattern.removesuffix(",")] if pattern else ()), *more)


def _rope_freq_scale(settings: Loading) -> float:
    if settings.rope_scale is not None and settings.rope_freq_scale:
        raise SettingError("--rope-scale and --rope-freq-scale", "one is 1 / the other", "Give one of them.")
    return 1 / settings.rope_scale if settings.rope_scale is not None else settings.rope_freq_scale


def _layers(text: str) -> int:
    if text in ("all", "auto"):
        return ALL_LAYERS if text == "all" else -1
    try:
        return max(int(text), -1)
    except ValueError:
        raise SettingError("-ngl", f"{text!r} is not a number", "Give a number of layers, or all.") from None
