"""A program that lets a native library quantize one file: what `quantizer` runs in a child process.

    python -m outrider.backends.gguf.quantize_call '{"source": "a.gguf", "output": "b.gguf", …}'

It writes JSON objects to standard output, one a line: {"bytes": size of the weights to be written}, then
{"part": share that is done} and, where it fails, {"error": reason}. Exit status 0 when all is well, 1 when
the library refuses. It ends, and removes what it wrote, when its standard input is closed: no work goes on
after a parent that was killed.
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

from outrider.backends.gguf.libraries import find_quantizer
from outrider.backends.gguf.log import LOG_CALLBACK
from outrider.core.errors import OutriderError

_TENSOR = re.compile(r"\[\s*(\d+)/\s*(\d+)\]")
_SIZE = re.compile(r"quant size\s*=\s*([\d.]+) Mi?B")
_FUNCTION = re.compile(r"^\w+: (?:failed to quantize: )?")
_ERROR_LEVEL = 4


def main(request: str) -> int:
    """Quantize as the request says, and report."""
    asked = json.loads(request)
    report = _reporter()
    Thread(target=_end_with_parent, args=(Path(asked["output"]),), daemon=True).start()
    try:
        library, params = find_quantizer()
    except OutriderError as error:
        report({"error": str(error)})
        return 1
    log = _Log(report)
    library.functions.llama_log_set(log.callback, None)
    params.ftype, params.nthread = asked["ftype"], asked["threads"]
    params.pure, params.quantize_output_tensor = asked["pure"], not asked["keep_output"]
    if asked["ends_type"] is not None:
        params.output_tensor_type = params.token_embedding_type = asked["ends_type"]
    params.allow_requantize = True
    for dry_run in (True, False):
        params.dry_run = log.dry_run = dry_run
        if not library.quantize(Path(asked["source"]), Path(asked["output"]), params):
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


class _Log:
    """Reads the library's log, the only place that shows its progress and why it fails."""

    def __init__(self, report: Callable[[dict[str, Any]], None]) -> None:
        self.dry_run = True
        self.error = "it does not say why"
        self._report = report
        self.callback = LOG_CALLBACK(self._on_line)

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
