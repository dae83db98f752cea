"""What all measurements share: options, the machine's record, rows that a stopped run goes on from, turns in
random order, and medians and ratios with their spread."""

from __future__ import annotations

import argparse
import fcntl
import json
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import numpy as np

from outrider import __version__
from outrider.backends.gguf.libraries import build_id
from outrider.backends.machine import physical_cores
from outrider.core.errors import OutriderError
from outrider.lab.certify.certificate import model_files
from outrider.lab.machine import machine

Row = dict[str, Any]
_Way = TypeVar("_Way")

_SHORT = {"threads": ["-t"], "context": ["-c"], "tokens": ["-n"]}
_HELP = {
    "tokens": "of an answer, at most",
    "rounds": "how often everything takes its turn",
    "every": "only every Nth recording",
}
_PAUSE_S = 0.05
"""between turns: the threads of the library that had the last one spin on for a moment"""
_RESAMPLES = 2000

# Options


def argument_parser(
    doc: str | None, *, prompts: bool = False, pair: bool = False, out: bool = True, **numbers: int
) -> argparse.ArgumentParser:
    """A parser with what most measurements take.

    Args:
        doc: The script's docstring, which is the help.
        prompts: Whether it takes files of prompts.
        pair: Whether it takes `--model` and `--draft`.
        out: Whether it writes rows to `--out`.
        numbers: Further options and their defaults: `threads=2` is `-t`, `--threads`.
    """
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=formatter)
    if prompts:
        parser.add_argument("prompts", nargs="+", help="FILE.jsonl, or FILE.jsonl:N for every Nth prompt")
    if out:
        parser.add_argument("--out", type=Path, required=True)
    if pair:
        parser.add_argument("--model", type=Path, help="GGUF file of the target (the embedded default)")
        parser.add_argument("--draft", type=Path, help="GGUF file of the draft model")
    for name, default in numbers.items():
        kind = int if name == "seed" else positive
        help_ = f"{_HELP.get(name, '')} ({default})".strip()
        parser.add_argument(*_SHORT.get(name, ()), f"--{name}", type=kind, default=default, help=help_)
    return parser


def positive(text: str) -> int:
    """A whole number of 1 or more."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is too few: give 1 or more")
    return number


def run_program(main: Callable[[], None]) -> None:
    """Run a measurement as a program: errors and Ctrl-C end it with one line."""
    try:
        main()
    except (OutriderError, OSError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("stopped: what is measured is kept, the same command goes on from there")


# Prompts


class Prompt(NamedTuple):
    """The first turn of a conversation, and what kind it is."""

    id: int
    category: str
    text: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation so far."""
        return [{"role": "user", "content": self.text}]


def load_prompts(sources: Sequence[str]) -> list[Prompt]:
    """First turns of JSON-lines files: all, or with `FILE.jsonl:5` every fifth."""
    found = []
    for source in sources:
        path, _, every = source.partition(":")
        for row in read_rows(Path(path))[:: int(every or 1)]:
            found.append(Prompt(row["id"], row["category"], row["turns"][0]))
    return found


# The machine


def describe(*models: Path | None) -> Row:
    """Machine, library build, commit and model hashes: the first row of a file of results."""
    files = [file for model in models if model for file in model_files(model)]
    return {
        "kind": "machine",
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": machine()["cpu"],
        "physical_cores": physical_cores(),
        "python": platform.python_version(),
        "outrider": __version__,
        "commit": _commit(),
        "llama_cpp": build_id(),
        "models": {file["name"]: file["sha256"] for file in files},
    }


def _commit() -> str:
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


# Rows


def resume(out: Path, head: Row, same: Sequence[str]) -> list[Row]:
    """The rows after the head that are there; starts the file with `head` where there is none.

    A line that was cut off in the middle is removed. Ends the program if the file's head differs in one
    of the `same` fields: then the rows were measured on something else.
    """
    if not out.exists() or not out.stat().st_size:
        out.write_text(json.dumps(head) + "\n", encoding="utf-8")
    whole, _, torn = out.read_text(encoding="utf-8").rpartition("\n")
    if torn:  # the run was killed while it wrote
        out.write_text(whole + "\n" if whole else json.dumps(head) + "\n", encoding="utf-8")
    first, *rows = read_rows(out)
    plain = json.loads(json.dumps(head))
    if wrong := [name for name in same if first.get(name) != plain[name]]:
        sys.exit(f"{out} was measured with other {', '.join(wrong)}: choose another --out")
    return rows


def read_rows(path: Path) -> list[Row]:
    """Every row, the head first. Ends the program, naming file and line, where that is impossible."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        sys.exit(f"{path} cannot be read: {error.strerror or error}")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            sys.exit(f"{path}, line {number} is no JSON ({error})")
        if not isinstance(row, dict):
            sys.exit(f"{path}, line {number} is no row of results")
        rows.append(row)
    if not rows:
        sys.exit(f"{path} is empty")
    return rows


def append(path: Path, *rows: Row) -> None:
    """Add rows, each whole. Floats are kept to seven decimals."""
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            rounded = json.loads(json.dumps(row), parse_float=lambda text: round(float(text), 7))
            file.write(json.dumps(rounded, separators=(",", ":")) + "\n")


# Turns


def in_turn(
    ways: Iterable[_Way], rounds: int, rng: random.Random, lock: Path | None = None
) -> Iterator[tuple[int, _Way]]:
    """Number of the round and way, round after round: in each all ways, in an order of its own, with a pause
    before each. `lock` is held while one has its turn."""
    ways = list(ways)
    for number in range(rounds):
        for way in rng.sample(ways, len(ways)):
            with turn(lock):
                time.sleep(_PAUSE_S)
                yield number, way


@contextmanager
def turn(lock: Path | None) -> Iterator[None]:
    """Hold `lock` meanwhile, as flock(1) does: other work can take turns with a measurement."""
    if lock is None:
        yield
        return
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    time.sleep(0.3)  # flock is not fair: whoever waits comes first


# Figures


class Spread(NamedTuple):
    """The median of some values, and between which they lie."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """That of these values, of which there is at least one."""
        found = list(values)
        return cls(median(found), min(found), max(found))

    def text(self, form: str = ".3f") -> str:
        """For people: 1.234 (1.200 to 1.300)."""
        return f"{self.median:{form}} ({self.low:{form}} to {self.high:{form}})"


def geometric_mean(ratios: Iterable[float]) -> float:
    """The mean of ratios."""
    return float(np.exp(np.mean(np.log(list(ratios)))))


def interval(ratios: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Where 95 % of the geometric means lie when the prompts are drawn again (the bootstrap)."""
    logs = np.log(np.asarray(ratios, dtype=np.float64))
    drawn = np.random.default_rng(seed).choice(logs, (_RESAMPLES, len(logs)))
    low, high = np.exp(np.quantile(drawn.mean(axis=1), [0.025, 0.975]))
    return float(low), float(high)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a Markdown table and an empty one; all columns but the first are numbers."""
    yield f"| {' | '.join(header)} |"
    yield "|---" + "|---:" * (len(header) - 1) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""
