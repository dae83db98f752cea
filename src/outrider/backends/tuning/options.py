"""The native library and the kernels that suit a file on this machine: a trial of a few seconds finds them,
and is remembered. They change what calls cost, and nothing else."""

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

from outrider.backends.gguf.guard import check_build
from outrider.backends.gguf.libraries import candidates, installed
from outrider.backends.gguf.model import Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.machine import available_bytes
from outrider.backends.tuning.curves import machine_id
from outrider.core.contracts import Model
from outrider.core.errors import BackendCrash, ModelFileError, SettingError
from outrider.costs.calibrate import CallTimer, Clock, Samples
from outrider.costs.calibrate import Progress as PartDone
from outrider.costs.curve import CallCosts
from outrider.costs.expected_speed import StepCosts, best_call
from outrider.costs.store import costs_dir
from outrider.models.cache import fingerprint, read_entry, write_entry
from outrider.models.gguf import read_card

_STAGE_SECONDS = 4.0
"""of measuring the libraries, and then the kernels of the best; loading comes on top"""
_MIN_FILE_BYTES = 4 << 20
"""A smaller file is called in no time by any library."""

_TUNED = ("backend", "library", "extra_buffer_types", "flash_attention")
"""Options that are tried out. One that is not at its default was the user's choice, and stays."""
_WITHOUT_EFFECT = ("mmap", "mlock", "max_rows", "batch_tokens", "heads")
"""Options that the choice does not depend on."""

_CONTEXT_TOKENS = 512
"""Flash attention shows once there is something to attend to."""
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

    What the user has set away from its default is kept. Nothing is tried without `measure`, where there is no
    choice, or where the file is too small for it to matter. Raises ModelFileError, OutOfMemory or
    BackendError.
    """
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
    """The options with every library that runs this file, the preferred first. Raises BackendError."""
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
    """The curve of each set that the file can be loaded with, measured call by call in turn, with a context
    of so many tokens; one kind of weights after the other where memory does not hold all. Raises
    ModelFileError where there is none."""
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
    """The curve of each model, from rounds in which each makes the same calls, in shuffled order.

    First each reads a piece of a prompt. A size that comes twice is measured twice as often. It takes about
    `seconds` in all, at least a round. The calls are made at a context of `context` tokens, or what three
    tenths of the time can fill. The models' sequences are empty before and after. Raises BackendError when a
    call fails.
    """
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
    """The first that was measured, where no other is better beyond the noise and about as fast at single
    tokens."""
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
