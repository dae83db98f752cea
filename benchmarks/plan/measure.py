"""What calls of models take on this machine: a row for each model file and library, by `outrider costs`.

A file whose row is there is passed over, so that an interrupted measurement goes on. Models are named by
file; "default" is the embedded one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Row, append, argument_parser, describe, resume, run_program
from outrider.lab.plan.catalogue import catalogue
from outrider.lab.plan.shapes import find_shape
from outrider.models.embedded import embedded_default
from outrider.models.gguf import read_card

BACKENDS = ("llama.cpp", "ik")


def measured(path: Path, backend: str, seconds: float) -> Row:
    command = [sys.executable, "-m", "outrider", "costs", "-m", str(path), "--backend", backend]
    command += ["--seconds", str(seconds), "--fresh", "--json"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    card = read_card(path)
    about = found["about"]["target"]
    return {
        "kind": "curve",
        "model": path.stem,
        "architecture": card.architecture,
        "quantization": card.quantization,
        "shape": asdict(find_shape(str(path), catalogue())) | {"hub": ""},
        "backend": backend,
        "build": about["build"],
        "settings": about["settings"],
        "costs": found["target"],
        "notices": found["notices"],
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--seconds", type=float, default=8.0, help="for each row")
    parser.add_argument("--minutes", type=float, default=5.0, help="begin no row after so many")
    options = parser.parse_args()
    end = time.monotonic() + options.minutes * 60
    rows = resume(options.out, describe(), ["cpu", "llama_cpp"])
    done = {(row["model"], row["backend"]) for row in rows}
    for path in [embedded_default() if name == "default" else Path(name) for name in options.models]:
        for backend in BACKENDS:
            if (path.stem, backend) not in done and time.monotonic() < end:
                append(options.out, measured(path, backend, options.seconds))


if __name__ == "__main__":
    run_program(main)
