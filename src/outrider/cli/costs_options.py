"""The options that `costs` has alone; it shares the others with `run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from outrider.cli.options import MACHINE, OUTPUT, option

MEASURING = "Measuring"

Seconds = Annotated[
    float | None,
    option(
        MEASURING,
        "--seconds",
        metavar="S",
        help="Time to measure each model for. Default: 20, and 60 for --tune.",
    ),
]
Fresh = Annotated[bool, option(MEASURING, "--fresh", help="Measure anew, whatever was measured before.")]
Tune = Annotated[
    bool,
    option(
        MEASURING,
        "--tune",
        help="Try the load options that change only the speed, and remember the best for `run`.",
    ),
]
CostsFile = Annotated[
    Path | None,
    option(OUTPUT, "--costs", metavar="FILE", help="Write the curves there; if it exists, show its curves."),
]
CostsJson = Annotated[
    bool, option(OUTPUT, "--json", help="One JSON object on standard output, and nothing else.")
]
Sequences = Annotated[
    int,
    option(
        MACHINE, "-np", "--parallel", metavar="N", help="Measure calls for up to N sequences at once too."
    ),
]
