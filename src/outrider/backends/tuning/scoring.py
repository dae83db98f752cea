"""Which of several sets of load options is the best, by what their calls took."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from outrider.backends.bitwise import BitwiseModel
from outrider.backends.gguf.model import GgufModel
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.gguf.registry import TITLES
from outrider.backends.machine import cpu_id, num_cores, physical_cores, processor_name
from outrider.backends.native import cuda_library, native_library
from outrider.costs import CallCosts
from outrider.costs.calibrate import DEFAULT_SECONDS, GLANCE_SECONDS, GPU_SECONDS, Progress, Rows, calibrate
from outrider.costs.curve import Curve
from outrider.costs.expected_speed import StepCosts, best_call
from outrider.costs.store import Subject, known_costs
from outrider.costs.store import costs_at_once as known_at_once
from outrider.models.cache import fingerprint

COMPARED_TOKENS = 32
"""The largest call that is compared."""

_DRAFT_SHARES = (0.65, 0.25, 0.1)
"""of a draft model's single tokens, calls over two, and reading in its score"""
_ACCEPTANCES = {0.0: 0.4, 0.5: 0.2, 0.7: 0.2, 0.9: 0.2}
"""Acceptance rates that drafts may have, with weights; at 0 decoding is plain, which weighs most."""
_MIN_GAIN = 0.02
"""A set must be this much better to be preferred over the options as they are, and beyond the noise."""
_MAX_PLAIN_LOSS = 0.02
"""A set whose calls over a single token are slower than the first's by more than this is never chosen."""

_CHECKED_TOKENS = 4
"""of the call over a draft that two libraries are compared by, in words"""
_ABOUT_EQUAL = 0.05


@dataclass(frozen=True, slots=True)
class Trial:
    """A set of options and what its calls took. `score` is its time per token against that of the
    options as they were, over a spread of acceptances (below 1: faster)."""

    changed: str
    options: LoadOptions
    costs: CallCosts
    score: float


def choose_best(
    options: LoadOptions, sets: Sequence[LoadOptions], costs: Sequence[CallCosts], draft: bool
) -> tuple[LoadOptions, float, list[Trial]]:
    """The best of the sets (the first is what it is measured against), its score, and all as trials."""
    curves = [cost.calls_s(COMPARED_TOKENS, context=0) for cost in costs]
    reads_s = [cost.prefill_s(1) for cost in costs]
    weighted_s = [_weighted_s(*times, draft=draft) for times in zip(curves, reads_s, strict=True)]
    base_s = weighted_s[0]
    trials = [
        Trial(_described(options, given), given, cost, seconds / base_s)
        for given, cost, seconds in zip(sets, costs, weighted_s, strict=True)
    ]
    # How uncertain the time of a single token is, as a part of it.
    spreads = (min(p.spread_ratio for p in cost.points if p.num_tokens == 1) for cost in costs)
    enough = 1 - max(_MIN_GAIN, 2 * max(spreads))
    best, best_score = sets[0], 1.0
    for i, j in product(range(len(sets)), repeat=2):
        joined = _joined(sets[i], sets[j])
        curve = curves[j].copy()
        curve[0] = curves[i][0]
        reached = _weighted_s(curve, reads_s[j], draft=draft) / base_s
        is_plain_kept = curve[0] <= (1 + _MAX_PLAIN_LOSS) * curves[0][0]
        if joined and is_plain_kept and reached < min(best_score, enough):
            best, best_score = joined, reached
    return best, best_score, trials


def _joined(single: LoadOptions, batch: LoadOptions) -> LoadOptions | None:
    """The threads of `single` for single tokens and those of `batch` for more; None where the two differ
    in more than threads."""
    if single == batch:
        return single
    if replace(single, threads=batch.threads, threads_batch=batch.threads_batch) != batch:
        return None
    of_batches = batch.threads_batch or batch.threads or physical_cores()
    return replace(single, threads=single.threads or physical_cores(), threads_batch=of_batches)


