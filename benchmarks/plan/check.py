"""How wrong the cost model is: against curves that were measured here, and against published rows.

To the rows marked `fit` is fitted what a further token costs under llama.cpp, for each kind of card. Of the
curves two constants are fitted for each library and quantization, bandwidth and operations, on the models of
FITTED; the others are predicted. Writes the tables to standard output, and to --out what `outrider plan`
uses.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import nan
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import argument_parser, read_rows, run_program, table
from outrider.lab.plan.acceptance import ALL, of_draft, of_head
from outrider.lab.plan.calls import Machine, PlannedModel, call_bytes, machine_of
from outrider.lab.plan.catalogue import Catalogue, Device, bundled, catalogue
from outrider.lab.plan.plan import COSTS, ODDS, Asked, plan_batch
from outrider.lab.plan.shapes import HEADS, ModelShape, find_shape, head_of

HERE = Path(__file__).parent
FITTED = ("SmolLM2", "qwen2.5-coder-0.5b")
"""models whose curves the constants are fitted to"""
MAX_SPREAD = 0.1
"""A measured call whose median is less sure than that is left out."""
CONTEXT = 512
"""tokens that a sequence is taken to have in the middle of a published run"""
FITTED_KINDS = ("ampere", "blackwell", "rdna", "apple")
LIKE = {"ada": "ampere", "volta": "ampere", "ampere-server": "ampere", "hopper": "blackwell", "cdna": "rdna"}
"""kinds without rows to fit, and those whose cost they are given"""

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
            curve = PlannedModel(model.shape, (Machine(device),))
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

Row = Mapping[str, Any]


def predicted(row: Row, known: Catalogue) -> float:
    """The row's tokens per second, its call over one of a token, or its speed-up."""
    machine, target = machine_of(row["on"], known, row.get("engine")), find_shape(row["target"], known)
    curve = PlannedModel(target, (machine,), is_target=True)
    plain_s = curve.call_s(1, context=CONTEXT)
    if "tokens_per_s" in row:
        return 1 / plain_s
    if "call_tokens" in row:
        return curve.call_s(row["call_tokens"], context=CONTEXT) / plain_s
    step_s = curve.call_s(row["verified"], context=CONTEXT)
    if draft := row.get("draft"):
        shape = head_of(target, draft) if draft in HEADS else find_shape(draft, known)
        call_s = PlannedModel(shape, (machine,)).call_s(row.get("draft_tokens", 1), context=CONTEXT)
        step_s += row["draft_steps"] * call_s
    return float(row["tokens_per_call"] * plain_s / step_s)


def changed(known: Catalogue, of: Callable[[str, Row], Mapping[str, Any]]) -> Catalogue:
    """What is known, each device with what `of` says of its name and entry besides."""
    hardware = {name: {**entry, **of(name, entry)} for name, entry in known.tables["hardware"].items()}
    return Catalogue({**known.tables, "hardware": hardware})


def error(rows: Sequence[Row], known: Catalogue) -> float:
    return float(sum(abs(np.log(predicted(row, known) / value_of(row))) for row in rows))


def token_ratios(rows: Sequence[Row], known: Catalogue) -> dict[str, float]:
    """By kind of card what a further token costs under llama.cpp, with the least error over the fitted
    rows."""

    def kind(row: Row) -> str:
        return machine_of(row["on"], known).device.kind

    def fitted(name: str, hybrid: float) -> tuple[float, float]:
        """The least error, and the ratio that has it."""
        mine = [
            row for row in rows if row["use"] == "fit" and kind(row) == name and "tokens_per_s" not in row
        ]
        mine = [row for row in mine if not row["on"].endswith("-eager")]
        with patch.dict(bundled("fitted")["token_ratio"], hybrid=hybrid):
            tried = [round(ratio, 3) for ratio in np.arange(0.0, 0.8, 0.01)]
            return min(
                (error(mine, changed(known, lambda *_, r=ratio: {"token_ratio": r})), ratio)
                for ratio in tried
            )

    hybrids = [round(hybrid, 1) for hybrid in np.arange(1.0, 2.2, 0.1)]
    best = min(hybrids, key=lambda hybrid: sum(fitted(name, hybrid)[0] for name in FITTED_KINDS))
    found = {name: fitted(name, best)[1] for name in FITTED_KINDS}
    return {"hybrid": best, **found, **{name: found[other] for name, other in LIKE.items()}}


def eager(rows: Sequence[Row], known: Catalogue) -> Catalogue:
    """With plain PyTorch's times for a layer and a call that fit the fitting rows best."""
    mine = [row for row in rows if row["use"] == "fit" and row["on"].endswith("-eager")]
    tried = [(x, y) for x in np.geomspace(5e-5, 2e-3, 25) for y in np.geomspace(1e-5, 5e-3, 25)]

    def with_times(pair: tuple[float, float]) -> Catalogue:
        times = {"layer_s": pair[0], "call_s": pair[1], "step_s": 0.0}
        return changed(known, lambda name, _: times if name.endswith("-eager") else {})

    best = min(tried, key=lambda pair: error(mine, with_times(pair)))
    print(f"plain PyTorch: {best[0] * 1e6:.0f} us a layer, {best[1] * 1e6:.0f} us a call\n")
    return with_times(best)


class Published(NamedTuple):
    row: Row
    error: Error
    low: float
    high: float

    @property
    def is_consumer(self) -> bool:
        device = machine_of(self.row["on"], catalogue(HERE / "machines.toml")).device
        return device.engine == "llama.cpp" and device.kind != "cpu"

    @property
    def cells(self) -> tuple[str, ...]:
        error = self.error
        held = "" if self.is_held else " (outside)"
        ends = f"{self.low:.2f} to {self.high:.2f}{held}" if self.high > 0 else ""
        figures = f"{error.found:.2f}", f"{error.predicted:.2f}", f"{100 * error.ratio:.0f} %"
        return (error.what, str(self.row["use"]), *figures, ends)

    @property
    def is_held(self) -> bool:
        return bool(self.low <= self.error.found <= self.high)


