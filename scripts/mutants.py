"""Put errors into the sources, one at a time, and see whether the tests notice.

    python scripts/mutants.py                    # all of scripts/mutants.toml
    python scripts/mutants.py engine "block:"    # those of a part, or whose id contains a text
    python scripts/mutants.py --list             # what there is, and whether it applies
    python scripts/mutants.py --out FILE.jsonl   # a row for each as well; what FILE holds already is skipped

Works on a copy of the tree. A mutant is caught when one of its test files fails; "survived" is a gap in the
tests, "does not apply" a row of mutants.toml to be corrected. Exit status 1 where either was found.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import NoReturn

import hypothesis
import llguidance  # noqa: F401 - loaded once for all tests, as the others
import numpy  # noqa: F401
import pydantic  # noqa: F401
import pytest

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("mutants.toml")
COPIED = ("src", "tests", "benchmarks", "docs", "scripts", "pyproject.toml", "README.md")
TIMEOUT_S = 120
PROFILE = "mutants"
"""hypothesis: the same examples each time; one that fails is enough"""
TEST_FAILED, NOTHING_WRONG = 1, 0


@dataclass(frozen=True, slots=True)
class Mutant:
    """An error: `old` is replaced by `new` in the one file of `part` that holds it."""

    id: str
    part: str
    old: str
    new: str
    tests: tuple[str, ...]

    def place(self, package: Path) -> tuple[Path | None, str]:
        """The file that holds the old text exactly once; or None, and why."""
        pattern = self.part if self.part.endswith(".py") else f"{self.part}/**/*.py"
        texts = {path: path.read_text(encoding="utf-8") for path in sorted(package.glob(pattern))}
        found = [path for path, text in texts.items() for _ in range(text.count(self.old))]
        if len(found) == 1:
            return found[0], ""
        if found:
            return None, f"its text occurs {len(found)} times: {', '.join(sorted({p.name for p in found}))}"
        first = self.old.strip().splitlines()[0]
        lines = [line.strip() for text in texts.values() for line in text.splitlines()]
        near = get_close_matches(first, lines, 1, 0.6)
        return None, f"its text is not in {pattern}" + (f"; the nearest line: {near[0]}" if near else "")


def read_mutants() -> list[Mutant]:
    """The kept list."""
    rows = tomllib.loads(LIST.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in rows]


class Tree:
    """A copy of the working tree, in which the tests run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            source, target = ROOT / name, folder / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
            else:
                shutil.copy(source, target)
        self._moment = 1_000_000_000

    @property
    def package(self) -> Path:
        return self.folder / "src" / "outrider"

    def write(self, path: Path, text: str) -> None:
        """Change a file; its time moves on each time, so that no stale bytecode is run."""
        path.write_text(text, encoding="utf-8")
        self._moment += 10
        os.utime(path, (self._moment, self._moment))

    def run(self, test: str) -> tuple[int, str]:
        """The exit status of pytest for a test file, and the line that says what failed.

        It runs in a fork of this process, which has loaded what takes long to load, but nothing of ours.
        """
        said = self.folder / "pytest.txt"
        child = os.fork()
        if child == 0:
            self._run_here(test, said)
        deadline = perf_counter() + TIMEOUT_S
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if perf_counter() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return TEST_FAILED, f"no end within {TIMEOUT_S} s"
            sleep(0.02)
        lines = said.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        return os.waitstatus_to_exitcode(ended[1]), (failed or lines)[-1][:160]

    def _run_here(self, test: str, said: Path) -> NoReturn:
        """Run a test file and end the process with pytest's status."""
        out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(self.folder)
        os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        os.environ["PYTHONPATH"] = os.pathsep.join(str(self.folder / name) for name in ("src", "tests"))
        sys.path[:1] = [str(self.folder / "src"), str(self.folder / "tests")]
        options = ["-x", "-q", "-m", "not slow", "--no-header", "--tb=no", "-p", "no:cacheprovider"]
        options += ["-p", "_hypothesis_pytestplugin", f"--hypothesis-profile={PROFILE}"]
        status = 3
        try:
            status = int(pytest.main([*options, f"tests/{test}.py"]))
        finally:
            sys.stdout.flush()
            os._exit(status)


def outcome_of(tree: Tree, mutant: Mutant) -> dict[str, object]:
    """What became of a mutant, as a row."""
    started = perf_counter()
    row: dict[str, object] = {"id": mutant.id, "part": mutant.part}
    path, why = mutant.place(tree.package)
    if path is None:
        return row | {"outcome": "does not apply", "why": why}
    text = path.read_text(encoding="utf-8")
    tree.write(path, text.replace(mutant.old, mutant.new))
    try:
        for test in mutant.tests:
            status, said = tree.run(test)
            if status != NOTHING_WRONG:
                found = "caught" if status == TEST_FAILED else "does not run"
                row |= {"outcome": found, "test": test, "said": said}
                break
        else:
            row["outcome"] = "survived"
    finally:
        tree.write(path, text)
    return row | {"seconds": round(perf_counter() - started, 1)}


def sound(tree: Tree, mutants: Sequence[Mutant]) -> Iterator[str]:
    """The test files that fail without any mutant: what they catch means nothing."""
    for test in sorted({test for mutant in mutants for test in mutant.tests}):
        status, said = tree.run(test)
        if status != NOTHING_WRONG:
            yield f"tests/{test}.py fails without a mutant: {said}"


def chosen(mutants: Sequence[Mutant], names: Sequence[str]) -> list[Mutant]:
    """Those of the named parts, or whose id contains one of the texts; all where none is named."""
    return [m for m in mutants if not names or any(name == m.part or name in m.id for name in names)]


def main() -> int:
    """Run what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="PART|TEXT")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument(
        "--unchecked", action="store_true", help="do not run the tests without a mutant first"
    )
    arguments = parser.parse_args()
    mutants = chosen(read_mutants(), arguments.names)
    if arguments.list:
        for mutant in mutants:
            _, why = mutant.place(ROOT / "src" / "outrider")
            print(f"{mutant.part:12} {mutant.id}{f'  DOES NOT APPLY: {why}' if why else ''}")
        print(f"{len(mutants)} mutants")
        return 0
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile(
        PROFILE, deadline=None, derandomize=True, database=None, phases=phases
    )
    done = _rows(arguments.out)
    counts = Counter(str(row["outcome"]) for row in done.values())
    with TemporaryDirectory(prefix="mutants-") as folder:
        tree = Tree(Path(folder))
        if not arguments.unchecked and (broken := list(sound(tree, mutants))):
            print("\n".join(broken))
            return 1
        for mutant in mutants:
            if mutant.id in done:
                continue
            row = outcome_of(tree, mutant)
            counts[str(row["outcome"])] += 1
            where = row.get("test") or row.get("why", "")
            print(
                f"{row['outcome']:14} {mutant.part:12} {mutant.id}  {where} {row.get('seconds', '')}",
                flush=True,
            )
            if arguments.out:
                with arguments.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    return int(counts.total() > counts["caught"])


def _rows(path: Path | None) -> dict[str, dict[str, object]]:
    """What an earlier run found, by id."""
    if path is None or not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["id"]: row for row in rows}


if __name__ == "__main__":
    sys.exit(main())
