"""Where texts part: what the next one may share, which a model that goes back to copies of its state alone
has to keep one of."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from outrider.core.contracts import Model
from outrider.core.data import Request
from outrider.core.sequences import common_prefix
from outrider.engine.kv_slots import Slots
from outrider.engine.sequence import RunningRequest, num_missing

_MIN_TOKENS = 64
"""Fewer are read again."""
_MESSAGE_TOKENS = 256
"""of a message that is worth a copy at its end"""
_PART_TOKENS = 1024
"""Longer messages, and texts without control tokens, are worth one in so many: they may be edited inside."""
_LAST_TOKENS = 16
"""The next turn begins like this prompt, but for what its template puts before an answer."""
_MIN_AWAITED_TOKENS = 16
"""Fewer are read with the call that a request would wait for."""


def turns_of(prompt: Sequence[int], target: Model, num_common: int) -> list[int]:
    """Numbers of tokens after which a text may go on otherwise, in ascending order: the end of the system
    prompt and of each long message, where a control token stands; places within what has none; the end of
    what the prompt has in common with an earlier text; and shortly before the prompt's end."""
    end = len(prompt) - _LAST_TOKENS
    if not target.rewinding.keeps_turns or len(prompt) < _MIN_TOKENS:
        return []
    controls = {at for at, token in enumerate(prompt[:end]) if target.vocabulary.is_control(token)}
    system = min((at for at in controls if at >= _MIN_TOKENS), default=0)
    found = [system] if system else []
    for at in range(system, end):
        size = at - (found[-1] if found else 0)
        if size >= _PART_TOKENS or (size >= _MESSAGE_TOKENS and at in controls):
            found.append(at)
    if num_common < end and all(abs(num_common - at) >= _MIN_TOKENS for at in (0, *found)):
        found.append(num_common)
    return sorted({*found, end})


def will_share(other: RunningRequest, request: Request, target: Model, slots: Slots) -> bool:
    """Whether a running request is about to store a beginning of a prompt that nothing stores yet. To wait
    for it takes no longer than to read it: the other is ahead, and both would share their calls."""
    if not (request.cache_prompt and target.rewinding.copies_beginnings):
        return False
    if other.request.scope != request.scope or other.num_generated or not num_missing(target, other):
        return False
    shared = min(common_prefix(other.tokens, request.prompt), len(request.prompt) - 1)
    if shared <= target.length(other.slot) or shared - slots.num_stored(request) < _MIN_AWAITED_TOKENS:
        return False
    if target.rewinding.keeps_turns and shared not in other.turns:
        insort(other.turns, shared)
    return True