def _weighted_s(calls_s: Curve, read_s: float, *, draft: bool) -> float:
    """Seconds per token, with one token of a prompt read for each (`read_s`: users wait for both): the
    geometric mean over a spread of acceptances, each with the draft length that suits it and free drafts. For
    a draft model, that of its own calls."""
    if draft:
        parts = list(zip((calls_s[0], calls_s[1], read_s), _DRAFT_SHARES, strict=True))
    else:
        costs, parts = StepCosts(calls_s), []
        for acceptance, weight in _ACCEPTANCES.items():
            speedup = costs.speedup(best_call(calls_s, acceptance) - 1, acceptance)
            parts.append((calls_s[0] / speedup + read_s, weight))
    return math.exp(sum(weight * math.log(seconds) for seconds, weight in parts))


def _described(options: LoadOptions, changed: LoadOptions) -> str:
    """The library that is named, and what else differs, in words."""
    words = [_title(changed)] if changed.library else []
    if changed.extra_buffer_types != options.extra_buffer_types:
        words.append(f"repacked kernels {'on' if changed.extra_buffer_types else 'off'}")
    if changed.flash_attention != options.flash_attention:
        words.append(f"flash attention {changed.flash_attention}")
    if (changed.threads, changed.threads_batch) != (options.threads, options.threads_batch):
        single = changed.threads or physical_cores()
        batch = changed.threads_batch or single
        words.append(f"{single} threads" if single == batch else f"{single} threads, {batch} for batches")
    return ", ".join(words) or "as it is"


def compare_libraries(best: LoadOptions, trials: Sequence[Trial]) -> str:
    """The chosen library against the best of another backend, or of another build where there is no other: a
    plain step, and a call over four tokens. `trials` were measured together. Empty where all are of one
    library."""
    ranked = sorted(trials, key=lambda trial: trial.score)
    chosen = next((trial for trial in ranked if trial.options.library == best.library), None)
    others = [trial for trial in ranked if trial.options.library != best.library]
    # False comes first, and what ties keeps its order.
    other = min(others, key=lambda trial: trial.options.backend == best.backend, default=None)
    if chosen is None or other is None:
        return ""

    def faster(tokens: int) -> str:
        ratio = other.costs.call_s(tokens, context=0) / chosen.costs.call_s(tokens, context=0)
        if abs(ratio - 1) <= _ABOUT_EQUAL:
            return "as fast"
        return f"{ratio:.1f}x faster" if ratio > 1 else f"{1 / ratio:.1f}x slower"

    steps = f"a plain step {faster(1)}, a check of {_CHECKED_TOKENS} tokens {faster(_CHECKED_TOKENS)}"
    return f"{_title(best)}: {steps}, against {_title(other.options)}"


def _title(options: LoadOptions) -> str:
    title = TITLES.get(options.backend, options.backend)
    built = {str(native_library()): "this CPU", str(cuda_library()): "NVIDIA cards"}
    return f"{title} built for {built[options.library]}" if options.library in built else title


# The cost curve of a loaded model: from the cache, or measured now and kept.

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
    settings |= rare_settings(native)
    if isinstance(model, BitwiseModel):
        settings["equal_sizes"] = str(model.sizes)
    return Subject(
        model=model.name,
        file=fingerprint(native.weights.path),
        build=native.weights.library.build_id,
        machine=machine_id(native.weights.library.device_names),
        settings=settings,
    )


def rare_settings(model: GgufModel) -> dict[str, str | int | bool | float]:
    """What was set of placement, LoRA adapters and positions: it changes outputs, or what they cost."""
    options = model.weights.options
    found = options.rarely_set()
    if options.adapters:  # by their content
        files = [[fingerprint(Path(path).expanduser()), scale] for path, scale in options.adapters]
        found["adapters"] = json.dumps(files)
    return found


def machine_id(devices: Sequence[str] = ()) -> str:
    """Names processor, cores, and GPUs (the `devices` of a library); two machines of one kind are one."""
    names = dict.fromkeys([processor_name(), *devices])
    return f"{', '.join(names)}; {physical_cores()} cores; instruction set {cpu_id()}"
