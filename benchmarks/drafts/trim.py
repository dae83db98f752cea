"""`outrider trim` on real models: time taken, step and agreement before and after, speed-up with and without
lookup, without counting answers (--seconds 0) and with.

    PYTHONPATH=src:benchmarks python benchmarks/drafts/trim.py --out benchmarks/drafts/trim.jsonl \
        --pair SMALL.gguf TARGET.gguf --pair SMALL.gguf TARGET.gguf [--seconds 60] [--backend ik]

Nothing else should run. A draft may be trimmed for itself: its agreement then says what tokens and types
cost.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Row, append, argument_parser, describe, run_program
from outrider.backends.gguf import LoadOptions
from outrider.lab.models import find_models
from outrider.lab.trim.report import Report
from outrider.lab.trim.trim import TrimRequest, trim
from outrider.models.hub import HubOptions


def main() -> None:
    """Trim every pair, and write a row for each."""
    parser = argument_parser(__doc__)
    parser.add_argument("--pair", nargs=2, type=Path, action="append", required=True, metavar="FILE")
    parser.add_argument("--seconds", type=float, nargs="+", default=[0.0, 60.0])
    parser.add_argument("--measuring", type=float, default=20.0, help="seconds of held-out answers (20)")
    parser.add_argument("--backend", default="auto")
    options = parser.parse_args()
    for small, target in options.pair:
        for seconds in options.seconds:
            report = _trim(small, target, seconds, options)
            row = _row(report) | {
                "kind": "trim",
                "counting_s": seconds,
                "backend": options.backend,
                "measuring_s": options.measuring,
            }
            append(options.out, describe(small, target) | row)
            print(_line(small, row), file=sys.stderr)


def _trim(small: Path, target: Path, seconds: float, options: Namespace) -> Report:
    draft, big = (find_models([str(path)], hub=HubOptions())[0] for path in (small, target))
    with TemporaryDirectory() as folder:
        asked = TrimRequest(
            draft,
            big,
            Path(folder) / "trimmed.gguf",
            seconds=seconds,
            measuring_seconds=options.measuring,
            options=LoadOptions(backend=options.backend),
        )
        return trim(asked)


def _row(report: Report) -> Row:
    whole = report.as_json()
    names = ("known_tokens", "source_tokens", "types", "sizes", "step_ratio", "agreement_ratio")
    row = {name: whole[name] for name in (*names, "counted", "verdict", "seconds", "file_bytes")}
    row["weight_ns"] = {kind: seconds * 1e9 for kind, seconds in whole["weight_s"].items()}
    for name in ("before", "after"):
        measured = dict(whole[name])
        judged = measured.pop("judged")
        row[name] = measured | {"step_of_target": judged["step_ratio"], "answers": judged["answers"]}
    return row


def _line(small: Path, row: Row) -> str:
    return (
        f"{small.stem}: {row['known_tokens']:,} tokens, step {row['step_ratio']:.2f}x, agreement "
        f"{row['agreement_ratio']:.3f}x, {row['seconds']:.0f} s"
    )


if __name__ == "__main__":
    run_program(main)
