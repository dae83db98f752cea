"""Load options that change what calls cost, and nothing else: which of them suit this machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path

from outrider.backends.gguf.guard import check_build
from outrider.backends.gguf.libraries import candidates, installed
from outrider.backends.gguf.library import Library
from outrider.backends.gguf.model import Weights
from outrider.backends.gguf.options import RARELY_SET, LoadOptions
from outrider.backends.machine import available_bytes, logical_cores, physical_cores
from outrider.backends.tuning.scoring import (
    COMPARED_TOKENS,
    Trial,
    choose_best,
    compare_libraries,
    machine_id,
)
from outrider.backends.tuning.side_by_side import FEW_SIDE_SIZES, SIDE_SIZES, measure_side_by_side
from outrider.core.contracts import Model
from outrider.core.errors import BackendCrash, ModelFileError, SettingError
from outrider.costs.curve import CallCosts
from outrider.costs.store import costs_dir
from outrider.models.cache import fingerprint, read_entry, write_entry
from outrider.models.gguf import ModelCard, read_card
from outrider.models.hub import cache_dir

DEFAULT_SECONDS = 60.0
_QUICK_SECONDS = 8.0
"""of measuring for the choice that is made by itself; loading comes on top"""
_DRAFT_SHARE = 0.5
"""of that time, for a draft model, whose calls are shorter"""
_MIN_FILE_BYTES = 4 << 20
"""A smaller file is called in no time by any library."""

_TUNED = ("backend", "library", "extra_buffer_types", "flash_attention", "threads", "threads_batch")
"""Options that are tried out. One that is not at its default was the user's choice, and stays."""
_WITHOUT_EFFECT = ("mmap", "mlock", "max_rows", "batch_tokens", "heads")
"""Options that the choice does not depend on."""
_KERNELS = {"extra_buffer_types": False, "flash_attention": "off"}
"""Kernels that are tried without, and how they are switched off."""

_CONTEXT_TOKENS = 512
"""Flash attention shows once there is something to attend to."""
_PAUSE_S = 0.01
"""before each call where several libraries take turns: each has a pool of threads that spins after a call"""
_WEIGHTS_ROOM = 1.3
"""Free memory, in sizes of the file, that a copy of the weights is taken to need."""

Progress = Callable[[str, float], None]
"""Called with what is being tried, and the part of the time that is spent."""

