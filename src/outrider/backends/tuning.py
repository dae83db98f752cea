"""What this machine does with a model: its cost curves, from the cache or measured now; which calls give
equal bits, and what that costs; the native library and the kernels that suit a file."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from time import perf_counter, sleep

from pydantic import TypeAdapter

from outrider.backends.bitwise import BitwiseModel, Equality, find_equality, measure_price
from outrider.backends.gguf.guard import check_build
from outrider.backends.gguf.libraries import candidates, installed
from outrider.backends.gguf.model import GgufModel, Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.machine import available_bytes, cpu_id, num_cores, physical_cores, processor_name
from outrider.core.contracts import Model
from outrider.core.errors import BackendCrash, ModelFileError, OutOfMemory, SettingError
from outrider.costs.calibrate import (
    DEFAULT_SECONDS,
    GLANCE_SECONDS,
    GPU_SECONDS,
    CallTimer,
    Clock,
    Rows,
    Samples,
    calibrate,
)
from outrider.costs.calibrate import Progress as PartDone
from outrider.costs.curve import CallCosts
from outrider.costs.expected_speed import StepCosts, best_call
from outrider.costs.store import Subject, costs_dir, known_costs, remembered
from outrider.costs.store import costs_at_once as known_at_once
from outrider.models.cache import fingerprint, read_entry, write_entry
from outrider.models.gguf import read_card

_CONTEXT_TOKENS = 512
"""of trials: flash attention shows once there is something to attend to"""

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
    progress: PartDone = lambda _part: None,
) -> CallCosts:
    """What calls of `model` cost: from the cache; where it has nothing (or `fresh`), or what was measured on
    a busy machine that is quiet now, measured for about `seconds` and kept. Then the model's sequences are
    emptied. `rows` are the logits that it is asked for: all of a target, the last of a draft model."""
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


# Equal bits on loaded weights: which calls give them, as it was found before or as a few calls find now.

MAX_DEFAULT_PRICE = 0.02
"""Where neither plain steps nor prompts take this much longer, equal bits are the default."""
_EQUALITY = TypeAdapter(Equality)


def open_target(
    weights: Weights,
    context_length: int,
    *,
    max_sequences: int = 1,
    capacity_tokens: int = 0,
    bitwise: bool | None = None,
    measure: bool = True,
    measuring: Callable[[str, float], None] | None = None,
) -> tuple[Loaded, Equality | None]:
    """KV caches on a target's weights, of `context_length` tokens for each sequence and `capacity_tokens` in
    all (0: as many as they may have).

    With `bitwise` a model that makes equal calls alone, which has as many sequences as fit into the capacity,
    and what is known of its calls. By default (None) the same where one sequence has all to itself and equal
    bits, as was found out earlier or (`measure`) is now, cost next to nothing and find the memory. Raises
    SettingError where they are asked for and no calls are equal, OutOfMemory.
    """

    def progress(part: float) -> None:
        if measuring is not None:
            measuring("finding out which calls give equal bits, once", part)

    if bitwise or (bitwise is None and max_sequences == 1 and not _why_not(weights)):
        found = known_equality(weights, progress, hasty=not bitwise, measure=bool(bitwise) or measure)
        if bitwise and found.sizes is None:
            why = f"{weights.library.title} cannot give equal bits with {weights.name}: {found.reason}"
            raise SettingError("--bitwise", why, "Choose another --backend or -fa, or decode without it.")
        price = found.price
        if bitwise or (price is not None and max(price.step, price.prompt) < MAX_DEFAULT_PRICE):
            lanes = max(capacity_tokens // context_length, 1) if capacity_tokens else max_sequences
            try:
                lanes = min(max_sequences, lanes)
                return _lanes(weights, found, context_length, lanes, capacity_tokens), found
            except OutOfMemory:  # it takes a little more than a shared context
                if bitwise:
                    raise
    return weights.open(context_length, max_sequences=max_sequences, capacity_tokens=capacity_tokens), None


def known_equality(
    weights: Weights, progress: PartDone, *, hasty: bool = False, measure: bool = True
) -> Equality:
    """For which calls these weights give equal bits, here and under these options: looked up, or (`measure`)
    found out in some seconds and kept. `hasty`: in a few calls where single tokens need padding, of which
    nothing is then said. Raises BackendError when a call fails."""
    about = "nearly free" if hasty else "equal calls"
    with closing(weights.open(_CONTEXT_TOKENS)) as model:
        subject, spare = subject_of(model, "all"), spare_cores(model)
    asked = {"about": about, "flash_attention_asked": weights.options.flash_attention}
    subject = replace(subject, settings={**subject.settings, **asked})
    place = costs_dir() / f"equal-{subject.key()}.json"
    if not measure:
        try:
            return _EQUALITY.validate_python(read_entry(place))
        except ValueError:
            return Equality(None, "it is not known yet")
    return remembered(
        place,
        lambda: _find(weights, progress, hasty=hasty),
        read=_EQUALITY.validate_python,
        write=lambda found: {"model": weights.name, "about": about, **asdict(found)},
        spare_cores=spare,
    )


def _find(weights: Weights, progress: PartDone, *, hasty: bool) -> Equality:
    """The first kind of attention without padding, else the first with any equal calls (not if `hasty`)."""
    if reason := _why_not(weights):
        return Equality(None, reason)
    options = weights.options
    attentions = [options.flash_attention]
    if options.flash_attention == "auto":
        with closing(weights.open(_CONTEXT_TOKENS)) as model:
            attentions.append("on" if model.flash_attention == "off" else "off")
    best = Equality(None, "it cannot be opened")
    for attention in attentions:
        try:
            # A quantized cache needs flash attention, and some libraries are not right with it.
            opened = weights.open(_CONTEXT_TOKENS, options=replace(options, flash_attention=attention))
        except SettingError:
            continue
        with closing(opened) as model:
            found = find_equality(model, hasty=hasty or best.sizes is not None, progress=progress)
        is_unpadded = found.sizes is not None and found.sizes.sizes[0] == 1
        if is_unpadded or not best.sizes:
            best = replace(found, flash_attention=attention)
        if is_unpadded:
            break
    if not best.sizes:
        return best
    with (
        closing(weights.open(_CONTEXT_TOKENS)) as plain,
        closing(_lanes(weights, best, _CONTEXT_TOKENS)) as equal,
    ):
        return replace(best, price=measure_price(plain, equal))


def _why_not(weights: Weights) -> str:
    if not weights.rewinding.is_free:
        return "it cannot forget tokens freely"
    if weights.window_tokens and weights.library.keeps_windows:
        return "tokens that left its sliding window give way to others, out of order"
    return ""


def _lanes(
    weights: Weights, found: Equality, context_length: int, max_sequences: int = 1, capacity_tokens: int = 0
) -> BitwiseModel:
    assert found.sizes is not None
    options = replace(weights.options, flash_attention=found.flash_attention)
    return BitwiseModel(
        lambda length: weights.open(length, options=options),
        found.sizes,
        context_length=context_length,
        max_sequences=max_sequences,
        capacity_tokens=capacity_tokens,
    )


# The library and the kernels for a file, by a trial of a few seconds: they change only what calls cost.

_STAGE_SECONDS = 4.0
"""of measuring the libraries, and then the kernels of the best; loading comes on top"""
_MIN_FILE_BYTES = 4 << 20
"""A smaller file is called in no time by any library."""

_TUNED = ("backend", "library", "extra_buffer_types", "flash_attention")
"""Options that are tried out. One that is not at its default was the user's choice, and stays."""
_WITHOUT_EFFECT = ("mmap", "mlock", "max_rows", "batch_tokens", "heads")
"""Options that the choice does not depend on."""

