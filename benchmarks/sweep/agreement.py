"""Does `outrider check` say what the sweep measured?

    python benchmarks/sweep/agreement.py RUN CHECK.json…

For every pair that both know, a line each about lookup alone, the automatic choice with the draft over
lookup alone, and llama.cpp's default: what check expected, what the sweep measured over all its workloads,
and whether they agree where the measured effect is beyond the noise of plain decoding against itself. Exit
status 1 when one of these does not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from outrider.lab.bench.results import Cell, Results
from outrider.lab.bench.summary.speeds import noise, outcome, paired
from outrider.lab.statistics import Interval, estimate


class Line(NamedTuple):
    what: str
    expected: str
    says: str
    """"faster", "slower" or "tie", as check has it"""
    measured: Interval
    outcome: str

    @property
    def agrees(self) -> bool | None:
        """None: the measured effect is within the noise."""
        return None if self.outcome == "tie" else self.says == self.outcome


def main() -> None:
    run, *checks = map(Path, sys.argv[1:])
    results = Results.read(run)
    lines = [line for path in checks for line in compared(results, json.loads(path.read_text()))]
    print("| pair | check expects | check says | measured | sweep says | agree |")
    print("|---|---:|---|---:|---|---|")
    for line in lines:
        value = line.measured
        shown = f"{value.value:.2f}x ({value.low:.2f} to {value.high:.2f})"
        agree = {None: "within the noise", True: "yes", False: "**no**"}[line.agrees]
        print(f"| {line.what} | {line.expected} | {line.says} | {shown} | {line.outcome} | {agree} |")
    decided = [line for line in lines if line.agrees is not None]
    print(f"\n{sum(bool(line.agrees) for line in decided)} of {len(decided)} beyond the noise agree")
    sys.exit(any(line.agrees is False for line in decided))


def compared(results: Results, check: dict[str, Any]) -> Iterator[Line]:
    """The lines of one check."""
    target = next(m.model for m in results.models if m.model == Path(check["target"]["path"]).stem)
    plain = Cell.plain_of(target, None)
    alone = Cell(target, None, "auto lookup", None)
    if check["lookup"]:
        yield from line(results, f"{target}, lookup alone", check["lookup"]["speedups"]["auto"], alone, plain)
    for draft in check["drafts"]:
        name = Path(draft["model"]["path"]).stem
        if draft["speedups"] is None:
            continue
        pair = f"{name} for {target}"
        automatic = Cell(target, name, "auto", None)
        yield from line(results, f"{pair}, added to lookup", draft["over_lookup"], automatic, alone)
        default = Cell(target, name, "model 3", None)
        predicted = draft["speedups"]["llama_cpp_default"]
        yield from line(results, f"{pair}, llama.cpp's default", predicted, default, plain)


def line(
    results: Results, what: str, predicted: dict[str, float], cell: Cell, reference: Cell
) -> Iterator[Line]:
    strata = paired(results, cell, reference)
    if strata is None:
        return
    measured = estimate(strata).interval
    says = "faster" if predicted["value"] >= 1.02 else "slower" if predicted["value"] < 0.98 else "tie"
    expected = f"{predicted['value']:.2f}x"
    yield Line(what, expected, says, measured, outcome(measured, noise(results, cell.target, None)))


if __name__ == "__main__":
    main()
