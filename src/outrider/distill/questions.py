"""What the target is asked, and which questions train a draft and which measure it.

The side is decided by a hash of what is asked: the same conversation falls on the same side whatever its
id, its follow-ups, its file and the run, so that no draft is measured on what it was trained on, also not
after further training with more prompts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path

from pydantic import ValidationError

from outrider.core.errors import SettingError
from outrider.distill.plan import DataPlan
from outrider.distill.written_prompts import written_prompts
from outrider.lab.prompts import Prompt
from outrider.lab.workloads import BUILT_IN, load_workload
from outrider.lab.workloads.spec import WorkloadSpec

HELD_OUT_SHARE = 1 / 16
"""of all conversations"""
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
    def id(self) -> str:
        """Names what is asked and how: prompts of two files may have the same id."""
        prompt = self.prompt
        asked = (prompt.messages, prompt.follow_ups, prompt.grammar, prompt.tools, prompt.max_tokens)
        digest = blake2b(repr(asked).encode(), digest_size=6).hexdigest()
        return f"{prompt.id}#{digest}/{self.turn + 1}@{self.temperature:g}"


@dataclass(frozen=True, slots=True)
class Asked:
    """The questions of a plan; the two sides have no conversation in common."""

    training: list[Question]
    held_out: list[Question]


def asked(plan: DataPlan) -> Asked:
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


def conversation_hash(prompt: Prompt) -> str:
    """Names how a conversation begins: its messages up to the user's first, without regard to case and white
    space. Later turns quote the earlier ones, so they must fall on the same side."""
    if isinstance(prompt.messages, str):
        begun = [["text", prompt.messages]]
    else:
        begun = []
        for message in prompt.messages:
            begun.append([str(message.get("role")), _text(message.get("content"))])
            if message.get("role") == "user":
                break
    plain = [[role, " ".join(text.lower().split())] for role, text in begun]
    return blake2b(json.dumps(plain).encode(), digest_size=16).hexdigest()


def _text(content: object) -> str:
    return content if isinstance(content, str) else json.dumps(content, sort_keys=True)


def is_held_out(prompt: Prompt | str, share: float = HELD_OUT_SHARE) -> bool:
    """Whether a conversation, or the one that has this hash, measures and must not train; true of about
    `share` of all."""
    digest = prompt if isinstance(prompt, str) else conversation_hash(prompt)
    return int(digest[:12], 16) < share * 16**12


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
    return [(Path(name).stem, prompt) for prompt in load_workload(spec).prompts]
