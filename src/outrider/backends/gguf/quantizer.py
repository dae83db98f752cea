"""The library's own quantizer, in a child process: a file it cannot take becomes an error, not a crash."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import IO, Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from outrider.backends.gguf.libraries import find_quantizer
from outrider.backends.gguf.log import clear_log, last_error
from outrider.backends.machine import physical_cores
from outrider.core.errors import BackendCrash, BackendError, OutOfMemory, OutriderError, SettingError
from outrider.core.files import check_room, check_writable
from outrider.core.numbers import gigabytes
from outrider.models.gguf import ModelCard, read_card
from outrider.models.header import TensorInfo, read_header
from outrider.models.reference import local_shards

_ENDS = ("token_embd.weight", "output.weight")
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Quantized:
    """A file that was made. `tensor_types`: those of its matrices, by their share of the weights."""

    path: Path
    quantization: str
    source: Path
    source_quantization: str
    file_bytes: int
    source_bytes: int
    seconds: float
    tensor_types: dict[str, float]


def requantizing(source: Path) -> str | None:
    """What to know before a `source` is quantized whose weights are no floats any more. Raises
    ModelFileError."""
    card = read_card(source)
    if all(tensor.type_name in UNQUANTIZED for tensor in _matrices(source)):
        return None
    return (
        f"{card.path.name} is itself quantized ({card.quantization}): nothing that is made of it is better, "
        "and a lossy type loses a second time"
    )


def check_output(source: Path, output: Path, *, force: bool) -> None:
    """Raise SettingError where the file could not be put in its place in the end, or ModelFileError."""
    exists = output.exists()
    if exists and any(output.samefile(part) for part in local_shards(source)):
        raise SettingError(str(output), "it is the source itself", "Choose another type, or --out FOLDER.")
    if exists and not output.is_file() and not output.is_dir():
        raise SettingError(str(output), "it is not a file that could be replaced", "Name another one.")
    if exists and not force:
        raise SettingError(str(output), "it exists", "Give --force to replace it, or --out FOLDER.")
    check_writable(output, "model")


def quantize(
    source: Path,
    to: str,
    output: Path,
    *,
    threads: int = 0,
    ends: str | None = None,
    force: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Quantized:
    """Write the model `source`, in all its parts, to the one file `output` with weights of type `to`. `ends`
    is another type for the matrices at the ends: the embedding and the output. `output` appears when it is
    complete; with `force` it replaces what is there.

    Raises SettingError (type, place, room on the disk), ModelFileError (the source), BackendError (llama.cpp
    refuses), BackendCrash and OutOfMemory (its process dies)."""
    to, ends = read_type(to), ends and read_type(ends)
    if not 0 <= threads <= 512:
        raise SettingError("threads", f"{threads} cannot be used", "Give 1 to 512, or 0 for all cores.")
    card = read_card(source)
    check_output(card.path, output, force=force)
    find_quantizer()  # says what to install where there is none; the child finds the same one
    place = output.resolve()
    partial = place.with_name(f"{place.name}.{os.getpid()}.partial")
    request = {
        "source": str(card.path.resolve()),
        "output": str(partial),
        "ftype": LlamaFileType[f"ALL_{to}" if to == "F32" else f"MOSTLY_{to}"],
        "threads": threads or physical_cores(),
        "ends_type": _fitting(card.path, ends) if ends else None,
    }
    begun = time.perf_counter()
    try:
        _run(card, request, _least_bytes(card, to), progress or (lambda _part: None))
        made = read_card(partial)
        if (made.quantization, made.parameters) != (to, card.parameters):
            why = f"llama.cpp wrote {made.quantization} with {made.parameters:,} weights instead of {to}"
            raise BackendError(str(card.path), f"{why} with {card.parameters:,}", "Report this.")
        tensor_types = _shares(partial)
        partial.replace(place)
    finally:
        partial.unlink(missing_ok=True)
    return Quantized(
        output,
        to,
        card.path,
        card.quantization,
        made.file_bytes,
        card.file_bytes,
        time.perf_counter() - begun,
        tensor_types,
    )


def _shares(path: Path) -> dict[str, float]:
    weights = Counter[str]()
    for tensor in _matrices(path):
        weights[tensor.type_name] += tensor.num_parameters
    return {name: count / max(weights.total(), 1) for name, count in weights.most_common()}


def _fitting(source: Path, ends: str) -> GGMLQuantizationType:
    """The type of the matrices at the ends, or what replaces it where rows are no multiple of its blocks: the
    library looks after that only for types that it chose itself."""
    rows = [tensor.shape[0] for tensor in _tensors(source) if tensor.name in _ENDS]
    types = (_tensor_type(name) for name in (ends, "Q8_0", "F16"))
    return next(kind for kind in types if not any(row % GGML_QUANT_SIZES[kind][0] for row in rows))


def _matrices(path: Path) -> list[TensorInfo]:
    return [tensor for tensor in _tensors(path) if len(tensor.shape) > 1]


def _tensors(path: Path) -> list[TensorInfo]:
    return [tensor for part in local_shards(path) for tensor in read_header(part).tensors]


def _least_bytes(card: ModelCard, to: str) -> int:
    """About what a file of this type takes: a mixture of types takes a little more."""
    block, block_bytes = GGML_QUANT_SIZES[_tensor_type(to)]
    total = card.file_bytes
    for tensor in _matrices(card.path):
        total += tensor.num_parameters // block * block_bytes - (tensor.num_bytes or 0)
    return total


def _launch(command: Sequence[str], errors: IO[bytes]) -> subprocess.Popen[bytes]:
    # A session of its own: Ctrl-C reaches the parent alone, which ends the child and cleans up.
    nowhere = subprocess.DEVNULL
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=nowhere, stderr=errors, start_new_session=True
    )


def _run(
    card: ModelCard, request: dict[str, Any], expected_bytes: int, progress: Callable[[float], None]
) -> None:
    # -P: whatever lies in the working folder is not part of the program.
    command = [sys.executable, "-P", "-m", "outrider.backends.gguf.quantizer", json.dumps(request)]
    output = Path(request["output"])

    def no_room(why: str) -> SettingError:
        return SettingError("quantized file", why, "Free some space, or choose another folder (--out).")

    check_room(output.parent, expected_bytes, no_room)
    with tempfile.TemporaryFile() as errors, _launch(command, errors) as child:
        try:
            while child.poll() is None:
                progress(min(output.stat().st_size / expected_bytes, 0.99) if output.exists() else 0.0)
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_POLL_S)
        finally:
            child.kill()
            status = child.wait()
        if status:
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip().splitlines() or ["it does not say why"]
            raise _failure(card, output.parent, status, said)


def _failure(card: ModelCard, folder: Path, status: int, said: Sequence[str]) -> BackendError:
    """What a child has come to that said these lines: `main` the reason last, an assertion its own first."""
    kind: type[BackendError] = BackendError
    way_out = "Try another type, or download the file again."
    why = f"llama.cpp could not quantize it ({said[-1]})"
    if status == -signal.SIGKILL:
        kind, way_out = OutOfMemory, "End other programs, or do it on a larger machine."
        why = "the system ended llama.cpp while it quantized it, most likely because memory ran out"
    elif status < 0:
        kind = BackendCrash
        why = f"llama.cpp died while it quantized it ({signal.Signals(-status).name}): {said[0]}"
        way_out = "The file is damaged, or of a kind that this build cannot quantize: try another type."
    elif "iostream" in said[-1]:  # all that the library says when it cannot write any further
        free = shutil.disk_usage(folder).free
        why = f"{folder} took no more ({gigabytes(free)} are free): the file was not written"
        way_out = "Free some space, or choose another folder (--out)."
    return kind(str(card.path), why, way_out)


# The types that a model file's weights can be quantized to, as llama.cpp's users write them.

TYPES = (
    *("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0", "Q4_K_M", "Q4_K_S"),
    *("Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS", "Q3_K_L", "Q3_K_M", "Q3_K_S", "IQ3_M", "IQ3_S", "Q2_K"),
)
"""What can be made, the most precise first within each group."""

UNQUANTIZED = ("F64", "F32", "F16", "BF16", "I8", "I16", "I32", "I64")
"""Types of tensors that lost nothing to quantization."""

_USUAL_SIZE = {"Q5_K": "Q5_K_M", "Q4_K": "Q4_K_M", "Q3_K": "Q3_K_M"}


def read_type(name: str) -> str:
    """The type as `TYPES` has it, in whatever case it is written. Raises SettingError."""
    wanted = name.strip().upper()
    wanted = _USUAL_SIZE.get(wanted, wanted)
    if wanted not in TYPES:
        way_out = f"Choose among {', '.join(TYPES)}; llama-quantize --imatrix makes others."
        raise SettingError(name or "''", "it is not a type to quantize to", way_out)
    return wanted


def _tensor_type(name: str) -> GGMLQuantizationType:
    usual = "IQ3_S" if name == "IQ3_M" else re.sub(r"_K_[SML]$", "_K", name)
    return GGMLQuantizationType[usual]


# A program that lets a native library quantize one file: what `quantizer` runs in a child process.


def main(request: str) -> int:
    """Quantize as the request says; where that fails, the reason is the last line on standard error."""
    asked = json.loads(request)
    Thread(target=_end_with_parent, args=(Path(asked["output"]),), daemon=True).start()
    try:
        library, params = find_quantizer()
    except OutriderError as failure:
        print(failure, file=sys.stderr)
        return 1
    params.ftype, params.nthread, params.allow_requantize = asked["ftype"], asked["threads"], True
    if asked["ends_type"] is not None:
        params.output_tensor_type = params.token_embedding_type = asked["ends_type"]
    paths = os.fsencode(asked["source"]), os.fsencode(asked["output"])
    clear_log()
    if library.functions.llama_model_quantize(*paths, ctypes.byref(params)) == 0:
        return 0
    print(last_error("it does not say why").removeprefix("failed to quantize: "), file=sys.stderr)
    return 1


def _end_with_parent(output: Path) -> None:
    os.read(0, 1)
    output.unlink(missing_ok=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
