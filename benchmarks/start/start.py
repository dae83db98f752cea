"""How long the embedded model takes to its first token from a cold cache, on an idle machine and on one where
another program computes; and how long until a draft with another tokenizer is refused. `--model` is that
draft's target."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Row, Spread, append, argument_parser, describe, in_turn, read_rows, run_program, table

OUTRIDER = (sys.executable, "-P", "-m", "outrider", "run", "-n", "8", "--temp", "0", "Name three rivers.")
CACHES = ("cold", "cold, model fetched", "warm")


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Meanwhile so many other programs compute."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def first_s(cache: Path) -> float:
    """Seconds from the start of the program to its first byte on standard output."""
    environment = os.environ | {"OUTRIDER_CACHE": str(cache)}
    start_s = time.perf_counter()
    with subprocess.Popen(
        OUTRIDER, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as program:
        assert program.stdout is not None
        assert program.stdout.read(1)
        took_s = time.perf_counter() - start_s
        program.communicate()
    return took_s


def refused_s(target: Path) -> float:
    """Seconds until the embedded model is refused as this one's draft."""
    start_s = time.perf_counter()
    done = subprocess.run([*OUTRIDER, "-m", str(target), "-md", "default"], capture_output=True, text=True)
    assert done.returncode == 2 and "draft tokenizer" in done.stderr, done.stderr
    return time.perf_counter() - start_s


def starts(cache: Path) -> Iterator[tuple[str, float]]:
    """By what the cache holds, from nothing on."""
    yield CACHES[0], first_s(cache)
    for file in cache.iterdir():
        if file.is_file():
            file.unlink()
    yield CACHES[1], first_s(cache)
    yield CACHES[2], first_s(cache)


def main() -> None:
    parser = argument_parser(__doc__, rounds=5, processes=1)
    parser.add_argument("--model", type=Path)
    options = parser.parse_args()
    append(
        options.out, describe(options.model) | {"load": os.getloadavg()[0], "processes": options.processes}
    )
    for _, processes in in_turn((0, options.processes), options.rounds, random.Random(0)):
        with busy(processes), tempfile.TemporaryDirectory() as folder:
            rows: list[Row] = [{"what": what, "s": took_s} for what, took_s in starts(Path(folder))]
            if options.model:
                rows.append({"what": "wrong draft refused", "s": refused_s(options.model)})
        append(options.out, *({"busy": processes, **row} for row in rows))
    found = read_rows(options.out)[1:]
    kinds = dict.fromkeys((row["what"], row["busy"]) for row in found)
    values = {kind: Spread.of(r["s"] for r in found if (r["what"], r["busy"]) == kind) for kind in kinds}
    lines = [
        (f"{what}, {n} other programs", value.text(".2f")) for (what, n), value in sorted(values.items())
    ]
    print("\n".join(table(("", "s"), lines)))


if __name__ == "__main__":
    run_program(main)