_SIZES = (1, 1, 2, 4, 8, 16)
"""tokens of the calls of a round"""
_COMPARED_TOKENS = 32
"""of the largest call that is weighed"""
_READ_TOKENS = 32
"""of a prompt, read once under each: as many at once take no longer a token"""
_FILL_SHARE = 0.3
_MAX_ROUNDS = 30
_PAUSE_S = 0.01
"""before each call where several libraries take turns: each has a pool of threads that spins after a call"""
_WEIGHTS_ROOM = 1.3
"""Free memory, in sizes of the file, that a copy of the weights is taken to need."""

_ACCEPTANCES = {0.0: 0.4, 0.5: 0.2, 0.7: 0.2, 0.9: 0.2}
"""Acceptance rates that drafts may have, with weights; at 0 decoding is plain, which weighs most."""
_MIN_GAIN = 0.02
"""A set must be this much better to be preferred over the options as they are, and beyond the noise."""
_MAX_PLAIN_LOSS = 0.02
"""A set whose calls over a single token are slower than the first's by more than this is never chosen."""

Progress = Callable[[str, float], None]
"""Called with what is being tried, and the part of it that is done."""


def choose_options(
    path: Path,
    options: LoadOptions,
    *,
    measure: bool = True,
    progress: Progress = lambda _what, _part: None,
) -> LoadOptions:
    """The library and the load options for a model: what was found before, or what a short trial finds now.
    What the user has set stays. Nothing is tried without `measure`, where there is no choice, or where the
    file is too small for it to matter. Raises ModelFileError, OutOfMemory or BackendError."""
    if found := _remembered(path, options):
        return found
    if not measure or read_card(path).file_bytes < _MIN_FILE_BYTES:
        return options
    libraries = _libraries(path, options)
    if len(libraries) == 1 and (_is_on_gpu(libraries[0]) or not _without(libraries[0])):
        return options
    best = libraries[0]
    if len(libraries) > 1:
        best = _best(_measure(path, libraries, 0, partial(progress, "libraries")))
    if kernels := _without(best):
        best = _best(_measure(path, [best, *kernels], _CONTEXT_TOKENS, partial(progress, "kernels")))
    tuned = {name: getattr(best, name) for name in _TUNED}
    write_entry(_place(path, options), {"model": path.name, "tuned": tuned})
    return best


