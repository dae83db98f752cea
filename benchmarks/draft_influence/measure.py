"""Does a draft change the answer? Tuned drafts under the exact rules and under lenience.

    python benchmarks/draft_influence/measure.py --drafts neutral=A.gguf styled=B.gguf … --out ROWS.jsonl

One row for each part and draft, appended as it is done: a run that was stopped goes on with the next one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from draft_influence import parts
from draft_influence.positions import positions, texts_of
from draft_influence.subjects import Candidate, Sizes, Tokens, encoded, opened_draft, opened_target
from harness import argument_parser, describe, resume, run_program
from outrider.core.contracts import Model
from outrider.core.errors import OutriderError
from outrider.lab.certify.plan import BUILT_IN

PARTS = ("greedy", "certificate", "positions", "sampled", "first tokens")
QUICK = Sizes(
    prompts=2, tokens=8, seeds=1, short_prompts=1, samples=30, certificate_samples=30, lengths=(2, 4),
    leniences=(0.2,), draws=200,
)  # fmt: skip
_CONTEXT = 512


def main() -> None:
    parser = argument_parser(__doc__, threads=2)
    parser.add_argument("--target", type=Path, help="GGUF file (the embedded default)")
    parser.add_argument("--drafts", nargs="+", required=True, metavar="NAME=FILE")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="very little of each: to see that it runs")
    for name, value in asdict(Sizes()).items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, tuple):
            parser.add_argument(flag, type=type(value[0]), nargs="+", default=value)
        else:
            parser.add_argument(flag, type=type(value), default=value)
    arguments = parser.parse_args()
    given = {name: getattr(arguments, name) for name in asdict(Sizes())}
    sizes = QUICK if arguments.quick else Sizes(**{n: _frozen(value) for n, value in given.items()})
    drafts = dict(_named(draft) for draft in arguments.drafts)
    try:
        run(arguments.target, drafts, arguments.out, sizes, arguments.parts, arguments.threads)
    except OutriderError as error:
        sys.exit(f"{error}")


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _named(draft: str) -> tuple[str, Path]:
    name, separator, file = draft.partition("=")
    if not separator or not file:
        sys.exit(f"--drafts {draft}: give NAME=FILE")
    return name, Path(file)


def run(
    target: Path | None,
    drafts: dict[str, Path],
    out: Path,
    sizes: Sizes,
    wanted: Sequence[str] = PARTS,
    threads: int = 2,
) -> None:
    """Measure the parts that `out` lacks."""
    with ExitStack() as stack:
        pair, model = stack.enter_context(opened_target(target, _CONTEXT, threads))
        files = [pair.target_card.path, *drafts.values()]
        head = describe(*files) | {"threads": threads, "sizes": asdict(sizes), "names": [*drafts]}
        head["files"] = {name: path.name for name, path in drafts.items()}
        done = resume(out, head, ("cpu", "models", "threads", "sizes", "names"))
        candidates = [
            stack.enter_context(opened_draft(name, path, pair, _CONTEXT, threads))
            for name, path in drafts.items()
        ]
        prompts = encoded(pair, BUILT_IN[: sizes.prompts])
        measure(model, candidates, prompts, sizes, _Rows(out, done), wanted)


class _Rows:
    """The file of results, and what of it is there."""

    def __init__(self, out: Path, done: Sequence[dict[str, Any]]) -> None:
        self._out = out
        self._done = {(row["part"], row["draft"]) for row in done}

    def add(self, part: str, draft: str, cells: Callable[[], Iterable[parts.Cell]]) -> None:
        """Work out a row unless it is there."""
        if (part, draft) in self._done:
            return
        started = perf_counter()
        row: dict[str, Any] = {"kind": "part", "part": part, "draft": draft, "cells": [*cells()]}
        row["seconds"] = perf_counter() - started
        print(f"{part}, {draft}: {row['seconds']:.1f} s", file=sys.stderr)
        # Six digits of each number, however small: 1e-16 is a finding.
        rounded = json.loads(json.dumps(row), parse_float=lambda text: float(f"{float(text):.6g}"))
        with self._out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(rounded, separators=(",", ":")) + "\n")


def measure(
    target: Model,
    candidates: Sequence[Candidate],
    prompts: Sequence[Tokens],
    sizes: Sizes,
    rows: _Rows,
    wanted: Sequence[str],
) -> None:
    plain = parts.plain_greedy(target, prompts, sizes) if "greedy" in wanted else []
    said = texts_of(target, prompts, sizes) if "positions" in wanted else []
    for candidate in candidates:
        beside = (target, candidate, prompts)
        runs: dict[str, Callable[[], Iterable[parts.Cell]]] = {
            "greedy": partial(parts.greedy, *beside, plain, sizes),
            "certificate": partial(parts.certificate, *beside, sizes),
            "positions": partial(positions, *beside, said, sizes),
            "sampled": partial(parts.sampled, *beside, sizes),
        }
        for part in (part for part in runs if part in wanted):
            rows.add(part, candidate.name, runs[part])
    if "sampled" in wanted:
        rows.add("sampled", "none", partial(parts.sampled, target, None, prompts, sizes))
    if "first tokens" in wanted:
        short = prompts[: sizes.short_prompts]
        rows.add("first tokens", "all", partial(parts.first_tokens, target, candidates, short, sizes))


if __name__ == "__main__":
    run_program(main)
