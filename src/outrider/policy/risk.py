"""How much a text may lose to drafts that turn out worse than expected: it must stay near plain decoding."""

from __future__ import annotations

from outrider.policy.acceptance import Estimator
from outrider.policy.knowledge import Knowledge
from outrider.policy.text import Text

__all__ = ["affordable_loss", "exploration_s", "loss_at_once"]

_EXPLORATION, _EXPLORATION_OF_KNOWN = 0.02, 0.005
"""share of a text's time that may go to asking a draft model that is not expected to pay"""
_LOSS = 0.3
_LOSS_GROWTH = 0.005
"""plain steps that any text may lose to a draft model, and how many more for each token of it"""
_RESERVE = 0.1
"""the part of what all texts have saved that may be lost; what they have lost must be made up for alike"""
_MORE_AT_ONCE = 5.7
_MIN_AT_ONCE = 1.0
"""plain steps: a single step may put more at stake than may be lost for good, and always so much"""


def affordable_loss(knowledge: Knowledge, text: Text) -> float:
    """How much farther the text may fall behind plain decoding, in plain steps; below 0 it has fallen too far
    behind to ask a draft model that is merely expected to pay."""
    return _LOSS + _LOSS_GROWTH * text.generated + _RESERVE * knowledge.saved_steps - text.behind


def exploration_s(text: Text, estimator: Estimator) -> float:
    """How much longer the text may ask a draft model that is not expected to pay, in seconds."""
    share = _EXPLORATION_OF_KNOWN if estimator.is_well_known else _EXPLORATION
    return share * text.decoded_s - text.explored_s


def loss_at_once(knowledge: Knowledge, text: Text) -> float:
    """How much longer than plain decoding a single step may take, in plain steps."""
    return max(affordable_loss(knowledge, text) + _MORE_AT_ONCE, _MIN_AT_ONCE)