Stage = Callable[[LoadOptions], list[LoadOptions]]
"""The sets to try beside the best one so far."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """The options to use, and every set that was tried just now, in order. `compared` is the chosen library
    against the other in a line, where there were two."""

    options: LoadOptions
    trials: tuple[Trial, ...]
    compared: str = ""


def tuned_options(path: Path, options: LoadOptions, *, draft: bool = False) -> Tuning | None:
    """What `tune` found for this model under these options; None where there is nothing, or nothing that can
    be used. What the user has set away from its default is kept."""
    data = read_entry(_place(path, options, draft))
    if data is None:
        return None
    try:
        chosen = replace(options, **{name: data["tuned"][name] for name in _TUNED})
    except (SettingError, TypeError, KeyError, ValueError):
        return None
    here = {str(library.file.path) for library in candidates(options)}
    return Tuning(chosen, (), str(data.get("compared", ""))) if chosen.library in here else None


def choose_options(
    path: Path,
    options: LoadOptions,
    *,
    draft: bool = False,
    measure: bool = True,
    progress: Progress | None = None,
) -> Tuning:
    """The library and the load options for a model: what was found before, or what a short trial finds now.

    Nothing is tried without `measure`, where there is no choice, or where the file is too small for it to
    matter. Raises what `tune` raises.
    """
    if found := tuned_options(path, options, draft=draft):
        return found
    if options.backend != "auto":  # was it tried beside the others?
        found = tuned_options(path, replace(options, backend="auto"), draft=draft)
        if found and found.options.backend == options.backend:
            return found
    if not measure or read_card(path).file_bytes < _MIN_FILE_BYTES:
        return Tuning(options, ())
    libraries = _libraries(path, options)
    if len(libraries) == 1 and (_is_on_gpu(libraries[0]) or not _without(libraries[0])):
        return Tuning(options, ())
    seconds = _QUICK_SECONDS * (_DRAFT_SHARE if draft else 1.0)
    return tune(path, options, draft=draft, seconds=seconds, progress=progress, quick=True)


def tune(
    path: Path,
    options: LoadOptions,
    *,
    draft: bool = False,
    seconds: float = DEFAULT_SECONDS,
    progress: Progress | None = None,
    quick: bool = False,
) -> Tuning:
    """Try the options that change what calls cost, one after another, and remember the best set.

    Each is measured against the best so far, call by call in turn: native libraries, repacked kernels and
    flash attention, then thread counts. `draft` weighs the calls of a draft model instead: mostly
    single tokens. `quick` looks at fewer sizes of calls, and leaves the thread counts out.

    Raises ModelFileError, OutOfMemory or BackendError.
    """
    libraries = _libraries(path, options)
    stages: dict[str, Stage] = {"libraries": lambda _best: libraries, "kernels": _without}
    stages |= {} if quick else {"threads": _threads}
    survived = best = libraries[0]
    stages = {what: stage for what, stage in stages.items() if any(tried != best for tried in stage(best))}
    trials, gained, compared = list[Trial](), 1.0, ""
    for i, (what, stage) in enumerate(stages.items()):
        costs = _measure(
            path,
            [best, *(tried for tried in stage(best) if tried != best)],
            seconds=seconds / len(stages),
            draft=draft,
            context=_CONTEXT_TOKENS if what == "kernels" else 0,
            sizes=FEW_SIDE_SIZES if quick else SIDE_SIZES,
            report=_part(i, len(stages), partial(progress or _silent, what)),
        )
        survived = survived if survived in costs else next(iter(costs))
        best, reached, new = choose_best(survived, list(costs), list(costs.values()), draft)
        trials += [replace(trial, score=trial.score * gained) for trial in new[1 if trials else 0 :]]
        gained *= reached
        compared = compared or compare_libraries(best, new)
    tuned = {name: getattr(best, name) for name in _TUNED}
    write_entry(_place(path, options, draft), {"model": path.name, "tuned": tuned, "compared": compared})
    return Tuning(best, tuple(trials), compared)


def _silent(_what: str, _part: float) -> None: ...


def _part(index: int, count: int, report: Callable[[float], None]) -> Callable[[float], None]:
    """Reports how much of the whole is done, called with what is done of one of its equal parts."""
    return lambda part: report((index + part) / count)


def _place(path: Path, options: LoadOptions, draft: bool) -> Path:
    left_out = (*_WITHOUT_EFFECT, *RARELY_SET)
    kept = {name: value for name, value in asdict(options).items() if name not in left_out}
    kept |= options.rarely_set()
    builds = [file.build_id for file in installed()]
    facts = json.dumps([fingerprint(path), builds, machine_id(), kept, draft])
    return costs_dir() / f"tuned-{blake2b(facts.encode(), digest_size=12).hexdigest()}.json"


# What is tried


def _libraries(path: Path, options: LoadOptions) -> list[LoadOptions]:
    """Every library that runs this file here, the preferred one first.

    Raises BackendError, or BackendCrash, where there is none.
    """
    card, found, failure = read_card(path), list[LoadOptions](), None
    libraries = list(candidates(options))
    if libraries[0].uses_gpu(options):  # one for processors alone is no match, and would read the file too
        libraries = [library for library in libraries if library.uses_gpu(options)]
    for library in libraries:
        try:
            found.append(checked_options(card, options, library)[0])
        except BackendCrash as error:
            failure = error
    if failure is not None and not found:
        raise failure
    return found


def checked_options(
    card: ModelCard, options: LoadOptions, library: Library
) -> tuple[LoadOptions, str | None]:
    """The options for one library, without what its build crashes at or computes wrongly with this model, and
    a notice for the user where that changes something. Raises BackendCrash where it cannot be used."""
    return check_build(
        card.path,
        replace(options, backend=library.backend, library=str(library.file.path)),
        build=library.build_id,
        model_kind=f"{card.architecture} {card.quantization}",
        file=fingerprint(card.path),
        memory=cache_dir() / "builds.json",
    )


def _is_on_gpu(options: LoadOptions) -> bool:
    return next(iter(candidates(options))).uses_gpu(options)


def _without(options: LoadOptions) -> list[LoadOptions]:
    """Sets that lack one of the kernels each, as far as the user left the choice open."""
    found = []
    for name in _KERNELS:
        if getattr(options, name) == getattr(LoadOptions(), name):
            with suppress(SettingError):  # a quantized cache needs flash attention
                found.append(replace(options, **{name: _KERNELS[name]}))  # type: ignore[arg-type]
    return found


def _threads(options: LoadOptions) -> list[LoadOptions]:
    """Fewer threads than cores (memory may be what limits), and one for each hardware thread."""
    if options.threads or options.threads_batch:
        return []
    cores = physical_cores()
    counts = {max(cores // 2, 1), max(cores * 3 // 4, 1), logical_cores()} - {cores}
    return [replace(options, threads=n, threads_batch=n) for n in sorted(counts)]


def _measure(
    path: Path,
    sets: Sequence[LoadOptions],
    *,
    seconds: float,
    draft: bool,
    context: int,
    sizes: Sequence[int],
    report: Callable[[float], None],
) -> dict[LoadOptions, CallCosts]:
    """The curve of each set that the file can be loaded with, measured for `seconds` in all, call by call in
    turn, with a context of so many tokens; one kind of weights after the other where memory does not hold
    all. Raises ModelFileError where there is none."""
    sharing: dict[tuple[str, str, bool], list[LoadOptions]] = {}
    """sets that share their weights"""
    for options in sets:
        kind = options.backend, options.library, options.extra_buffer_types
        sharing.setdefault(kind, []).append(options)
    has_room = available_bytes() > _WEIGHTS_ROOM * len(sharing) * read_card(path).file_bytes
    has_room = has_room and not _is_on_gpu(sets[0])  # whose memory is another
    groups = [list(sharing.values())] if has_room else [[sharers] for sharers in sharing.values()]
    found: dict[LoadOptions, CallCosts] = {}
    for i, group in enumerate(groups):
        models: dict[LoadOptions, Model] = {}
        with ExitStack() as opened:
            for sharers in group:
                with suppress(ModelFileError):
                    weights = opened.enter_context(closing(Weights(path, sharers[0])))
                    for options in sharers:
                        models[options] = weights.open(context + 2 * COMPARED_TOKENS, options=options)
            if models:
                costs = measure_side_by_side(
                    list(models.values()),
                    seconds=seconds / len(groups),
                    rows="last" if draft else "all",
                    context=context,
                    progress=_part(i, len(groups), report),
                    sizes=sizes,
                    pause_s=_PAUSE_S if len({options.library for options in models}) > 1 else 0.0,
                )
                found |= dict(zip(models, costs, strict=True))
    if not found:
        Weights(path, sets[0]).close()  # says why
    return {options: found[options] for options in sets if options in found}
