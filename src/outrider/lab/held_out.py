"""Which conversations only measure: what was learned from the others is judged on them.

The side is decided by a hash of what is asked: the same conversation falls on the same side whatever its
id, its follow-ups, its file and the run, so that no draft is measured on what it was made from, also not
after further work with more prompts.
"""

from __future__ import annotations

import json
from hashlib import blake2b

from outrider.lab.prompts import Prompt

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
