"""How wrong the cost model is: against curves that were measured here, and against published rows.

Of the curves two constants are fitted for each library and quantization, bandwidth and operations, on the
models of FITTED; the others are predicted. Writes the tables to standard output, and to --out the summary
that `outrider plan` shows.
"""

from __future__ import annotations

import json
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from harness import argument_parser, read_rows, run_program, table
from outrider.lab.plan.calls import Machine, PlannedCurve, call_bytes, machine_of
from outrider.lab.plan.catalogue import Catalogue, Device, catalogue
from outrider.lab.plan.shapes import HEADS, ModelShape, find_shape, head_of

HERE = Path(__file__).parent
FITTED = ("SmolLM2", "qwen2.5-coder-0.5b")
"""models whose curves the constants are fitted to"""
MAX_SPREAD = 0.1
"""A measured call whose median is less sure than that is left out."""
CONTEXT = 512
"""tokens that a sequence is taken to have in the middle of a published run"""

Points = Sequence[tuple[int, float]]


class Error(NamedTuple):
    what: str
    predicted: float
    found: float

    @property
    def ratio(self) -> float:
        return abs(self.predicted / self.found - 1)


# Curves measured here


class Measured(NamedTuple):
    model: str
    shape: ModelShape
    points: Points


def curves() -> dict[tuple[str, str], list[Measured]]:
    found = defaultdict(list)
    for row in read_rows(HERE / "curves.jsonl")[1:]:
        calls = [call for call in row["costs"]["calls"] if call["spread_ratio"] < MAX_SPREAD]
        points = [(call["tokens"], call["seconds"]) for call in calls if not call["context_tokens"]]
        quantization = row["quantization"]
        found[row["backend"], quantization].append(Measured(row["model"], ModelShape(**row["shape"]), points))
    return dict(found)


def fitted(models: Sequence[Measured], usual: Device) -> tuple[float, float]:
    """Bytes and operations a second with the least mean error, of the logarithm; models count the same."""
    bandwidths = np.geomspace(5e9, 2e11, 90)[:, None, None]
    speeds = np.geomspace(2e10, 2e12, 110)[None, :, None]
    calls = [(m.shape, n, s, 1 / len(m.points)) for m in models for n, s in m.points]
    moved = np.array([call_bytes(shape, n) for shape, n, _, _ in calls])
    computed = np.array([2.0 * n * shape.active_parameters for shape, n, _, _ in calls])
    fixed = np.array([s.layers * (usual.layer_s + n * usual.layer_token_s) for s, n, _, _ in calls])
    seconds, weights = (np.array([call[i] for call in calls]) for i in (2, 3))
    p = usual.overlap
    predicted = ((moved / bandwidths) ** p + (computed / speeds) ** p) ** (1 / p) + usual.call_s + fixed
    errors = (np.abs(np.log(predicted / seconds)) * weights).sum(-1)
    best = np.unravel_index(int(errors.argmin()), errors.shape)
    return float(bandwidths[best[0], 0, 0]), float(speeds[0, best[1], 0])


def curve_errors() -> Iterator[tuple[tuple[str, str], str, float, float, list[Error], list[Error]]]:
    """Library and type, the model that is predicted, both constants, errors of V(n) and of V(n)/V(1)."""
    usual = catalogue().device("laptop-ddr5")
    for key, models in sorted(curves().items()):
        own = [m for m in models if m.model.startswith(FITTED)]
        if not own:
            continue
        bandwidth, speed = fitted(own, usual)
        device = usual.model_copy(
            update={
                "memory_gb_s": bandwidth / 1e9,
                "bandwidth_ratio": 1.0,
                "tera_operations_s": {"f16": speed / 1e12},
                "operations_ratio": 1.0,
            }
        )
        for model in models:
            if model in own:
                continue
            curve = PlannedCurve(model.shape, (Machine(device),))
            name = f"{key[0]}, {model.model}"
            absolute = [Error(f"{name}, {n}", curve.call_s(n), s) for n, s in model.points]
            one = dict(model.points)[1]
            shape = [
                Error(f"{name}, {n}", curve.call_s(n) / curve.call_s(1), s / one)
                for n, s in model.points
                if n > 1
            ]
            yield key, model.model, bandwidth, speed, absolute, shape


# Published rows


