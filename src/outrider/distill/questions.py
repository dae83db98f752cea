"""What the target is asked, and which side of the split each question is on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from pydantic import ValidationError

from outrider.core.errors import SettingError
from outrider.distill.generate import Question
from outrider.distill.plan import DataPlan
from outrider.distill.split import conversation_hash, is_held_out
from outrider.distill.written_prompts import written_prompts
from outrider.lab.prompts import Prompt
from outrider.lab.workloads import BUILT_IN, load_workload
from outrider.lab.workloads.spec import WorkloadSpec

__all__ = ["Asked", "asked"]

DEFAULT_PROMPTS = 2000
"""of the bundled ones"""


class Asked:
    """The questions of a plan. `training` and `held_out` have no conversation in common.

    Some of those held out are asked at temperature 0 whatever the plan says: a draft's agreement and expected
    speed are measured along the target's most likely answers.
    """

    def __init__(self, prompts: Sequence[tuple[str, Prompt]], temperatures: Sequence[float]) -> None:
        training = [item for item in prompts if not is_held_out(item[1])]
        held_out = [item for item in prompts if is_held_out(item[1])]
        self.training = _questions(training, temperatures)
        with_zero = temperatures if 0 in temperatures else (0.0, *temperatures)
        self.held_out = _questions(held_out, sorted(with_zero))


def _questions(prompts: Sequence[tuple[str, Prompt]], temperatures: Sequence[float]) -> list[Question]:
    """Each prompt at one of the temperatures, which take turns."""
    return [
        Question(prompt, category, temperatures[i % len(temperatures)])
        for i, (category, prompt) in enumerate(prompts)
    ]


def asked(plan: DataPlan) -> Asked:
    """The questions that a plan names.

    Raises PromptError for a file that cannot be read, SettingError when one side of the split is empty.
    """
    if not plan.prompts:
        prompts = [(w.category, w.prompt) for w in written_prompts(plan.num_prompts or DEFAULT_PROMPTS)]
    else:
        prompts = [found for name in dict.fromkeys(plan.prompts) for found in _of_file(name)]
        prompts = prompts[: plan.num_prompts]
    fresh = [item for item in prompts if conversation_hash(item[1]) not in _measured()]
    found = Asked(fresh, plan.temperatures)
    if not found.training or not found.held_out:
        reason = f"of {len(fresh)} prompts {len(found.held_out)} are held out, and both sides need some"
        if known := len(prompts) - len(fresh):
            reason += f"; {known} more are of the built-in workloads, which drafts are measured on"
        raise SettingError("prompts", reason, "Give more prompts: one of sixteen is held out.")
    return found


@cache
def _measured() -> frozenset[str]:
    """The conversations of the built-in workloads, which drafts are measured on by `check` and `bench`."""
    workloads = (load_workload(WorkloadSpec(name=name)) for name in BUILT_IN)
    return frozenset(conversation_hash(prompt) for workload in workloads for prompt in workload.prompts)


def _of_file(name: str) -> list[tuple[str, Prompt]]:
    if name in BUILT_IN:
        reason = "drafts are measured on the built-in workloads, and must not be trained on them"
        raise SettingError(
            f"--prompts {name}", reason, "Name a file; without one the bundled prompts are used."
        )
    try:
        spec = WorkloadSpec.model_validate(name)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise SettingError(f"--prompts {name}", reason, "Name a JSON-lines file or a server's log.") from None
    workload = load_workload(spec)
    category = Path(name).stem
    return [(category, prompt) for prompt in workload.prompts]
