"""Survive a native library that dies at its first call, or computes wrongly. Some compilers miscompile the
AMX kernels (GCC 12 among them): the first call then ends the whole process with a segmentation fault. Other
builds use instructions that this CPU lacks. So the first call of every build and kind of model is made in a
child process; what became of it is remembered."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from outrider.backends.gguf.head_model import HeadWeights
from outrider.backends.gguf.library import Library
from outrider.backends.gguf.log import log_line
from outrider.backends.gguf.model import GgufModel, Weights
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.machine import cpu_id, physical_cores
from outrider.core.data import Block, Logits, Row, Span
from outrider.core.errors import BackendCrash, OutOfMemory, OutriderError
from outrider.costs.other_programs import look
from outrider.models.cache import fingerprint, read_entry, write_entry
from outrider.models.gguf import ModelCard
from outrider.models.heads import HeadFile
from outrider.models.hub import cache_dir

_TRIAL = "trial 3"
"""What is tried; outcomes of another trial count for nothing."""
_HEAD_TRIAL = "trial of heads 2"
_WORKS, _PLAIN, _SMALL = "works", "works without extra buffer types", "works in small batches"
"""What can come of it"""
_SMALL_BATCH = 31
"""tokens, below the sizes whose kernels were seen to be wrong"""

_FLAGS = "-mno-amx-int8 -mno-amx-tile -mno-amx-bf16"
_CHOOSE = "choose another library (--backend, --llama-library)"

WRONG = 3
"""the exit status of a child whose library computes wrongly"""
_LIMIT_S = 120.0
"""for a child's first calls, beside the time that the file takes to be read from a slow disk"""
_SLOW_DISK_BYTES_PER_S = 10e6


def check_build(card: ModelCard, options: LoadOptions, library: Library) -> tuple[LoadOptions, str | None]:
    """The options under which a library runs a file without crashing at it or computing wrongly, and a notice
    for the user where that changes something. What became of its first calls on this CPU is remembered.
    Raises BackendCrash when the child dies with either set of kernels or does not come back, OutOfMemory when
    the system killed it."""
    options = replace(options, backend=library.backend, library=str(library.file.path))
    model_kind, version = f"{card.architecture} {card.quantization}", _version(library)
    kernels = "" if options.extra_buffer_types else " | plain kernels"
    place = f"gpu layers {options.gpu_layers} | cpu {cpu_id()}{kernels}"
    key = f"{_TRIAL} | {library.build_id} | {model_kind} {fingerprint(card.path)} | {place}"
    outcomes = read_entry(_memory(), "builds are tried out again") or {}
    outcome = outcomes.get(key)
    if outcome not in (_WORKS, _PLAIN, _SMALL):
        outcome = _try_out(card.path, options, version)
        if outcome is not None:  # if it cannot be kept, it is tried next time
            write_entry(_memory(), outcomes | {key: outcome}, quiet=True)
    if outcome == _PLAIN:
        return _without_fault(options, outcome), (
            f"{version} crashes in its repacked kernels or samplers with {model_kind}: plain ones are used, "
            f'which can be slower. To fix it, rebuild it with CFLAGS="{_FLAGS}" (CXXFLAGS alike)'
        )
    if outcome == _SMALL:
        log_line(
            f"{version} computes long calls wrongly with {model_kind}: no call has over {_SMALL_BATCH} tokens"
        )
        return _without_fault(options, outcome), None
    return options, None


