"""The plan as one HTML file that needs no other."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from outrider.lab import numbers
from outrider.lab.plan.calls import error_line
from outrider.lab.plan.plan import LENGTHS, Plan, Way


def page(plan: Plan, acceptance: str, data: Mapping[str, Any]) -> str:
    """The whole document: figures by batch size, a map for each drafter, and `data` for programs."""
    environment = Environment(
        loader=PackageLoader("outrider.lab.plan", "."), autoescape=True, undefined=StrictUndefined
    )
    environment.filters |= {"digits": numbers.digits, "gb": lambda size: numbers.gigabytes(round(size))}
    drafters = dict.fromkeys((way.drafting, way.draft, way.name) for way in plan.batches[0].ways)
    maps = [
        (name, [(b.batch, [_field(b.ways, who, draft, n) for n in LENGTHS]) for b in plan.batches])
        for who, draft, name in drafters
    ]
    return environment.get_template("page.html").render(
        plan=plan,
        acceptance=acceptance,
        error=error_line(),
        lengths=LENGTHS,
        maps=maps,
        data=json.dumps(data, indent=1).replace("<", "\\u003c"),
    )


def _field(ways: Any, drafting: str, draft: str, length: int) -> tuple[str, str]:
    """The text of a field of a map, and its colour: blue is faster, orange slower."""
    found: Way = next(w for w in ways if (w.drafting, w.draft, w.length) == (drafting, draft, length))
    value = found.speedup.value
    share = min(abs(math.log2(value)) / math.log2(3), 1) * 70 if value > 0 else 70
    return (
        f"{value:.2f}",
        f"color-mix(in srgb, {'#1f6fb2' if value >= 1 else '#c8590b'} {share:.0f}%, transparent)",
    )
