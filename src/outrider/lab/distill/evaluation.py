"""How good a draft is on held-out answers: its loss, its agreement, its expected speed at measured costs.

A draft that is right more often is not always faster: what counts is how many tokens in a row are right, and
what the calls cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.backends.gguf.options import LoadOptions
from outrider.backends.tuning.curves import costs_of
from outrider.costs import CallCosts
from outrider.costs.calibrate import Rows
from outrider.costs.expected_speed import StepCosts
from outrider.lab.distill.corpus import Labels, Text, TrainingBatch, acceptance, batch_of, loss_of, packed
from outrider.models.gguf import read_card
from outrider.session.loading import load_weights

_CONTEXT_TOKENS = 256
"""An answer's usual distance from its prompt's start; costs hardly depend on it for small models."""
_MAX_DRAFTED = 16
_DRAFT_SECONDS = 5.0


def measure_costs(target: Path, draft: Path, options: LoadOptions) -> StepCosts:
    """Costs of a target's calls and of a step of the draft in the file `draft`, weights untrained or not.
    Raises BackendError when a call fails."""
    large = _curve(target, options, "all")
    small = _curve(draft, options, "last", seconds=_DRAFT_SECONDS, fresh=True)
    target_s = [large.call_s(n, context=_CONTEXT_TOKENS) for n in range(1, _MAX_DRAFTED + 2)]
    return StepCosts(target_s, small.call_s(1, context=_CONTEXT_TOKENS))


def _curve(path: Path, options: LoadOptions, rows: Rows, **measured: Any) -> CallCosts:
    with closing(load_weights(read_card(path), options, draft=rows == "last", measure=True)) as weights:
        return costs_of(weights.open(2 * _CONTEXT_TOKENS), rows=rows, **measured)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The draft after so many steps, on the held-out answers.

    `loss`: that of training, over all; `acceptance`: mean Σ min(p, q), over all; `agreement`: share of
    positions of greedy answers where its most likely token is the target's; `speedup`: expected at the
    measured costs.
    """

    step: int
    loss: float
    acceptance: float
    agreement: float
    speedup: float

    @property
    def rank(self) -> tuple[float, float]:
        """The higher, the better: expected speed, and where no draft pays at these costs, agreement."""
        return self.speedup, self.agreement


@dataclass(frozen=True, slots=True)
class Predictions:
    """A draft's predictions along one greedy answer of the target, each given the answer up to there.

    `confidences` (answer,): the probability of its most likely token, 0 where that is one it does not
    know; `matches` (answer,): whether that token is the target's.
    """

    confidences: npt.NDArray[np.float32]
    matches: npt.NDArray[np.bool_]


def expected_speedup(answers: Sequence[Predictions], costs: StepCosts) -> float:
    """Over plain decoding, of drafts of the best length that begin at each position of the answers."""
    positions = sum(len(answer.matches) for answer in answers)
    accepted = np.zeros(len(costs.target_s) - 1)
    for answer in answers:
        are_right = answer.matches
        for ahead in range(min(len(accepted), len(are_right))):
            # of drafts that begin so near the end that fewer tokens fit, none is so long
            run = answer.matches[ahead:]
            are_right = are_right[: len(run)] & run
            accepted[ahead] += are_right.sum()
    return costs.best_speedup_along((accepted / max(positions, 1)).tolist())


LogitsOf = Callable[[TrainingBatch], Tensor]
"""Logits (positions, vocabulary) at a batch's labelled positions."""


def read_along(
    texts: Sequence[Text], logits_of: LogitsOf, batch_tokens: int, device: torch.device
) -> Iterator[tuple[list[Text], Tensor, Labels]]:
    """Texts of like length together, with a draft's logits and the labels at all their positions."""
    for group in packed(sorted(texts, key=lambda text: len(text.tokens)), batch_tokens):
        batch = batch_of(group, device)
        with torch.no_grad():
            logits = logits_of(batch)
        yield group, logits, batch.labels


def evaluate(
    texts: Sequence[Text], logits_of: LogitsOf, batch_tokens: int, costs: StepCosts, device: torch.device
) -> Evaluation:
    """Judge a draft on held-out texts, agreement and speed on the greedy ones; its step is 0."""
    losses: list[Tensor] = []
    alphas: list[Tensor] = []
    answers: list[Predictions] = []
    for group, logits, labels in read_along(texts, logits_of, batch_tokens, device):
        losses.append(loss_of(logits, labels).cpu())
        alphas.append(acceptance(logits, labels).cpu())
        answers += predictions_of(group, logits)
    matches = np.concatenate([answer.matches for answer in answers]) if answers else np.zeros(1)
    return Evaluation(
        step=0,
        loss=float(torch.cat(losses).mean()) if losses else math.nan,
        acceptance=float(torch.cat(alphas).mean()) if alphas else math.nan,
        agreement=float(matches.mean()),
        speedup=expected_speedup(answers, costs),
    )


def predictions_of(texts: Sequence[Text], logits: Tensor) -> list[Predictions]:
    """What a draft predicts along the greedy texts, given its logits at each labelled position of all."""
    found: list[Predictions] = []
    best = logits.float().softmax(-1).max(-1)
    confidences, tokens = best.values.cpu().numpy(), best.indices.cpu().numpy()
    at = 0
    for text in texts:
        end = at + len(text.ids)
        if text.is_greedy:
            # The last column of a text's ids is `<|other|>`, for those it does not know.
            unknown = (tokens[at:end] == text.ids[:, -1]) & text.has_other
            matches = (tokens[at:end] == text.ids[:, 0]) & ~unknown
            found.append(Predictions(np.where(unknown, 0, confidences[at:end]), matches))
        at = end
    return found
