"""How good a draft is on held-out answers: its loss, its agreement, its expected speed at measured costs.

A draft that is right more often is not always faster: what counts is whether it is right where it is
confident, and what the calls cost. Its predictions along the target's own answers are known, and a draft
goes on as long as the product of its confidences stays above a threshold, up to a length. The best pair of
threshold and length is taken, as a policy would find it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.backends.gguf import LoadOptions
from outrider.backends.tuning.scoring import costs_of
from outrider.costs import CallCosts
from outrider.costs.expected_speed import StepCosts
from outrider.costs.timer import Rows
from outrider.lab.distill.corpus import Text, TrainingBatch, batch_of, packed
from outrider.lab.distill.losses import Labels, acceptance, loss_of
from outrider.lab.distill.plan import kept
from outrider.lab.distill.report import Evaluation
from outrider.models import read_card
from outrider.session.loading import load_weights

THRESHOLDS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)

_CONTEXT_TOKENS = 256
"""An answer's usual distance from its prompt's start; costs hardly depend on it for small models."""
_MAX_DRAFTED = 16
_DRAFT_SECONDS = 5.0

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


# Costs


def measure_costs(target: Path, draft: Path, stored: Path, options: LoadOptions) -> StepCosts:
    """Costs of a target's calls and of a step of the draft in the file `draft`, weights untrained or not.

    Taken from `stored` where they were written there before: the choice of the best draft depends on them,
    and a run that is resumed must choose as it began. Raises InputError when that file is damaged,
    BackendError when a call fails.
    """

    def measured() -> dict[str, Any]:
        large = _curve(target, options, "all")
        small = _curve(draft, options, "last", seconds=_DRAFT_SECONDS, fresh=True)
        sizes = range(1, _MAX_DRAFTED + 2)
        return {
            "target_s": [large.call_s(n, context=_CONTEXT_TOKENS) for n in sizes],
            "draft_s": small.call_s(1, context=_CONTEXT_TOKENS),
        }

    def read(found: Any) -> StepCosts:
        return StepCosts(tuple(map(float, found["target_s"])), float(found["draft_s"]))

    return kept(stored, measured, read, "prices", "Remove it: the costs are measured again.")


def _curve(path: Path, options: LoadOptions, rows: Rows, **measured: Any) -> CallCosts:
    with closing(load_weights(read_card(path), options, draft=rows == "last", measure=True)) as weights:
        return costs_of(weights.open(2 * _CONTEXT_TOKENS), rows=rows, **measured)


# Expected speed


@dataclass(frozen=True, slots=True)
class Predictions:
    """A draft's predictions along one greedy answer of the target, each given the answer up to there.

    `confidences` (answer,): the probability of its most likely token, 0 where that is one it does not
    know; `matches` (answer,): whether that token is the target's.
    """

    confidences: npt.NDArray[np.float32]
    matches: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ExpectedSpeed:
    """A draft's speed on some answers at the best threshold and length; that of plain decoding where no pair
    pays.

    `longest`: tokens of the longest draft that is allowed, 0 for none.
    """

    tokens_per_s: float
    plain_tokens_per_s: float
    threshold: float = 1.0
    longest: int = 0

    @property
    def speedup(self) -> float:
        """Over plain decoding."""
        return self.tokens_per_s / self.plain_tokens_per_s


def expected_speed(answers: Sequence[Predictions], costs: StepCosts) -> ExpectedSpeed:
    """The speed on some answers: they are replayed at once for every threshold and longest draft, and the
    best pair is taken."""
    plain = 1 / costs.target_s[0]
    best = ExpectedSpeed(plain, plain)
    sizes = np.array([len(answer.matches) for answer in answers], dtype=np.int64)
    limit = len(costs.target_s) - 1
    num_tokens = int(sizes.sum())
    if not num_tokens or not limit:
        return best
    ends = np.cumsum(sizes)
    matches = np.concatenate([answer.matches for answer in answers])
    confidences = np.concatenate([answer.confidences for answer in answers]).astype(np.float64)
    correct = np.zeros(num_tokens, dtype=np.int64)
    """tokens in a row that are correct from each position on; these may run past an answer's end"""
    prefixes = np.zeros((limit, num_tokens))
    """products of the confidences of 1, 2, ... tokens from each position on, as far as there are any"""
    product, are_correct = np.ones(num_tokens), np.ones(num_tokens, dtype=bool)
    for ahead in range(min(limit, num_tokens)):
        product[: num_tokens - ahead] *= confidences[ahead:]
        prefixes[ahead] = product
        are_correct = are_correct[: num_tokens - ahead] & matches[ahead:]
        correct[: num_tokens - ahead] += are_correct
    for threshold in THRESHOLDS:
        confident = (prefixes >= threshold).sum(0)
        replayed_s = _replayed(ends - sizes, ends, confident, correct, costs)
        for longest, seconds in enumerate(replayed_s.tolist(), start=1):
            if (speed := num_tokens / seconds) > best.tokens_per_s:
                best = ExpectedSpeed(speed, plain, threshold, longest)
    return best