def _remembered(path: Path, options: LoadOptions) -> LoadOptions | None:
    data = read_entry(_place(path, options)) or {}
    try:
        chosen = replace(options, **{name: data["tuned"][name] for name in _TUNED})
    except (SettingError, TypeError, KeyError, ValueError):
        return None
    return chosen if chosen.library in {str(library.file.path) for library in candidates(options)} else None


def _place(path: Path, options: LoadOptions) -> Path:
    kept = {name: value for name, value in asdict(options).items() if name not in _WITHOUT_EFFECT}
    builds = [file.build_id for file in installed()]
    facts = json.dumps([fingerprint(path), builds, machine_id(), kept])
    return costs_dir() / f"tuned-{blake2b(facts.encode(), digest_size=12).hexdigest()}.json"


# What is tried


def _libraries(path: Path, options: LoadOptions) -> list[LoadOptions]:
    card, found, failure = read_card(path), list[LoadOptions](), None
    libraries = list(candidates(options))
    if libraries[0].uses_gpu(options):  # one for processors alone is no match, and would read the file too
        libraries = [library for library in libraries if library.uses_gpu(options)]
    for library in libraries:
        try:
            found.append(check_build(card, options, library)[0])
        except BackendCrash as error:
            failure = error
    if failure is not None and not found:
        raise failure
    return found


def _is_on_gpu(options: LoadOptions) -> bool:
    return next(iter(candidates(options))).uses_gpu(options)


def _without(options: LoadOptions) -> list[LoadOptions]:
    """Sets that lack one of the kernels each, as far as the user left the choice open."""
    found = []
    if options.extra_buffer_types:
        found.append(replace(options, extra_buffer_types=False))
    if options.flash_attention == "auto":
        with suppress(SettingError):  # a quantized cache needs it
            found.append(replace(options, flash_attention="off"))
    return found


def _measure(
    path: Path, sets: Sequence[LoadOptions], context: int, report: PartDone
) -> dict[LoadOptions, CallCosts]:
    """The curve of each set that the file can be loaded with, at a context of so many tokens; one kind of
    weights after the other where memory does not hold all. Raises ModelFileError where there is none."""
    sharing: dict[tuple[str, bool], list[LoadOptions]] = {}
    """sets that share their weights"""
    for options in sets:
        sharing.setdefault((options.library, options.extra_buffer_types), []).append(options)
    has_room = available_bytes() > _WEIGHTS_ROOM * len(sharing) * read_card(path).file_bytes
    has_room = has_room and not _is_on_gpu(sets[0])  # whose memory is another
    groups = [list(sharing.values())] if has_room else [[sharers] for sharers in sharing.values()]
    found: dict[LoadOptions, CallCosts] = {}

    def show(index: int, part: float) -> None:
        report((index + part) / len(groups))

    for i, group in enumerate(groups):
        models: dict[LoadOptions, Model] = {}
        with ExitStack() as opened:
            for sharers in group:
                with suppress(ModelFileError):
                    weights = opened.enter_context(closing(Weights(path, sharers[0])))
                    for options in sharers:
                        models[options] = weights.open(context + 2 * _COMPARED_TOKENS, options=options)
            if models:
                costs = measure_side_by_side(
                    list(models.values()),
                    seconds=_STAGE_SECONDS / len(groups),
                    context=context,
                    pause_s=_PAUSE_S if len({options.library for options in models}) > 1 else 0.0,
                    progress=partial(show, i),
                )
                found |= dict(zip(models, costs, strict=True))
    if not found:
        Weights(path, sets[0]).close()  # says why
    return {options: found[options] for options in sets if options in found}


