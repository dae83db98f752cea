"""What a draft is worth on held-out answers: its loss, its agreement, its expected speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.distill.corpus import Batch, Text, batch_of
from outrider.distill.losses import acceptance, loss_of
from outrider.distill.plan import Loss
from outrider.distill.worth import Predictions, Prices, worth_of

__all__ = ["Evaluation", "evaluate", "grouped", "predictions_of"]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A draft on held-out answers, after so many steps.

    `agreement`: share of positions of greedy answers where its most likely token is the target's;
    `acceptance`: mean Σ min(p, q), over all; `loss`: that of training, over all; `tokens_per_s` and
    `speedup` as expected at the measured costs.
    """

    step: int
    train_loss: float
    loss: float
    acceptance: float
    agreement: float
    tokens_per_s: float
    speedup: float

    @property
    def rank(self) -> tuple[float, float]:
        """The higher, the better: expected speed, and where no draft pays at these costs, agreement."""
        return self.tokens_per_s, self.agreement


def evaluate(
    texts: Sequence[Text],
    logits_of: Callable[[Batch], Tensor],
    loss: Loss,
    batch_tokens: int,
    prices: Prices,
    device: torch.device,
) -> tuple[float, float, float, float, float]:
    """Loss, acceptance, agreement, expected tokens per second and speed-up over held-out texts.

    `logits_of` gives logits (labelled positions, vocabulary) of a batch of up to `batch_tokens`.
    """
    losses, alphas, answers = [], [], []
    with torch.no_grad():
        for group in grouped(texts, batch_tokens):
            batch = batch_of(group, device)
            logits = logits_of(batch)
            losses.append(loss_of(loss, logits, batch.labels).cpu())
            alphas.append(acceptance(logits, batch.labels).cpu())
            answers += predictions_of(group, logits)
    worth = worth_of(answers, prices)
    matches = np.concatenate([answer.matches for answer in answers]) if answers else np.zeros(1)
    mean = [float(torch.cat(values).mean()) if values else math.nan for values in (losses, alphas)]
    return mean[0], mean[1], float(matches.mean()), worth.tokens_per_s, worth.speedup


def predictions_of(texts: Sequence[Text], logits: Tensor) -> list[Predictions]:
    """What a draft with these logits, one row a labelled position, predicts along the greedy texts."""
    probs, best = logits.float().softmax(-1).max(-1)
    found: list[Predictions] = []
    at = 0
    for text in texts:
        size = len(text.ids)
        if text.is_greedy:
            tokens = best[at : at + size].cpu().numpy()
            confidences = probs[at : at + size].cpu().numpy()
            # The last column of a text's ids is the token that stands for those it does not know.
            foreign = (tokens == text.ids[:, -1]) & text.has_other
            target = text.ids[:, 0]
            found.append(Predictions(np.where(foreign, 0, confidences), (tokens == target) & ~foreign))
        at += size
    return found


def grouped(texts: Sequence[Text], batch_tokens: int) -> Iterator[list[Text]]:
    """Texts of like length together, up to so many tokens with their padding."""
    ordered = sorted(texts, key=lambda text: len(text.tokens))
    group: list[Text] = []
    for text in ordered:
        if group and len(text.tokens) * (len(group) + 1) > batch_tokens:
            yield group
            group = []
        group.append(text)
    if group:
        yield group
