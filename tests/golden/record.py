"""Golden outputs: what commands, server, replays and reports say, recorded and compared after every change.

    python tests/golden/record.py --check [NAME...]     # what differs; exit status 1 where anything does
    python tests/golden/record.py --update [NAME...]    # record again what is meant to have changed

What is recorded lies in `stored/NAME.json`. Times, numbers of this machine, paths, versions and dates are
replaced by their type (`normal.py`).
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from golden import api, commands, replays, surface
from golden.normal import difference, pretty

STORED = Path(__file__).parent / "stored"


@dataclass(frozen=True, slots=True)
class Golden:
    """How an output is made, and whether that takes more than a second or a real model."""

    make: Callable[[], Any]
    slow: bool = False


GOLDENS: Mapping[str, Golden] = {
    "surface_commands": Golden(surface.commands),
    "surface_settings": Golden(surface.settings),
    "surface_endpoints": Golden(surface.endpoints),
    "api": Golden(api.answers),
    "replay": Golden(replays.replays),
    "run": Golden(commands.runs, slow=True),
    "costs": Golden(commands.costs, slow=True),
    "plan": Golden(commands.plan),
    "check": Golden(commands.check, slow=True),
    "verify": Golden(commands.verify, slow=True),
    "bench": Golden(commands.bench, slow=True),
}


def compare(name: str) -> str:
    """What differs from what is stored; empty where nothing does."""
    file = STORED / f"{name}.json"
    if not file.exists():
        return f"{name}.json is not recorded: python tests/golden/record.py --update {name}"
    found = json.loads(pretty(GOLDENS[name].make()))
    return difference(name, json.loads(file.read_text(encoding="utf-8")), found)


def update(name: str) -> None:
    """Record an output again."""
    STORED.mkdir(exist_ok=True)
    (STORED / f"{name}.json").write_text(pretty(GOLDENS[name].make()), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="which; all where none is named")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true")
    action.add_argument("--update", action="store_true")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(GOLDENS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(GOLDENS)}")
    failed = []
    for name in arguments.names or GOLDENS:
        started = perf_counter()
        if arguments.update:
            update(name)
            said = "recorded"
        elif said := compare(name):
            failed.append(name)
        print(f"{name}: {said or 'equal'} ({perf_counter() - started:.1f} s)", flush=True)
    if failed:
        print(f"differ: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.exit(main())
