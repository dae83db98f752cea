"""Load options that change what calls cost, and nothing else: which of them suit this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path

from outrider.backends.llama_cpp import (
    LoadOptions,
    Weights,
    available_bytes,
    build_id,
    check_build,
    physical_cores,
)
from outrider.core.contracts import Model
from outrider.core.errors import SettingError
from outrider.costs.curve import CallCosts
from outrider.costs.side_by_side import measure_side_by_side
from outrider.costs.store import costs_dir, read_entry, write_entry
from outrider.models.cache import cache_dir
from outrider.models.gguf import read_card
from outrider.tuning.curves import file_id, machine_id
from outrider.tuning.judging import COMPARED_TOKENS, Trial, describe_changes, judge

__all__ = ["Tuning", "describe_tuned", "tune", "tuned_options"]

DEFAULT_SECONDS = 60.0

_TUNED = ("extra_buffer_types", "flash_attention", "threads", "threads_batch")
"""Options that are tried out. One that is not at its default was the user's choice, and stays."""
_WITHOUT_EFFECT = ("mmap", "mlock", "max_rows", "batch_tokens")
"""Options that the choice does not depend on."""

_CONTEXT_TOKENS = 512
"""Flash attention shows once there is something to attend to."""
_WEIGHTS_ROOM = 1.3
"""Free memory, in sizes of the file, that a copy of the weights is taken to need."""

Progress = Callable[[str, float], None]
"""Told what is being tried, and what part of the time is spent."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """The options to use, and every set that was tried, in order. `notice` says where the choice could
    not be kept."""

    options: LoadOptions
    trials: tuple[Trial, ...]
    notice: str | None = None


def tuned_options(path: Path, options: LoadOptions, *, draft: bool = False) -> LoadOptions | None:
    """The set that `tune` found for this model under these options; None where there is none, or where
    it is the set as it is. What the user has set away from its default is kept."""
    data, _ = read_entry(_place(path, options, draft), "")
    tuned = None if data is None else data.get("tuned")
    if not isinstance(tuned, dict) or not set(tuned) <= set(_TUNED):
        return None
    try:
        found = replace(options, **tuned)
    except (SettingError, TypeError):
        return None
    return found if found != options else None


def describe_tuned(options: LoadOptions, tuned: LoadOptions) -> str:
    """One line: what the tuned set changes."""
    return f"tuned for this machine: {describe_changes(options, tuned)} (outrider costs --tune measured it)"


def tune(
    path: Path,
    options: LoadOptions,
    *,
    draft: bool = False,
    seconds: float = DEFAULT_SECONDS,
    progress: Progress | None = None,
) -> Tuning:
    """Try the options that change what calls cost, one after another, and remember the best set.

    Each is measured against the best so far, call by call in turn: repacked kernels, flash attention,
    then thread counts. `draft` weighs the calls of a draft model instead: mostly single tokens.

    Raises ModelFileError, OutOfMemory or BackendError.
    """
    report = progress or (lambda _what, _part: None)
    survived = best = _surviving(path, options)
    stages = [stage for stage in (_kernels, _attention, _threads) if stage(survived)]
    trials, gained = list[Trial](), 1.0
    for i, stage in enumerate(stages):
        sets = [best, *(changed for changed in stage(best) if changed != best)]
        what = stage.__name__.strip("_")
        context = _CONTEXT_TOKENS if stage is _attention else 0

        def tell(part: float, done: int = i, what: str = what) -> None:
            report(what, (done + part) / len(stages))

        costs = _measure(path, sets, seconds / len(stages), draft, context, tell)
        best, reached, tried = judge(survived, sets, costs, draft)
        trials += [replace(trial, score=trial.score * gained) for trial in tried[1 if trials else 0 :]]
        gained *= reached
    tuned = {name: value for name, value in asdict(best).items() if name in _TUNED}
    notice = write_entry(_place(path, options, draft), {"model": path.name, "tuned": tuned})
    return Tuning(best, tuple(trials), notice)


# What is tried


def _is_free(options: LoadOptions, name: str) -> bool:
    return bool(getattr(options, name) == getattr(LoadOptions(), name))


def _surviving(path: Path, options: LoadOptions) -> LoadOptions:
    """The options without what this build of the library crashes at."""
    card = read_card(path)
    survived, _ = check_build(
        path,
        options,
        build=build_id(),
        model_kind=f"{card.architecture} {card.quantization}",
        memory=cache_dir() / "builds.json",
    )
    return survived


def _kernels(options: LoadOptions) -> list[LoadOptions]:
    """Without the repacked kernels."""
    return [replace(options, extra_buffer_types=False)] if _is_free(options, "extra_buffer_types") else []


def _attention(options: LoadOptions) -> list[LoadOptions]:
    """Without flash attention, where the cache allows that."""
    try:
        return [replace(options, flash_attention="off")] if _is_free(options, "flash_attention") else []
    except SettingError:
        return []


def _threads(options: LoadOptions) -> list[LoadOptions]:
    """Fewer threads than cores (memory may be what limits), and one for each hardware thread."""
    cores = physical_cores()
    counts = sorted({max(cores // 2, 1), max(cores * 3 // 4, 1), cores, _logical_cores()})
    if not (_is_free(options, "threads") and _is_free(options, "threads_batch")) or len(counts) < 2:
        return []
    return [replace(options, threads=n, threads_batch=n) for n in counts if n != cores]


def _logical_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Measuring


def _measure(
    path: Path,
    sets: Sequence[LoadOptions],
    seconds: float,
    draft: bool,
    context: int,
    report: Callable[[float], None],
) -> list[CallCosts]:
    """The curve of each set, call by call in turn; one kind of weights after the other where memory does
    not hold both."""
    kinds = sorted({options.extra_buffer_types for options in sets}, reverse=True)
    if available_bytes() > _WEIGHTS_ROOM * len(kinds) * read_card(path).file_bytes:
        groups = [list(sets)]
    else:
        groups = [[options for options in sets if options.extra_buffer_types == kind] for kind in kinds]
    found: dict[LoadOptions, CallCosts] = {}
    for i, group in enumerate(groups):

        def tell(part: float, done: int = i) -> None:
            report((done + part) / len(groups))

        with _opened(path, group, context + 2 * COMPARED_TOKENS) as models:
            costs = measure_side_by_side(
                models,
                seconds=seconds / len(groups),
                rows="last" if draft else "all",
                context=context,
                progress=tell,
            )
        found |= dict(zip(group, costs, strict=True))
    return [found[options] for options in sets]


@contextmanager
def _opened(path: Path, sets: Sequence[LoadOptions], context_length: int) -> Iterator[list[Model]]:
    weights: dict[bool, Weights] = {}
    try:
        models: list[Model] = []
        for options in sets:
            kind = options.extra_buffer_types
            if kind not in weights:
                weights[kind] = Weights(path, options)
            models.append(weights[kind].open(context_length, options=options))
        yield models
    finally:
        for loaded in weights.values():
            loaded.close()


def _place(path: Path, options: LoadOptions, draft: bool) -> Path:
    """Where the choice for this model under these options is kept."""
    kept = {name: value for name, value in asdict(options).items() if name not in _WITHOUT_EFFECT}
    facts = json.dumps([file_id(path), build_id(), machine_id(), kept, draft])
    return costs_dir() / f"tuned-{blake2b(facts.encode(), digest_size=12).hexdigest()}.json"
