"""How much a model may think before it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.core.contracts import Vocabulary
from outrider.core.data import Thought
from outrider.models.chat import ChatTemplate

_TAIL_TOKENS = 32
"""of a prompt: enough to see whether its end opens the model's reasoning"""


def limited_thought(
    template: ChatTemplate | None,
    vocabulary: Vocabulary,
    prompt: Sequence[int],
    budget: int,
    message: str = "",
) -> Thought | None:
    """How the answer to a prompt reasons, with at most `budget` tokens; `message` comes before an end that
    is forced. None for a model whose template knows no reasoning."""
    from outrider.formats import format_of  # loads slowly, and few requests need it

    spelled = (
        vocabulary.spelling(token) if vocabulary.is_control(token) else vocabulary.piece(token)
        for token in prompt[-_TAIL_TOKENS:]
    )
    end = b"".join(spelled).decode("utf-8", errors="replace")
    thought = format_of(template, vocabulary).thought(end, message)
    return None if thought is None else replace(thought, budget=budget)
