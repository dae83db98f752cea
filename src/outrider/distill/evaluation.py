"""How good a draft is on held-out answers: its loss, its agreement, its expected speed at measured costs.

A draft that is right more often is not always faster: what counts is whether it is right where it is
confident, and what the calls cost. Its predictions along the target's own answers are known, and a draft
goes on as long as the product of its confidences stays above a threshold, up to a length. The best pair of
threshold and length is taken, as a policy would find it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
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
from outrider.costs.timer import Rows
from outrider.distill.corpus import Text, TrainingBatch, batch_of, packed
from outrider.distill.losses import Labels, acceptance, loss_of
from outrider.distill.plan import Loss, kept
from outrider.distill.report import Evaluation
from outrider.lab.models import ModelFile
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


@dataclass(frozen=True, slots=True)
class StepCosts:
    """`target_s[n - 1]`: seconds of a target call over n tokens, `draft_s`: of a step of the draft."""

    target_s: tuple[float, ...]
    draft_s: float


def measure_costs(target: ModelFile, draft: Path, stored: Path, threads: int) -> StepCosts:
    """Costs of a target's calls and of a step of the draft in the file `draft`, weights untrained or not.

    Taken from `stored` where they were written there before: the choice of the best draft depends on them,
    and a run that is resumed must choose as it began. Raises InputError when that file is damaged,
    BackendError when a call fails.
    """

    def measured() -> dict[str, Any]:
        options = LoadOptions(threads=threads)
        large = _curve(target.path, options, "all")
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
    weights = load_weights(path, read_card(path), options, [], draft=rows == "last")
    try:
        return costs_of(weights.open(2 * _CONTEXT_TOKENS), rows=rows, **measured)[0]
    finally:
        weights.close()


# Expected speed


@dataclass(frozen=True, slots=True)
class Predictions:
    """A draft's predictions along one greedy answer of the target, each given the answer up to there.

    `confidences` (answer,): the probability of its most likely token, 0 where that is one it does not know;
    `matches` (answer,): whether that token is the target's.
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
    """Expected speed over some answers, each of which starts after its own prompt: all are replayed at once
    for every threshold and greatest length of a draft."""
    plain = 1 / costs.target_s[0]
    best = ExpectedSpeed(plain, plain)
    sizes = np.array([len(answer.matches) for answer in answers], dtype=np.int64)
    limit = len(costs.target_s) - 1
    num_tokens = int(sizes.sum())
    if not num_tokens or not limit:
        return best
    ends = np.cumsum(sizes)
    places = np.arange(num_tokens)
    wrong = np.where(np.concatenate([answer.matches for answer in answers]), num_tokens, places)
    correct = np.minimum.accumulate(wrong[::-1])[::-1] - places
    """tokens in a row that are correct from each place on; these may run past an answer's end"""
    confidences = np.concatenate([answer.confidences for answer in answers]).astype(np.float64)
    prefixes = np.zeros((limit, num_tokens))
    """products of the confidences of 1, 2, ... tokens from each place on, as far as there are any"""
    product = np.ones(num_tokens)
    for ahead in range(min(limit, num_tokens)):
        product[: num_tokens - ahead] *= confidences[ahead:]
        prefixes[ahead] = product
    for threshold in THRESHOLDS:
        confident = (prefixes >= threshold).sum(0)
        replayed_s = _replayed(ends - sizes, ends, confident, correct, costs)
        for longest, seconds in enumerate(replayed_s.tolist(), start=1):
            if (speed := num_tokens / seconds) > best.tokens_per_s:
                best = ExpectedSpeed(speed, plain, threshold, longest)
    return best


def _replayed(starts: Ints, ends: Ints, confident: Ints, correct: Ints, costs: StepCosts) -> Floats:
    """Seconds (longest draft - 1) of all answers together; at each place so many tokens are `confident` and
    `correct`."""
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


def evaluate(
    texts: Sequence[Text],
    logits_of: Callable[[TrainingBatch], Tensor],
    loss: Loss,
    batch_tokens: int,
    costs: StepCosts,
    device: torch.device,
) -> Evaluation:
    """The draft on held-out texts, its step not said. `logits_of` gives logits (labelled positions,
    vocabulary) of a batch of up to `batch_tokens`."""
    losses, alphas, answers = [], [], []
    with torch.no_grad():
        for labels, logits, found in predicted(texts, logits_of, batch_tokens, device):
            losses.append(loss_of(loss, logits, labels).cpu())
            alphas.append(acceptance(logits, labels).cpu())
            answers += found
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
    logits_of: Callable[[TrainingBatch], Tensor],
    batch_tokens: int,
    device: torch.device,
) -> Iterator[tuple[Labels, Tensor, list[Predictions]]]:
    """Labels, logits and predictions of the draft, batch by batch, texts of like length together."""
    lengths = np.array([len(text.tokens) for text in texts], dtype=np.int64)
    for numbers in packed(lengths, np.argsort(lengths, kind="stable"), batch_tokens):
        group = [texts[i] for i in numbers]
        batch = batch_of(group, device)
        logits = logits_of(batch)
        yield batch.labels, logits, predictions_of(group, logits)


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
            # The last column of a text's ids is `<|other|>`, for those it does not know.
            unknown = (tokens == text.ids[:, -1]) & text.has_other
            target = text.ids[:, 0]
            found.append(Predictions(np.where(unknown, 0, confidences), (tokens == target) & ~unknown))
        at += size
    return found
