"""Load options that change what calls cost, and nothing else: which of them suit this machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from outrider.backends.gguf import (
    Library,
    LoadOptions,
    Weights,
    candidates,
    check_build,
    installed,
)
from outrider.backends.machine import available_bytes, logical_cores, physical_cores
from outrider.backends.tuning.scoring import (
    COMPARED_TOKENS,
    Trial,
    choose_best,
    compare_libraries,
    file_id,
    machine_id,
)
from outrider.core.contracts import Model
from outrider.core.errors import BackendCrash, ModelFileError, SettingError
from outrider.costs.calibrate import FEW_SIDE_SIZES, SIDE_SIZES, measure_side_by_side
from outrider.costs.curve import CallCosts
from outrider.costs.store import costs_dir, read_entry, write_entry
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
_WITHOUT_EFFECT = ("mmap", "mlock", "max_rows", "batch_tokens")
"""Options that the choice does not depend on."""

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
    """The options to use, and every set that was tried, in order. `compared` is the chosen library against
    the other in a line, where there were two. `notice` says where the choice could not be kept."""

    options: LoadOptions
    trials: tuple[Trial, ...]
    compared: str = ""
    notice: str | None = None


def tuned_options(path: Path, options: LoadOptions, *, draft: bool = False) -> Tuning | None:
    """What `tune` found for this model under these options; None where there is nothing, or nothing that can
    be used. What the user has set away from its default is kept."""
    data, _ = read_entry(_place(path, options, draft), "")
    if data is None:
        return None
    try:
        chosen = _with(options, data["tuned"])
        trials = tuple(_read_trial(options, trial) for trial in data.get("trials", ()))
    except (SettingError, TypeError, KeyError, ValueError):
        return None
    if chosen.library not in {str(library.file.path) for library in candidates(options)}:
        return None
    return Tuning(chosen, trials, str(data.get("compared", "")))


def _of_one_backend(path: Path, options: LoadOptions, draft: bool) -> Tuning | None:
    """What a trial of all libraries found about the one that is asked for, if there was such a trial."""
    kept = tuned_options(path, replace(options, backend="auto"), draft=draft)
    if kept is None or kept.options.backend == options.backend:
        return kept
    trials = [trial for trial in kept.trials if trial.options.backend == options.backend]
    best = min(trials, key=lambda trial: trial.score, default=None)
    return Tuning(best.options, tuple(trials)) if best else None


def _with(options: LoadOptions, tuned: dict[str, Any]) -> LoadOptions:
    """Raises KeyError, TypeError or SettingError for what `_tuned_part` never gave."""
    return replace(options, **{name: tuned[name] for name in _TUNED})


def _tuned_part(options: LoadOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in _TUNED}


def _read_trial(options: LoadOptions, data: dict[str, Any]) -> Trial:
    costs = CallCosts.from_json(data["costs"], "trial")
    return Trial(str(data["changed"]), _with(options, data["options"]), costs, float(data["score"]))


def _write_trial(trial: Trial) -> dict[str, Any]:
    tried = {"changed": trial.changed, "options": _tuned_part(trial.options)}
    return tried | {"costs": trial.costs.as_json(), "score": trial.score}


def choose_options(
    path: Path, options: LoadOptions, *, draft: bool = False, progress: Progress | None = None
) -> Tuning:
    """The library and the load options for a model: what was found before, or what a short trial finds now.

    Nothing is tried where there is no choice, or where the file is too small for it to matter.
    Raises what `tune` raises.
    """
    found = tuned_options(path, options, draft=draft)
    if found is None and options.backend != "auto":
        found = _of_one_backend(path, options, draft)
    if found is not None:
        return found
    if read_card(path).file_bytes < _MIN_FILE_BYTES:
        return Tuning(options, ())
    libraries = _libraries(path, options)
    if len(libraries) == 1 and not _kernels(libraries[0]):
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
    report = progress or (lambda _what, _part: None)
    libraries = _libraries(path, options)
    survived = best = libraries[0]
    stages: dict[str, Stage] = {"libraries": lambda _best: libraries}
    stages |= {"kernels": _kernels} if quick else {"kernels": _repacking, "attention": _attention}
    stages |= {} if quick else {"threads": _threads}
    stages = {
        what: stage for what, stage in stages.items() if any(changed != best for changed in stage(best))
    }
    trials, gained, compared = list[Trial](), 1.0, ""
    for i, (what, stage) in enumerate(stages.items()):
        sets = [best, *(changed for changed in stage(best) if changed != best)]
        context = _CONTEXT_TOKENS if stage in (_attention, _kernels) else 0

        def show(part: float, done: int = i, what: str = what) -> None:
            report(what, (done + part) / len(stages))

        costs = _measure(
            path,
            sets,
            seconds=seconds / len(stages),
            draft=draft,
            context=context,
            sizes=FEW_SIDE_SIZES if quick else SIDE_SIZES,
            report=show,
        )
        survived = survived if survived in costs else next(iter(costs))
        best, reached, new = choose_best(survived, list(costs), list(costs.values()), draft)
        trials += [replace(trial, score=trial.score * gained) for trial in new[1 if trials else 0 :]]
        gained *= reached
        compared = compared or compare_libraries(best, new)
    record = {
        "model": path.name,
        "tuned": _tuned_part(best),
        "compared": compared,
        "trials": [_write_trial(trial) for trial in trials],
    }
    return Tuning(best, tuple(trials), compared, write_entry(_place(path, options, draft), record))


# What is tried


def _is_free(options: LoadOptions, name: str) -> bool:
    return bool(getattr(options, name) == getattr(LoadOptions(), name))


def _libraries(path: Path, options: LoadOptions) -> list[LoadOptions]:
    """Every library that runs this file here, the preferred one first.

    Raises BackendError, or BackendCrash, where there is none.
    """
    card, found, failure = read_card(path), list[LoadOptions](), None
    for library in candidates(options):
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
        file=file_id(card.path),
        memory=cache_dir() / "builds.json",
    )


def _repacking(options: LoadOptions) -> list[LoadOptions]:
    """Without repacked kernels."""
    return [replace(options, extra_buffer_types=False)] if _is_free(options, "extra_buffer_types") else []


def _attention(options: LoadOptions) -> list[LoadOptions]:
    """Without flash attention, where the cache allows that."""
    try:
        return [replace(options, flash_attention="off")] if _is_free(options, "flash_attention") else []
    except SettingError:
        return []


def _kernels(options: LoadOptions) -> list[LoadOptions]:
    """Without the one, and without the other: a short trial has no time for both in turn."""
    return _repacking(options) + _attention(options)


def _threads(options: LoadOptions) -> list[LoadOptions]:
    """Fewer threads than cores (memory may be what limits), and one for each hardware thread."""
    cores = physical_cores()
    counts = sorted({max(cores // 2, 1), max(cores * 3 // 4, 1), cores, logical_cores()})
    if not (_is_free(options, "threads") and _is_free(options, "threads_batch")) or len(counts) < 2:
        return []
    return [replace(options, threads=n, threads_batch=n) for n in counts if n != cores]


# Measuring


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
    kinds = list(dict.fromkeys(map(_kind, sets)))
    if available_bytes() > _WEIGHTS_ROOM * len(kinds) * read_card(path).file_bytes:
        groups = [list(sets)]
    else:
        groups = [[options for options in sets if _kind(options) == kind] for kind in kinds]
    found: dict[LoadOptions, CallCosts] = {}
    for i, group in enumerate(groups):

        def show(part: float, done: int = i) -> None:
            report((done + part) / len(groups))

        with ExitStack() as opened:
            if models := _open(path, group, context + 2 * COMPARED_TOKENS, opened):
                costs = measure_side_by_side(
                    list(models.values()),
                    seconds=seconds / len(groups),
                    rows="last" if draft else "all",
                    context=context,
                    progress=show,
                    sizes=sizes,
                    pause_s=_PAUSE_S if len({options.library for options in models}) > 1 else 0.0,
                )
                found |= dict(zip(models, costs, strict=True))
    if not found:
        Weights(path, sets[0]).close()  # says why
    return {options: found[options] for options in sets if options in found}


def _kind(options: LoadOptions) -> tuple[str, str, bool]:
    """Sets of one kind share their weights."""
    return options.backend, options.library, options.extra_buffer_types


def _open(
    path: Path, sets: Sequence[LoadOptions], context_length: int, opened: ExitStack
) -> dict[LoadOptions, Model]:
    """A model for each set whose library can load the file; `opened` closes them."""
    firsts: dict[tuple[str, str, bool], LoadOptions] = {}
    for options in sets:
        firsts.setdefault(_kind(options), options)
    weights: dict[tuple[str, str, bool], Weights] = {}
    for kind, options in firsts.items():
        with suppress(ModelFileError):
            weights[kind] = opened.enter_context(closing(Weights(path, options)))
    return {
        options: weights[_kind(options)].open(context_length, options=options)
        for options in sets
        if _kind(options) in weights
    }


def _place(path: Path, options: LoadOptions, draft: bool) -> Path:
    """Where the choice for this model under these options is kept."""
    kept = {name: value for name, value in asdict(options).items() if name not in _WITHOUT_EFFECT}
    builds = [file.build_id for file in installed()]
    facts = json.dumps([file_id(path), builds, machine_id(), kept, draft])
    return costs_dir() / f"tuned-{blake2b(facts.encode(), digest_size=12).hexdigest()}.json"
