"""The report's drawings, in their order. Each module draws one of them from a `View`."""

from __future__ import annotations

from collections.abc import Callable

from outrider.lab.bench.report.pictures.acceptance import acceptance
from outrider.lab.bench.report.pictures.costs import costs
from outrider.lab.bench.report.pictures.picture import Missing, Picture
from outrider.lab.bench.report.view import View

__all__ = ["PICTURES"]

PICTURES: tuple[Callable[[View], Picture | Missing], ...] = (acceptance, costs)
