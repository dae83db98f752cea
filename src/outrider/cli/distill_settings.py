"""The settings of `distill`: those of a run, and what a command needs besides."""

from __future__ import annotations

from pathlib import Path

from outrider.core.schema import setting
from outrider.core.settings import Hub, JsonOutput, Target, Verbose
from outrider.lab.distill.plan import DistillOptions


class DistillSettings(Target, Hub, DistillOptions, JsonOutput, Verbose):
    """Those of `distill`."""

    out: Path | None = setting(
        None, "Where everything goes, and a stopped run goes on. Default: ./distilled-MODEL.", "-o FOLDER"
    )
    answers_only: bool = setting(False, "Record the answers and end: train on them later, or elsewhere.")
