"""Measured curves in the place of the cost model: what `outrider costs` wrote or printed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.core.errors import SettingError
from outrider.core.files import parse_json, read_text
from outrider.costs import CallCosts

_WAY_OUT = "Measure them: outrider costs --costs FILE."


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredCurve:
    """The curve of one model, measured where it will run."""

    costs: CallCosts

    def call_s(self, num_tokens: int, *, batch: int = 1, context: int = 0) -> float:
        """As `outrider.planning.calls.Curve` says."""
        return self.costs.call_s(num_tokens * batch, context=context * batch, num_sequences=batch)


def read_curves(path: Path, notices: list[str]) -> tuple[MeasuredCurve, MeasuredCurve | None]:
    """Those of target and draft, as `outrider costs` writes or prints them; what they lack is added to the
    `notices`. Raises SettingError."""
    try:
        data: Any = parse_json(read_text(path, _WAY_OUT))
    except ValueError:
        data = None
    if not isinstance(data, dict) or "target" not in data:
        raise SettingError(str(path), "it holds no measured curves", _WAY_OUT)
    found = [
        None if data.get(role) is None else MeasuredCurve(CallCosts.from_json(data[role], str(path)))
        for role in ("target", "draft")
    ]
    if found[0] is None:
        raise SettingError(str(path), "it holds no curve of a target", _WAY_OUT)
    if not any(point.num_sequences > 1 for point in found[0].costs.points):
        notices.append("calls over several sequences were not measured, but guessed (outrider costs -np N)")
    return found[0], found[1]
