"""The settings of `distill`: those of a plan, and what a command needs besides."""

from __future__ import annotations

from pathlib import Path

from outrider.core.schema import setting
from outrider.core.settings import Hub, JsonOutput, Target, Threads, Verbose
from outrider.lab.distill.plan import Data, Draft, Training


class DistillSettings(Target, Hub, Data, Draft, Training, JsonOutput, Verbose, Threads):
    """Those of `distill`; `go_on` is --continue."""

    out: Path | None = setting(
        None, "Where everything goes, and a stopped run goes on. Default: ./distilled-MODEL.", "-o FOLDER"
    )
    answers_only: bool = setting(False, "Record the answers and end: train on them later, or elsewhere.")
    no_report: bool = setting(False, "Do not measure it on held-out prompts.")
    ctx_size: int = setting(1024, "Tokens of the longest prompt with its answer.", "-c", panel="Machine")
