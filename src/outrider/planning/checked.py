"""How wrong the cost model was where it was checked: what `benchmarks/plan/check.py` found."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def model_error() -> Mapping[str, Any]:
    """Relative errors of calls, of calls over a call of one token, and of published speed-ups: `median`, and
    `most`, which nine in ten were below."""
    return tomllib.loads((files(__package__) / "checked.toml").read_text(encoding="utf-8"))


def error_line() -> str:
    """The same in a sentence."""
    calls, ratios, speedups = (model_error()[name] for name in ("calls", "call_ratios", "speedups"))
    return (
        f"was off by {speedups['median']:.0%} in {speedups['rows']} published speed-ups with known acceptance"
        f" (one in ten by more than {speedups['most']:.0%}), by {calls['median']:.0%} in {calls['rows']}"
        f" calls measured on a processor ({ratios['median']:.0%} against a call of one token); acceptance"
        " comes on top"
    )
