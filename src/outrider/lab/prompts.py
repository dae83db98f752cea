"""A prompt of a workload: what is asked, in which form, and under which schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.core.data import Grammar
from outrider.core.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation. `messages` are OpenAI's, up to a turn that the target answers; a string is a text as
    it is. Each of `follow_ups` is asked after the target's own answer to what came before.
    `grammar` limits the answers, `tools` are shown to the chat template.
    """

    id: str
    messages: tuple[Mapping[str, Any], ...] | str
    follow_ups: tuple[str, ...] = ()
    grammar: Grammar | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None
    """None: the workload's"""

    def after(self, answers: Sequence[str]) -> list[Mapping[str, Any]] | str:
        """What is asked after these answers: messages up to the next follow-up, or one text."""
        turns = list(zip(answers, self.follow_ups, strict=False))
        if isinstance(self.messages, str):
            return self.messages + "".join(f"{answer}\n\n{question}" for answer, question in turns)
        messages = list(self.messages)
        for answer, question in turns:
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
        return messages


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of one kind, and how their answers are made."""

    name: str
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    max_tokens: int
    source: str
    """where it comes from: "built in", or the file"""
