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


def loss_of(logits: Tensor, labels: Labels) -> Tensor:
    """The loss at each of n positions, of logits (n, vocabulary)."""
    log_q, rest_q, alpha = _compared(logits, labels)
    p, rest_p = labels.probs, labels.rest
    kl = (p * (p.clamp(min=_MIN_P).log() - log_q)).sum(-1)
    kl = kl + rest_p * (rest_p.clamp(min=_MIN_P).log() - rest_q.log())
    weight = torch.exp(-_HYBRID_RATE * alpha.detach())
    return weight * kl + (1 - weight) * (1 - alpha)


def acceptance(logits: Tensor, labels: Labels) -> Tensor:
    """Σ min(p, q) at each position: how often a token drawn from the draft would be accepted."""
    return _compared(logits, labels)[2]


def _compared(logits: Tensor, labels: Labels) -> tuple[Tensor, Tensor, Tensor]:
    """The draft's log probabilities of the labelled tokens (n, K), its probability of the rest (n,), and
    Σ min(p, q) (n,)."""
    # One kernel each way: logsumexp alone would take longer backwards than the whole network.
    log_q = functional.log_softmax(logits, dim=-1, dtype=torch.float32).gather(-1, labels.ids)
    q = log_q.exp()
    rest_q = 1 - (q * (labels.probs > 0)).sum(-1)
    # Raised without touching its gradient: a draft that has nothing left for the rest must still learn it.
    rest_q = rest_q + (rest_q.clamp(min=_MIN_Q) - rest_q).detach()
    return log_q, rest_q, torch.minimum(labels.probs, q).sum(-1) + torch.minimum(labels.rest, rest_q)