def published() -> tuple[dict[str, float], list[Published]]:
    """The fitted costs of a further token, and every row."""
    rows = tomllib.loads((HERE / "published.toml").read_text(encoding="utf-8"))["rows"]
    known = catalogue(HERE / "machines.toml")
    ratios = token_ratios(rows, known)
    found = []
    with patch.dict(bundled("fitted")["token_ratio"], ratios):
        known = eager(rows, catalogue(HERE / "machines.toml"))
        for row in rows:
            low, usual, high = (
                ranged(row, known) if "speedup" in row and "method" not in row else (nan, nan, nan)
            )
            value = usual if row["use"] == "range" else predicted(row, known)
            found.append(Published(row, Error(name_of(row), value, value_of(row)), low, high))
    return ratios, found


def ranged(row: Row, known: Catalogue) -> tuple[float, float, float]:
    """The range of a row's speed-up where its acceptance is not known, as a plan gives it."""
    machine, target = machine_of(row["on"], known, row.get("engine")), find_shape(row["target"], known)
    name, texts = row["draft"], row.get("texts", ALL)
    is_head = name in HEADS
    shape = head_of(target, name) if is_head else find_shape(name, known)
    accepted = of_head(name, texts) if is_head else of_draft(texts, shape.parameters / target.parameters)
    models = [
        PlannedModel(target, (machine,), is_target=True),
        PlannedModel(shape, (machine,), acceptance=accepted),
    ]
    asked = Asked(models[0], models[1:], [1], CONTEXT, machine, odds=ODDS, costs=COSTS)
    batch = plan_batch(asked, 1)
    length = row.get("length") or row.get("draft_steps")
    mine = [way for way in batch.ways if way.drafters == "draft"]
    best = next(way for way in batch.drafters if way.drafters == "draft")
    if length is not None:
        best = min(mine, key=lambda way: abs(way.draft_length - length))
    return best.low, best.speedup, best.high


def value_of(row: Row) -> float:
    return float(row.get("speedup") or row.get("call_ratio") or row["tokens_per_s"])


def name_of(row: Row) -> str:
    if "call_tokens" in row:
        what = f"a call over {row['call_tokens']}"
    elif "tokens_per_s" in row:
        what = "plain tokens/s"
    else:
        length = row.get("length") or row.get("draft_steps")
        what = row.get("method") or f"{row['draft']}{f', {length}' if length else ''}"
    by = f" ({row['by']})" if "by" in row else ""
    return f"{row['source']}{by}: {row['target']} on {row['on']}, {what}"


# What is said of it


def summary_of(errors: Sequence[Error]) -> dict[str, float]:
    ratios = [error.ratio for error in errors]
    return {"median": round(median(ratios), 4), "most": round(float(np.quantile(ratios, 0.9)), 4)}


def summaries(
    absolute: Sequence[Error], relative: Sequence[Error], rows: Sequence[Published]
) -> dict[str, dict[str, float]]:
    """Of calls, of their ratios to a call of one token, of the published speed-ups that are checked, of those
    on consumer cards, and how many published speed-ups lie in their range."""
    checked = [found for found in rows if found.row["use"] == "check" and "speedup" in found.row]
    parts = {
        "calls": absolute,
        "call_ratios": relative,
        "speedups": [found.error for found in checked],
        "consumer": [found.error for found in checked if found.is_consumer],
    }
    said = {name: {"rows": len(errors), **summary_of(errors)} for name, errors in parts.items()}
    ranges = [found for found in rows if found.high > 0 and found.row["use"] != "fit"]
    held = sum(found.is_held for found in ranges)
    return said | {"range": {"odds": ODDS, "costs": COSTS, "rows": len(ranges), "held": held}}


def main() -> None:
    options = argument_parser(__doc__).parse_args()
    absolute, relative, lines = [], [], []
    for key, model, bandwidth, speed, errors, shapes in curve_errors():
        absolute += errors
        relative += shapes
        percents = (f"{100 * summary_of(found)['median']:.0f} %" for found in (errors, shapes))
        lines.append((*key, model, f"{bandwidth / 1e9:.0f}", f"{speed / 1e9:.0f}", *percents))
    print("\n".join(table(("library", "type", "model", "GB/s", "GOPS", "V(n)", "V(n)/V(1)"), lines)), "\n")
    ratios, rows = published()
    columns = ("row", "use", "published", "predicted", "error", "range")
    print("\n".join(table(columns, [found.cells for found in rows])))
    found = {"token_ratio": ratios, **summaries(absolute, relative, rows)}
    print("\n" + json.dumps(found, indent=1))
    head = (
        "# Written by benchmarks/plan/check.py. `token_ratio`: what a further token of a call costs under\n"
        "# llama.cpp, as a part of reading the weights at 4.85 bits, by kind of card, and how many times\n"
        "# that for hybrids; then how wrong the cost model was where it was checked: relative errors of\n"
        "# calls on a processor, of these over a call of one token, of published speed-ups, of those on\n"
        "# consumer cards, and how many of those not fitted lay in the range of a plan that does not know\n"
        "# their acceptance.\n"
    )
    lines_ = [
        f"\n[{name}]\n" + "".join(f"{k} = {v}\n" for k, v in part.items()) for name, part in found.items()
    ]
    options.out.write_text(head + "".join(lines_), encoding="utf-8")


if __name__ == "__main__":
    run_program(main)
