"""A prompt of a workload: what is asked, in which form, under which schema, and whether it only measures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
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


# Which conversations only measure: what was learned from the others is judged on them. The side is decided by
# a hash of what is asked: the same conversation falls on the same side whatever its id, its follow-ups, its
# file and the run, so that no draft is measured on what it was made from, also not after further work.

HELD_OUT_SHARE = 1 / 16
"""of all conversations"""


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
