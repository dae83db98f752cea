"""What the target is asked, and which questions train a draft and which measure it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from outrider.core.errors import SettingError
from outrider.lab.distill.plan import Data
from outrider.lab.prompts import Prompt, conversation_hash, is_held_out
from outrider.lab.workloads import BUILT_IN, load_workload
from outrider.lab.written_prompts import written_prompts

DEFAULT_PROMPTS = 2000
"""of the bundled ones"""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, or one of its follow-ups, and how it is answered."""

    prompt: Prompt
    category: str
    temperature: float
    turn: int = 0

    @property
    def num_turns(self) -> int:
        return 1 + len(self.prompt.follow_ups)

    @property
    def id(self) -> str:
        """Names what is asked and how: prompts of two files may have the same id."""
        prompt = self.prompt
        asked = (prompt.messages, prompt.follow_ups, prompt.grammar, prompt.tools, prompt.max_tokens)
        digest = blake2b(repr(asked).encode(), digest_size=6).hexdigest()
        return f"{prompt.id}#{digest}/{self.turn + 1}@{self.temperature:g}"


class Asked(NamedTuple):
    """The questions of a plan; the two sides have no conversation in common."""

    training: list[Question]
    held_out: list[Question]


def asked(plan: Data) -> Asked:
    """The questions that a plan names, each prompt at one of its temperatures, which take turns.

    Some of those held out are asked at temperature 0 whatever the plan says: a draft's agreement and expected
    speed are measured along the target's most likely answers.
    Raises PromptError for a file that cannot be read, SettingError when one side of the split is empty.
    """
    if not plan.prompts:
        prompts = [(w.category, w.prompt) for w in written_prompts(plan.num_prompts or DEFAULT_PROMPTS)]
    else:
        prompts = [found for name in dict.fromkeys(plan.prompts) for found in _of_file(name)]
        prompts = prompts[: plan.num_prompts]
    fresh = [item for item in prompts if conversation_hash(item[1]) not in _measured()]
    held_out = [is_held_out(prompt) for _, prompt in fresh]
    if all(held_out) or not any(held_out):
        reason = f"of {len(fresh)} prompts {sum(held_out)} are held out, and both sides need some"
        if known := len(prompts) - len(fresh):
            reason += f"; {known} more are of the built-in workloads, which drafts are measured on"
        raise SettingError("prompts", reason, "Give more prompts: one of sixteen is held out.")
    with_zero = plan.temperatures if 0 in plan.temperatures else (0.0, *plan.temperatures)
    sides: dict[bool, list[Question]] = {False: [], True: []}
    for (category, prompt), held in zip(fresh, held_out, strict=True):
        temperatures = sorted(with_zero) if held else plan.temperatures
        side = sides[held]
        side.append(Question(prompt, category, temperatures[len(side) % len(temperatures)]))
    return Asked(sides[False], sides[True])


@cache
def _measured() -> frozenset[str]:
    """The conversations of the built-in workloads, which drafts are measured on by `check` and `bench`."""
    workloads = map(load_workload, BUILT_IN)
    return frozenset(conversation_hash(prompt) for workload in workloads for prompt in workload.prompts)


def _of_file(name: str) -> list[tuple[str, Prompt]]:
    if name in BUILT_IN:
        reason = "drafts are measured on the built-in workloads, and must not be trained on them"
        raise SettingError(
            f"--prompts {name}", reason, "Name a file; without one the bundled prompts are used."
        )
    return [(Path(name).stem, prompt) for prompt in load_workload(name).prompts]
