"""How far a draft's distributions are from its target's.

A target's distribution is known by its K most likely tokens and what is left for the rest, which is taken
as one more token. p is the target's, q the draft's, and α = Σ min(p, q) the acceptance at a position: the
share of sampled drafts that are accepted (Leviathan et al. 2023, arXiv 2211.17192, section 3.2). The loss is
λ KL(p || q) + (1 - λ)(1 - α) with λ = exp(-3 α): far from the target KL pulls, near it acceptance itself is
what counts (speculators, "lk_hybrid").
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

_HYBRID_RATE = 3.0
_MIN_P = 1e-9
_MIN_Q = 1e-7
"""about the rounding of 1 - Σ q in 32 bits"""


@dataclass(frozen=True, slots=True)
class Labels:
    """The target's distributions at n positions, in the draft's ids.

    `ids` (n, K) int64, distinct in a row but for entries of no probability; `probs` (n, K) and `rest` (n,)
    sum to 1 together.
    """

    ids: Tensor
    probs: Tensor
    rest: Tensor

    def at(self, positions: slice) -> Labels:
        return Labels(self.ids[positions], self.probs[positions], self.rest[positions])


def _log_q(logits: Tensor, labels: Labels) -> Tensor:
    """The draft's log probabilities of the labelled tokens (n, K)."""
    # One kernel each way: logsumexp alone would take longer backwards than the whole network.
    return functional.log_softmax(logits, dim=-1, dtype=torch.float32).gather(-1, labels.ids)


def _rest_q(log_q: Tensor, labels: Labels) -> Tensor:
    """The draft's probability of the rest (n,)."""
    held = (labels.probs > 0).to(log_q.dtype)
    rest_q = 1 - (log_q.exp() * held).sum(-1)
    # Raised without touching its gradient: a draft that has nothing left for the rest must still learn it.
    return rest_q + (rest_q.clamp(min=_MIN_Q) - rest_q).detach()


def loss_of(logits: Tensor, labels: Labels) -> Tensor:
    """The loss at each of n positions, of logits (n, vocabulary)."""
    log_q = _log_q(logits, labels)
    rest_q = _rest_q(log_q, labels)
    alpha = _alpha(log_q, rest_q, labels)
    weight = torch.exp(-_HYBRID_RATE * alpha.detach())
    return weight * _kl(log_q, rest_q, labels) + (1 - weight) * (1 - alpha)


def acceptance(logits: Tensor, labels: Labels) -> Tensor:
    """Σ min(p, q) at each position: how often a token drawn from the draft would be accepted."""
    log_q = _log_q(logits, labels)
    return _alpha(log_q, _rest_q(log_q, labels), labels)


def _kl(log_q: Tensor, rest_q: Tensor, labels: Labels) -> Tensor:
    p, rest_p = labels.probs, labels.rest
    listed = (p * (p.clamp(min=_MIN_P).log() - log_q)).sum(-1)
    return listed + rest_p * (rest_p.clamp(min=_MIN_P).log() - rest_q.log())


def _alpha(log_q: Tensor, rest_q: Tensor, labels: Labels) -> Tensor:
    return torch.minimum(labels.probs, log_q.exp()).sum(-1) + torch.minimum(labels.rest, rest_q)