def check_head(target: Weights, head: HeadFile, options: LoadOptions) -> None:
    """Make a head's first calls beside its target, in a child process. Raises BackendCrash where the child
    dies (as it does where the library does not give the inputs of the target's layers) or does not come back,
    or where calls over few and over many tokens disagree, OutOfMemory when the system killed it."""
    files = f"{head.kind} {fingerprint(target.path)} {fingerprint(head.path)}"
    place = f"gpu layers {options.gpu_layers} | cpu {cpu_id()}"
    key = f"{_HEAD_TRIAL} | {target.library.build_id} | {files} | {place}"
    outcomes = read_entry(_memory()) or {}
    if outcomes.get(key) == _WORKS:
        return
    given = [asdict(target.options), asdict(options), head.target_layers, str(head.path), head.kind]
    status = _first_calls(target.path, json.dumps(given))
    if status < 0 or status == WRONG:
        does = "computes it wrongly"
        if status != WRONG:
            does = f"dies at its first call ({_signal_name(-status)})"
        why = f"beside {target.name} {_version(target.library)} {does}"
        way_out = "Is the file whole, and made for this model? If so, use a draft model (-md), or "
        raise BackendCrash(str(head.path), why, f"{way_out}another library (--llama-library).")
    if status == 0:
        write_entry(_memory(), outcomes | {key: _WORKS}, quiet=True)


def _memory() -> Path:
    return cache_dir() / "builds.json"


def _version(library: Library) -> str:
    return library.build_id.rpartition(" ")[0] or library.build_id


def _without_fault(options: LoadOptions, outcome: str) -> LoadOptions:
    if outcome == _PLAIN:
        return replace(options, extra_buffer_types=False, backend_sampling=False)
    return replace(options, micro_batch_tokens=min(_SMALL_BATCH, options.micro_batch_tokens))


def _try_out(path: Path, options: LoadOptions, version: str) -> str | None:
    """What becomes of first calls; None where the file is not even loaded, which the real load explains."""

    def child(options: LoadOptions) -> int:
        return _first_calls(path, json.dumps(asdict(options)))

    status = child(options)
    if status == 0:
        return _WORKS
    if status == WRONG:
        if child(_without_fault(options, _SMALL)) == 0:
            return _SMALL
        why = f"{version} computes it wrongly: calls over few and over many tokens disagree"
        raise BackendCrash(str(path), why, f"{_CHOOSE.capitalize()}.")
    if status > 0:
        return None
    with_them = ""
    if options.extra_buffer_types:
        if child(_without_fault(options, _PLAIN)) == 0:
            return _PLAIN
        with_them = ", with its repacked kernels and without"
    why = f"{version} dies at its first call ({_signal_name(-status)}){with_them}"
    way_out = f"Is the file whole? If it is, {_CHOOSE}, or rebuild this one on this machine."
    raise BackendCrash(str(path), why, way_out)


def _first_calls(path: Path, given: str) -> int:
    """The exit status of a child that is `given` this (`main`), negative for a signal. One that was killed
    says nothing about the build: no crash looks so."""
    # -P: whatever lies in the working folder is not part of the program.
    command = [sys.executable, "-P", "-m", "outrider.backends.gguf.guard", str(path), given]
    size_bytes = path.stat().st_size if path.exists() else 0
    try:
        status = _run_child(command, _LIMIT_S + size_bytes / _SLOW_DISK_BYTES_PER_S)
    except subprocess.TimeoutExpired as error:
        why = f"its first calls did not end within {error.timeout:.0f} s"
        raise BackendCrash(str(path), why, f"Is the file whole? If it is, {_CHOOSE}.") from None
    if os.name == "posix" and status in (-signal.SIGKILL, -signal.SIGTERM):
        cause = f"the system ended its first call ({_signal_name(-status)})"
        way_out = "Choose a smaller quantization, or end other programs."
        raise OutOfMemory(str(path), f"{cause}, most likely because memory ran out", way_out)
    return status


def _run_child(command: Sequence[str], limit_s: float) -> int:
    # A session of its own: Ctrl-C must not look like a crash of the build.
    silent = subprocess.DEVNULL
    return subprocess.run(
        command, stdin=silent, stdout=silent, stderr=silent, start_new_session=True, timeout=limit_s
    ).returncode


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# A program that loads a model, makes its first calls and ends: what `guard` runs in a child.

_PARTS = (8, 64)
"""Tokens per call in which the same text is read. They run through different kernels: ik_llama.cpp 0.1.5 has
ones for 32 rows and more that are wrong for Q4_1 and Q5_1."""
_COMPARED_ROWS = 8
_MIN_CORRELATION = 0.9
"""between the logits of the two. Rounding leaves 0.998 and more, wrong kernels left 0.57 to 0.68."""