def predicted(row: Mapping[str, Any], known: Catalogue) -> float:
    """The row's tokens per second, or its speed-up."""
    machine, target = machine_of(row["on"], known), find_shape(row["target"], known)
    curve = PlannedCurve(target, (machine,), is_target=True)
    plain_s = curve.call_s(1, context=CONTEXT)
    if "tokens_per_s" in row:
        return 1 / plain_s
    step_s = curve.call_s(row["verified"], context=CONTEXT)
    if draft := row.get("draft"):
        shape = head_of(target, draft) if draft in HEADS else find_shape(draft, known)
        call_s = PlannedCurve(shape, (machine,)).call_s(row.get("draft_tokens", 1), context=CONTEXT)
        step_s += row["draft_steps"] * call_s
    return float(row["tokens_per_call"] * plain_s / step_s)


def with_eager(layer_s: float, call_s: float) -> Catalogue:
    """What is known, with these times of plain PyTorch."""
    known = catalogue(HERE / "machines.toml")
    own = {
        name: {**entry, "layer_s": layer_s, "call_s": call_s, "step_s": 0.0}
        for name, entry in known.tables["hardware"].items()
        if name.endswith("-eager")
    }
    return Catalogue({**known.tables, "hardware": {**known.tables["hardware"], **own}})


def eager(rows: Sequence[Mapping[str, Any]]) -> Catalogue:
    """Plain PyTorch's times for a layer and a call that fit the fitting rows best."""
    mine = [row for row in rows if row["use"] == "fit" and row["on"].endswith("-eager")]
    tried = [(x, y) for x in np.geomspace(5e-5, 2e-3, 25) for y in np.geomspace(1e-5, 5e-3, 25)]

    def error(pair: tuple[float, float]) -> float:
        known = with_eager(*pair)
        return float(sum(abs(np.log(predicted(row, known) / row["speedup"])) for row in mine))

    best = min(tried, key=error)
    print(f"plain PyTorch: {best[0] * 1e6:.0f} us a layer, {best[1] * 1e6:.0f} us a call\n")
    return with_eager(*best)


def published() -> list[tuple[Mapping[str, Any], Error]]:
    rows = tomllib.loads((HERE / "published.toml").read_text(encoding="utf-8"))["rows"]
    known = eager(rows)
    return [(row, Error(name_of(row), predicted(row, known), value_of(row))) for row in rows]


def value_of(row: Mapping[str, Any]) -> float:
    return float(row.get("speedup") or row["tokens_per_s"])


def name_of(row: Mapping[str, Any]) -> str:
    drafts = f" {row.get('method') or row['draft']}, {row['verified']} checked" if "verified" in row else ""
    return f"{row['source']}: {row['target']} on {row['on']}{drafts or ', plain tokens/s'}"


# What is said of it


def summary_of(errors: Sequence[Error]) -> dict[str, float]:
    ratios = [error.ratio for error in errors]
    return {"median": round(median(ratios), 4), "most": round(float(np.quantile(ratios, 0.9)), 4)}


def summaries(
    absolute: Sequence[Error], relative: Sequence[Error], rows: Sequence[tuple[Mapping[str, Any], Error]]
) -> dict[str, dict[str, float]]:
    """Of calls, of their ratios to a call of one token, and of the published speed-ups that are checked."""
    speedups = [error for row, error in rows if row["use"] == "check" and "speedup" in row]
    parts = {"calls": absolute, "call_ratios": relative, "speedups": speedups}
    return {name: {"rows": len(errors), **summary_of(errors)} for name, errors in parts.items()}


def main() -> None:
    options = argument_parser(__doc__).parse_args()
    absolute, relative, lines = [], [], []
    for key, model, bandwidth, speed, errors, shapes in curve_errors():
        absolute += errors
        relative += shapes
        percents = (f"{100 * summary_of(found)['median']:.0f} %" for found in (errors, shapes))
        lines.append((*key, model, f"{bandwidth / 1e9:.0f}", f"{speed / 1e9:.0f}", *percents))
    print("\n".join(table(("library", "type", "model", "GB/s", "GOPS", "V(n)", "V(n)/V(1)"), lines)), "\n")
    rows = published()
    print("\n".join(table(("row", "use", "published", "predicted", "error"), [
        (error.what, row["use"], f"{error.found:.2f}", f"{error.predicted:.2f}", f"{100 * error.ratio:.0f} %")
        for row, error in rows
    ])))  # fmt: skip
    found = summaries(absolute, relative, rows)
    print("\n" + json.dumps(found, indent=1))
    head = (
        "# How wrong the cost model was where it was checked, written by benchmarks/plan/check.py: relative\n"
    )
    head += (
        "# errors of calls on a processor, of these over a call of one token, and of published speed-ups.\n"
    )
    lines_ = [
        f"\n[{name}]\n" + "".join(f"{k} = {v}\n" for k, v in part.items()) for name, part in found.items()
    ]
    options.out.write_text(head + "".join(lines_), encoding="utf-8")


if __name__ == "__main__":
    run_program(main)
