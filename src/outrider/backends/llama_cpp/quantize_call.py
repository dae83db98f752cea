"""A program that lets llama.cpp quantize one file: what `quantizer` runs in a child process.

    python -m outrider.backends.llama_cpp.quantize_call '{"source": "a.gguf", "output": "b.gguf", …}'

It writes JSON objects to standard output, one a line: {"bytes": size of the weights to be written}, then
{"part": share that is done} and, where it fails, {"error": reason}. Exit status 0 when all is well, 1 when
the library refuses. It ends, and removes what it wrote, when its standard input is closed: a parent that
was killed leaves no work behind.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

from outrider.backends.llama_cpp.library import lib

_TENSOR = re.compile(r"\[\s*(\d+)/\s*(\d+)\]")
_SIZE = re.compile(r"quant size\s*=\s*([\d.]+) MiB")
_FUNCTION = re.compile(r"^\w+: (?:failed to quantize: )?")
_ERROR_LEVEL = 4

_DEFAULTS = {
    "nthread": 0,
    "ftype": lib.LLAMA_FTYPE_MOSTLY_Q8_0,
    "output_tensor_type": lib.GGML_TYPE_COUNT,
    "token_embedding_type": lib.GGML_TYPE_COUNT,
    "allow_requantize": False,
    "quantize_output_tensor": True,
    "only_copy": False,
    "pure": False,
    "keep_split": False,
    "dry_run": False,
    "max_buf_size": 8 * 2**30,
}
"""What the library sets by itself. Were its structure laid out in another way than the bindings say, these
would not stand where they are looked for."""


def main(request: str) -> int:
    """Quantize as the request says, and report."""
    asked = json.loads(request)
    report = _reporter()
    Thread(target=_end_with_parent, args=(Path(asked["output"]),), daemon=True).start()
    params = lib.llama_model_quantize_default_params()
    if _is_foreign(params):
        report({"error": "its parameters are laid out in another way than llama-cpp-python says"})
        return 1
    log = _Log(report)
    params.ftype, params.nthread = asked["ftype"], asked["threads"]
    params.pure, params.quantize_output_tensor = asked["pure"], not asked["keep_output"]
    params.output_tensor_type = params.token_embedding_type = asked["ends_type"]
    params.allow_requantize = True
    for dry_run in (True, False):
        params.dry_run = log.dry_run = dry_run
        names = (os.fsencode(asked["source"]), os.fsencode(asked["output"]))
        if lib.llama_model_quantize(*names, ctypes.byref(params)) != 0:
            report({"error": log.error})
            return 1
    return 0


def _reporter() -> Callable[[dict[str, Any]], None]:
    """Writes an event to what was standard output; whatever the library itself prints goes nowhere."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)

    def report(event: dict[str, Any]) -> None:
        events.write(json.dumps(event) + "\n")
        events.flush()

    return report


def _end_with_parent(output: Path) -> None:
    os.read(0, 1)
    output.unlink(missing_ok=True)
    os._exit(1)


def _is_foreign(params: Any) -> bool:
    pointers = ("imatrix", "kv_overrides", "tt_overrides", "prune_layers")
    return any(getattr(params, name) != value for name, value in _DEFAULTS.items()) or any(
        getattr(params, name) for name in pointers
    )


class _Log:
    """Reads the library's log, the only way in which it tells how far it is and why it fails."""

    def __init__(self, report: Callable[[dict[str, Any]], None]) -> None:
        self.dry_run = True
        self.error = "it does not say why"
        self._report = report
        # The library keeps the pointer.
        self._callback = lib.llama_log_callback(self._on_line)
        lib.llama_log_set(self._callback, ctypes.c_void_p(0))

    def _on_line(self, level: int, text: bytes, _user_data: ctypes.c_void_p) -> None:
        line = text.decode("utf-8", errors="replace").strip()
        if level == _ERROR_LEVEL and line:
            self.error = _FUNCTION.sub("", line)
        elif self.dry_run and (size := _SIZE.search(line)):
            self._report({"bytes": int(float(size[1]) * 2**20)})
        elif not self.dry_run and (tensor := _TENSOR.match(line)):
            self._report({"part": (int(tensor[1]) - 1) / int(tensor[2])})


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
