"""Which requests belong together: those of one conversation, and those with one long beginning, go to the
replica that has their KV."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

SESSION = "x-session-id"
MAX_CHARACTERS = 2048
"""of a beginning: what is alike for so long belongs together, whatever follows"""


def routing_key(headers: Mapping[str, str], body: bytes, caller: str = "") -> str:
    """The same for requests that should find the same KV.

    That is the session that the client names; else the API key and the beginning of what is asked: the
    instructions and first question of a conversation, which stay as it goes on, or of a prompt its first
    `MAX_CHARACTERS`. A body that says nothing of this kind is a beginning itself.
    """
    if session := headers.get(SESSION):
        begins = f"session {session}"
    else:
        try:
            begins = _beginning(json.loads(body))
        except (ValueError, RecursionError):
            begins = body[:MAX_CHARACTERS].decode(errors="replace")
    return blake2b(f"{caller}\n{begins}".encode(errors="replace"), digest_size=16).hexdigest()


def _beginning(asked: Any) -> str:
    if not isinstance(asked, dict):
        return _text(asked)[:MAX_CHARACTERS]
    parts = [_text(asked.get(name)) for name in ("model", "instructions", "system")]
    for name in ("messages", "input", "prompt"):
        if (found := asked.get(name)) is None:
            continue
        turns = found if isinstance(found, list) else [found]
        for turn in turns:
            parts.append(_text(turn))
            if isinstance(turn, dict) and turn.get("role") == "user":
                break
        break
    return "\n".join(parts)[:MAX_CHARACTERS]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
