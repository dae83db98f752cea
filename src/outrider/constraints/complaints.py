"""llguidance's error messages, cut down to the reason."""

from __future__ import annotations

import re

_REGEX_ERROR = re.compile(r"^error: (.+)$", re.MULTILINE)
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_LEADS = re.compile(
    r'^(?:failed to compile JSON schema: |Unsatisfiable schema: |invalid regex ".*" \(in regex\): )+'
)
NOTHING_FITS = "NoExtensionBias"
_TOO_LARGE = ("too big", "too large", "too many expressions", "size limit", "too complex", "limit exceeded")


def reason(message: str) -> str:
    """What is wrong, in one line without a full stop."""
    if NOTHING_FITS in message:
        return "nothing can match it"
    line = message.strip().split("\n", 1)[0]
    line = _LEADS.sub("", _PLACE.sub("", line))
    detail = _REGEX_ERROR.search(message)
    if any(sign in line for sign in _TOO_LARGE):
        return f"it is too large ({line})"
    return (detail[1] if detail else line).strip().rstrip(".:")


def place(message: str) -> tuple[int, int] | None:
    """The line and the column that a message names."""
    found = _PLACE.match(message)
    return (int(found[1]), int(found[2])) if found else None


def dead_end(message: str) -> str:
    """Why a matcher cannot go on."""
    if NOTHING_FITS in message:
        return "the grammar leaves no token that may follow"
    return f"the next token could not be worked out ({reason(message)})"
