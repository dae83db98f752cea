"""What each constant of the policy changes: replayed seconds with it halved and doubled.

    python benchmarks/policy/constants.py RECORDINGS.jsonl… --costs costs.json… [--every N] --out rows.jsonl

Every number that a module of `outrider.policy` assigns to a name in capitals is tried, one at a time, in a
process of its own that compiles the module with the other value, so what is derived from it changes too. Of a
weight of older data (…_MEMORY, …_DECAY) the distance to 1 is halved and doubled, a probability goes at most
half of the way to 1; tables are left. Policies start cold at each recording; with `--warm` each starts with
what the last one learned, as it is stored. A row: the constant, the factor, and for each curve the geometric
mean of the seconds over those of the policy as it is.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from multiprocessing import get_context
from pathlib import Path
from types import CodeType
from typing import Any

POLICY = Path(__file__).parents[2] / "src" / "outrider" / "policy"
FACTORS = (0.5, 2.0)
READ_S = (0.009, 0.0033)
"""a token of the prompt for target and draft, where a curve has none"""

sys.path.insert(0, str(Path(__file__).parents[1]))


def assignments(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Names in capitals that the module assigns a number to."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            [target] = node.targets
            targets = target.elts if isinstance(target, ast.Tuple) else [target]
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            for name, value in zip(targets, values, strict=False):
                is_number = isinstance(value, ast.Constant) and isinstance(value.value, int | float)
                if is_number and isinstance(name, ast.Name) and name.id.isupper():
                    yield name.id, value


def changed(name: str, value: float, factor: float) -> float:
    """The other value of a constant; whole numbers stay whole."""
    if name.endswith(("_MEMORY", "_DECAY")):
        return 1 - (1 - value) * factor
    if isinstance(value, int):
        return max(round(value * factor), 1)
    return min(value * factor, (1 + value) / 2) if value < 1 else value * factor


class Changing(SourceFileLoader):
    """Loads a module with one of its constants changed."""

    constant, factor = "", 1.0

    def get_code(self, fullname: str) -> CodeType:
        del fullname
        tree = ast.parse(Path(self.path).read_text(encoding="utf-8"))
        for name, value in assignments(tree):
            if name == self.constant:
                value.value = changed(name, value.value, self.factor)
        return compile(tree, self.path, "exec")


class Finder(PathFinder):
    """Finds the module that is to be changed before Python does."""

    module = ""

    @classmethod
    def find_spec(cls, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        del path, target
        if fullname != f"outrider.policy.{cls.module}":
            return None
        file = POLICY / f"{cls.module}.py"
        return spec_from_file_location(fullname, file, loader=Changing(fullname, str(file)))


def seconds(
    recordings: list[Path],
    costs: list[Path],
    every: int,
    warm: bool,
    change: tuple[str, str, float] | None,
) -> list[list[float]]:
    """For each curve, the seconds of each recording; `change` is a module, its constant and a factor."""
    if change is not None:
        Finder.module, Changing.constant, Changing.factor = change
        sys.meta_path.insert(0, Finder)
    from outrider.costs import CallCosts
    from outrider.lab.recording import read_recordings
    from outrider.lab.replay import replay
    from outrider.policy import AutoPolicy
    from policy.curves import read_costs

    found = [r for path in recordings for r in read_recordings(path)[::every] if r.tokens]
    result = []
    for path in costs:
        pair = read_costs(path)
        curves = []
        for curve, read_s in zip((pair.target, pair.draft), READ_S, strict=True):
            data = curve.as_json() if curve is not None else {}
            curves.append({**data, "prefill_token_s": data.get("prefill_token_s") or read_s})
        true = [CallCosts.from_json(curve) for curve in curves]
        times: list[float] = []
        learned = None
        for recording in found:
            target, draft = (CallCosts.from_json(curve) for curve in curves)
            policy = AutoPolicy(target, {"draft": draft}, prior=learned)
            times.append(replay(recording, policy, true[0], {"draft": true[1]}).seconds)
            learned = policy.state.as_json() if warm else None
        result.append(times)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recordings", nargs="+", type=Path)
    parser.add_argument("--costs", nargs="+", type=Path, required=True)
    parser.add_argument("--every", type=int, default=1, help="of the recordings only every Nth")
    parser.add_argument("--warm", action="store_true", help="go on learning from recording to recording")
    parser.add_argument("--out", type=Path, required=True, help="rows, one for each constant and factor")
    arguments = parser.parse_args()
    what = (arguments.recordings, arguments.costs, arguments.every, arguments.warm)
    constants = [
        (file.stem, name, value.value)
        for file in sorted(POLICY.glob("*.py"))
        for name, value in assignments(ast.parse(file.read_text(encoding="utf-8")))
    ]
    with get_context("fork").Pool(1, maxtasksperchild=1) as pool, arguments.out.open("w") as out:
        before = pool.apply(seconds, (*what, None))
        for module, name, value in constants:
            for factor in FACTORS:
                row = {"module": module, "constant": name, "value": value, "factor": factor}
                try:
                    after = pool.apply(seconds, (*what, (module, name, factor)))
                except Exception as error:
                    print(json.dumps(row | {"failed": repr(error)}), file=out, flush=True)
                    continue
                ratios = {
                    path.stem: _ratio(*times) for path, *times in zip(what[1], after, before, strict=True)
                }
                print(json.dumps(row | {"ratios": ratios}), file=out, flush=True)
                print(f"{module}.{name} x {factor}:", *(f"{100 * (r - 1):+.2f}%" for r in ratios.values()))


def _ratio(after: list[float], before: list[float]) -> float:
    logs = [math.log(a / b) for a, b in zip(after, before, strict=True)]
    return round(math.exp(sum(logs) / len(logs)), 5)


if __name__ == "__main__":
    main()