def measure_side_by_side(
    models: Sequence[Model],
    *,
    seconds: float,
    context: int = 0,
    sizes: Sequence[int] = _SIZES,
    pause_s: float = 0.0,
    clock: Clock = perf_counter,
    progress: PartDone = lambda _part: None,
) -> list[CallCosts]:
    """The curve of each model, from rounds in which each makes the same calls, in shuffled order, after each
    has read a piece of a prompt. A size that comes twice is measured twice as often. The calls are made at a
    context of `context` tokens, or what three tenths of the time can fill. The models' sequences are empty
    before and after. Raises BackendError."""
    rng = random.Random(0)
    timers = [CallTimer(model, "all", clock, random.Random(0)) for model in models]
    sizes = [size for size in sizes if all(size <= timer.largest for timer in timers)]
    context = min(context, *(model.context_length - max(sizes) for model in models))
    taken = [{size: Samples(size) for size in sizes} for _ in models]
    started = clock()
    with ExitStack() as stack:
        for timer in timers:
            stack.enter_context(timer)
        read_s = [timer.fill(_READ_TOKENS) for timer in timers]
        for timer in timers:
            timer.clear()
        while timers[0].model.length(0) < context and clock() - started < _FILL_SHARE * seconds:
            for timer in timers:
                timer.fill(context - timer.model.length(0))
        num_rounds, first_s = 0, clock()
        while num_rounds == 0 or (
            num_rounds < _MAX_ROUNDS and clock() - started + (clock() - first_s) / num_rounds <= seconds
        ):
            for size in rng.sample(sizes, len(sizes)):
                for i in rng.sample(range(len(models)), len(models)):
                    sleep(pause_s)
                    taken[i][size].seconds.append(timers[i].call_s(size))
                progress(min((clock() - started) / max(seconds, 1e-9), 1.0))
            num_rounds += 1
    return [
        CallCosts([samples.point() for samples in kinds.values()], prefill_token_s=seconds or None)
        for kinds, seconds in zip(taken, read_s, strict=True)
    ]


# Which is the best, by what their calls took


def _best(costs: Mapping[LoadOptions, CallCosts]) -> LoadOptions:
    """The first, where no other is better beyond the noise and about as fast at single tokens."""
    first, *_ = costs
    plain_s = {options: cost.call_s(1, context=0) for options, cost in costs.items()}
    weighted_s = {options: _weighted_s(cost) for options, cost in costs.items()}
    # How uncertain the time of a single token is, as a part of it.
    spreads = (min(p.spread_ratio for p in cost.points if p.num_tokens == 1) for cost in costs.values())
    enough_s = (1 - max(_MIN_GAIN, 2 * max(spreads))) * weighted_s[first]
    better = [
        options
        for options in costs
        if weighted_s[options] < enough_s and plain_s[options] <= (1 + _MAX_PLAIN_LOSS) * plain_s[first]
    ]
    return min(better, key=weighted_s.__getitem__, default=first)


def _weighted_s(cost: CallCosts) -> float:
    """Seconds per token, with one token of a prompt read for each, since users wait for both: the geometric
    mean over a spread of acceptances, each with the draft length that suits it and free drafts."""
    calls_s, read_s = cost.calls_s(_COMPARED_TOKENS, context=0), cost.prefill_s(1)
    costs, total = StepCosts(calls_s), 0.0
    for acceptance, weight in _ACCEPTANCES.items():
        speedup = costs.speedup(best_call(calls_s, acceptance) - 1, acceptance)
        total += weight * math.log(calls_s[0] / speedup + read_s)
    return math.exp(total)
