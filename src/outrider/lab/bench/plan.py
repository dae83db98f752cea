"""What a sweep is over: models, settings of speculation, workloads, and how often each is run.

Every setting is declared here once: the command line, its help and the plan are made of the same class.
"""

# Annotations are no strings here: pydantic would evaluate each of them at every start.

import re
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator

from outrider.core.errors import SettingError
from outrider.core.schema import Count, Group, Natural, setting
from outrider.lab.prompts import Workload
from outrider.lab.settings import AUTO, AUTO_LOOKUP, AUTO_MODEL, PLAIN, Drafters, Setting
from outrider.lab.workloads import MAX_TOKENS, load_workload
from outrider.policy.auto import LONGEST_DRAFT

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def parse_lengths(text: str) -> tuple[int, ...]:
    """Draft lengths as people write them, ascending. Raises ValueError.

    >>> parse_lengths("0-3,8")
    (0, 1, 2, 3, 8)
    """
    found: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last > LONGEST_DRAFT:
            raise ValueError(f"{part.strip()!r} is not a length of 0 to {LONGEST_DRAFT}, as in 0-16 or 2,4,8")
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def parse_p_mins(text: str) -> tuple[float, ...]:
    """Probabilities as people write them. Raises ValueError."""
    try:
        found = tuple(map(float, text.split(",")))
    except ValueError:
        found = (-1.0,)
    if not all(0 <= p_min <= 1 for p_min in found):
        raise ValueError("they are probabilities from 0 to 1, as in 0,0.5")
    return found


class SweepPlan(Group, panel="What is swept"):
    """What is swept, and how precisely. Lengths are tokens."""

    targets: list[str] = setting(
        ["default"],
        "Target: a file, a quoted glob, hf:OWNER/REPO[:QUANT], or default (repeatable).",
        "-m --target --model MODEL",
        panel="Models",
    )
    drafts: list[str] = setting(
        [],
        "Draft model, named likewise, or mtp: a target's own head; each is tried with every target "
        "(repeatable).",
        "-md --draft --model-draft MODEL",
        panel="Models",
    )
    workload: list[str] = setting(
        ["chat", "code", "edits", "json"],
        "chat, code, edits, json, summaries, agent, reasoning, or a file of JSON lines; "
        "file.jsonl#coding takes one category (repeatable).",
        "NAME",
    )
    prompts: Count | None = setting(None, "At most N prompts of each workload, evenly spread.")
    max_tokens: Count = setting(MAX_TOKENS, "Tokens of an answer.", "-n")
    draft_lengths: str = setting("0-16", "Draft lengths, as 0-16 or 2,4,8.", "N")
    p_mins: str = setting("0,0.5,0.75", "Ends of drafts: below these probabilities.", "P")
    finalists: Annotated[int, Field(ge=0, le=64)] = setting(
        2, "Best settings of a cell to run for real.", panel="How precisely"
    )
    controls: list[str] = setting(
        ["model 3", "lookup 8"],
        'A setting to run for real in any case: "model 3", "both 8/0.75", "auto" (repeatable).',
        "--control SETTING",
        panel="How precisely",
    )
    repetitions: Annotated[int, Field(ge=1, le=1000)] = setting(
        4, "How often each real run is repeated.", panel="How precisely"
    )
    minutes: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = setting(
        None, "For everything: real runs are cut to what fits. Default: no limit.", "M", panel="How precisely"
    )
    costs: Path | None = setting(
        None, "Take what calls cost from this file; do not measure it.", panel="How precisely"
    )
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = setting(
        0.0, "Temperature.", "--temp --temperature T", panel="Sampling"
    )
    seed: Annotated[Natural, Field(lt=2**31)] = setting(
        0, "Of the sampling, and of the order of runs.", "-s", panel="Sampling"
    )

    @field_validator("draft_lengths", "p_mins")
    @classmethod
    def _check_readable(cls, text: str, info: ValidationInfo) -> str:
        parse_lengths(text) if info.field_name == "draft_lengths" else parse_p_mins(text)
        return text

    @field_validator("controls")
    @classmethod
    def _check_settings(cls, names: list[str]) -> list[str]:
        return [Setting.of(name).name for name in names]

    def workloads(self) -> list[Workload]:
        """Their prompts. Raises PromptError, and SettingError where two have one name."""
        how = self.model_dump(include={"prompts", "temperature", "max_tokens", "seed"})
        found = [load_workload(name, **how) for name in dict.fromkeys(self.workload)]
        names = [workload.name for workload in found]
        if twice := next((name for name in names if names.count(name) > 1), None):
            why = "two of the workloads would have this name"
            raise SettingError(f"--workload {twice}", why, "Rename one of the files.")
        return found

    def settings(self, draft: str | None, *, can_draft: bool = True) -> list[Setting]:
        """What is replayed with a draft; what needs no draft model, without one alone."""
        if not can_draft:
            return [PLAIN]
        found = [PLAIN, AUTO_LOOKUP] if draft is None else [AUTO, AUTO_MODEL]
        kinds: tuple[Drafters, ...] = ("lookup",) if draft is None else ("model", "both")
        lengths, p_mins = parse_lengths(self.draft_lengths), sorted(parse_p_mins(self.p_mins))
        found += [Setting(kind, n, p_min) for kind in kinds for n in lengths if n for p_min in p_mins]
        named = map(Setting.of, self.controls)
        return list(dict.fromkeys([*found, *(s for s in named if s.uses_model == (draft is not None))]))
