"""Which prompts train a draft and which measure it: decided by a hash of what is asked.

The same conversation falls on the same side whatever its id, its follow-ups, its file and the run, so that
no draft is measured on what it was trained on, also not after further training with more prompts.
"""

from __future__ import annotations

import json
from hashlib import blake2b

from outrider.lab.prompts import Prompt

__all__ = ["HELD_OUT_SHARE", "conversation_hash", "is_held_out"]

HELD_OUT_SHARE = 1 / 16
"""of all conversations"""


def conversation_hash(prompt: Prompt) -> str:
    """Names how a conversation begins: its messages up to the user's first, without regard to case and white
    space. Later turns quote the earlier ones, so they must fall on the same side."""
    if isinstance(prompt.messages, str):
        said = [["text", prompt.messages]]
    else:
        said = []
        for message in prompt.messages:
            said.append([str(message.get("role")), _text(message.get("content"))])
            if message.get("role") == "user":
                break
    plain = [[role, " ".join(text.lower().split())] for role, text in said]
    return blake2b(json.dumps(plain).encode(), digest_size=16).hexdigest()


def _text(content: object) -> str:
    return content if isinstance(content, str) else json.dumps(content, sort_keys=True)


def is_held_out(prompt: Prompt | str, share: float = HELD_OUT_SHARE) -> bool:
    """Whether a conversation, or the one that has this hash, measures and must not train; true of about
    `share` of all."""
    digest = prompt if isinstance(prompt, str) else conversation_hash(prompt)
    return int(digest[:12], 16) < share * 16**12