def main(path: str, given: str) -> int:
    """Load `path` under the options (JSON), read one text in small calls and in a large one, and compare. For
    a head they are what `check_head` gives."""
    asked = json.loads(given)
    of_target, *of_head = asked if isinstance(asked, list) else [asked]
    try:
        model = Weights(Path(path), _beside_others(of_target)).open(2 * max(_PARTS))
        size = model.vocabulary.size
        tokens = np.random.default_rng(1).integers(size // 8, size, max(_PARTS))
        text = tuple(int(token) for token in tokens)
        if of_head:
            small, large = _read_beside(model, text, *of_head)
        else:
            model.decode([Span(0, text[:1], 0, 1)])
            for size in (1, 1, 4, 4) if model.samples else ():  # the first of each size is made twice
                model.truncate(0, 0)
                model.decode([Span(0, text[:size], 0, size, top=2)])
            small, large = (_read(model, text, part) for part in _PARTS)
    except OutriderError:
        return 1
    if not (np.isfinite(small).all() and np.isfinite(large).all()):
        return 0  # rows that hold no number at all are a matter of the model
    return 0 if np.corrcoef(small.ravel(), large.ravel())[0, 1] >= _MIN_CORRELATION else WRONG


def _beside_others(given: dict[str, Any]) -> LoadOptions:
    """The options, with no more threads than cores that other programs leave: threads wait for each other
    after every operation, and for one that shares its core up to five times as long as all compute."""
    options = LoadOptions(**given)
    threads = options.threads or physical_cores()
    free = threads if threads == 1 else max(threads - round(look().cores()), 1)
    return replace(options, threads=free, threads_batch=free)


def _read(model: GgufModel, text: tuple[int, ...], part: int) -> Logits:
    model.truncate(0, 0)
    for start in range(0, len(text), part):
        [rows] = model.decode([Span(0, text[start : start + part], start, _COMPARED_ROWS)])
    return rows.copy()


def _read_beside(
    target: GgufModel, text: tuple[int, ...], options: dict[str, Any], layers: list[int], path: str, kind: Any
) -> tuple[Logits, Logits]:
    """A head's last rows after small calls, and after large ones; unlike rows where states are stale."""
    weights = HeadWeights(HeadFile(Path(path), kind, tuple(layers)), _beside_others(options))
    model, found = weights.open_beside(target, 2 * len(text)), []
    for part, start in zip(_PARTS, (0, len(text) - _COMPARED_ROWS), strict=True):
        model.truncate(0, 0)
        _read(target, text, part)
        if start:
            model.decode([Span(0, text[:start], 0, 0)])
        singles = [Span(0, text[i : i + 1], i, 1) for i in range(start, len(text))]
        found.append(np.array([_first_row(model, span) for span in singles][-_COMPARED_ROWS:]))
        if not start and _are_stale(target, len(layers) or 1):
            return np.eye(1, 2, dtype=np.float32), np.eye(1, 2, 1, dtype=np.float32)
    small, large = (np.where(np.isneginf(rows), 0, rows) for rows in found)  # of tokens that it never gives
    return small, large


def _first_row(model: GgufModel, span: Span) -> Row:
    rows: Any = model.decode([span])[0]
    return rows.row(0, span.tokens[-1], model.vocabulary.size) if isinstance(rows, Block) else rows[0].copy()


def _are_stale(target: GgufModel, num_parts: int) -> bool:
    """Whether a part of the states is the same after two calls: the library left what was there."""
    assert target.hidden is not None, "a head keeps them"
    calls = [[target.hidden.before(0, start + i + 1) for i in range(_PARTS[0])] for start in (0, _PARTS[0])]
    first, second = np.array(calls).reshape(2, _PARTS[0], num_parts, -1)
    return bool((first == second).all(axis=(0, 2)).any())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