def _replayed(starts: Ints, ends: Ints, confident: Ints, correct: Ints, costs: StepCosts) -> Floats:
    """Seconds that all answers take together, by the longest draft that is allowed: (limit,), from 1 on.

    Args:
        starts: Each answer's first position.
        ends: The position after its last.
        confident: Tokens that the draft is confident enough of, from each position on.
        correct: Tokens in a row that are the target's, from each position on.
        costs: Of calls.
    """
    target_s = np.array(costs.target_s)
    limit = len(target_s) - 1
    at, end = np.repeat(starts, limit), np.repeat(ends, limit)
    longest = np.tile(np.arange(1, limit + 1), len(starts))
    found = np.zeros(limit)
    while (going := at < end).any():
        at, end, longest = at[going], end[going], longest[going]
        room = np.minimum(longest, end - at - 1)
        length = np.minimum(confident[at], room)
        # The step whose confidence ends a draft is made as well.
        spent_s = target_s[length] + (length + (length < room)) * costs.draft_s
        found += np.bincount(longest - 1, spent_s, minlength=limit)
        at = at + np.minimum(correct[at], length) + 1
    return found


# Held-out answers


LogitsOf = Callable[[TrainingBatch], Tensor]
"""Logits (positions, vocabulary) at a batch's labelled positions."""


def evaluate(
    texts: Sequence[Text],
    logits_of: LogitsOf,
    batch_tokens: int,
    costs: StepCosts,
    device: torch.device,
) -> Evaluation:
    """Judge a draft on held-out texts.

    Args:
        texts: All that are to be read; agreement and speed are of the greedy ones.
        logits_of: The draft.
        batch_tokens: Of a call, padding included.
        costs: Of calls, for the expected speed.
        device: Where the draft is.

    Returns: What was found; its step is 0, and its training loss not known.
    """
    losses: list[Tensor] = []
    alphas: list[Tensor] = []

    def judge(logits: Tensor, labels: Labels) -> None:
        losses.append(loss_of(logits, labels).cpu())
        alphas.append(acceptance(logits, labels).cpu())

    answers = predicted(texts, logits_of, batch_tokens, device, judge)
    speed = expected_speed(answers, costs)
    matches = np.concatenate([answer.matches for answer in answers]) if answers else np.zeros(1)
    return Evaluation(
        step=0,
        train_loss=None,
        loss=float(torch.cat(losses).mean()) if losses else math.nan,
        acceptance=float(torch.cat(alphas).mean()) if alphas else math.nan,
        agreement=float(matches.mean()),
        tokens_per_s=speed.tokens_per_s,
        speedup=speed.speedup,
    )


def predicted(
    texts: Sequence[Text],
    logits_of: LogitsOf,
    batch_tokens: int,
    device: torch.device,
    judge: Callable[[Tensor, Labels], None] = lambda _logits, _labels: None,
) -> list[Predictions]:
    """The draft's predictions along the greedy texts, those of like length together. `judge` is called with
    each batch's logits and labels."""
    found: list[Predictions] = []
    with torch.no_grad():
        for group in packed(sorted(texts, key=lambda text: len(text.tokens)), batch_tokens):
            batch = batch_of(group, device)
            logits = logits_of(batch)
            judge(logits, batch.labels)
            found += predictions_of(group, *logits.float().softmax(-1).max(-1))
    return found


def predictions_of(texts: Sequence[Text], confidences: Tensor, tokens: Tensor) -> list[Predictions]:
    """What a draft predicts along the greedy texts, given its most likely token at each labelled position
    and that one's probability."""
    found: list[Predictions] = []
    at = 0
    for text in texts:
        size = len(text.ids)
        if text.is_greedy:
            drafted, sure = (part[at : at + size].cpu().numpy() for part in (tokens, confidences))
            # The last column of a text's ids is `<|other|>`, for those it does not know.
            unknown = (drafted == text.ids[:, -1]) & text.has_other
            found.append(Predictions(np.where(unknown, 0, sure), (drafted == text.ids[:, 0]) & ~unknown))
        at += size
    return found
