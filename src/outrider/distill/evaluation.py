"""What a draft is worth on held-out answers: its loss, its agreement, its expected speed at measured costs.

A draft that is right more often is not always faster: what counts is whether it is right where it is
confident, and what the calls cost. Its predictions along the target's own answers are known, and a draft
goes on as long as the product of its confidences stays above a threshold, up to a length. The best pair of
threshold and length is taken, as a policy would find it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.backends.gguf import LoadOptions
from outrider.backends.tuning import costs_of
from outrider.core.errors import InputError
from outrider.core.files import write_whole
from outrider.costs import CallCosts
from outrider.costs.calibrate import Rows
from outrider.distill.corpus import Batch, Text, batch_of
from outrider.distill.losses import acceptance, loss_of
from outrider.distill.plan import Loss
from outrider.lab.models import ModelFile
from outrider.models import read_card
from outrider.session.loading import load_weights

THRESHOLDS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)

_CONTEXT_TOKENS = 256
"""An answer's usual distance from its prompt's start; costs hardly depend on it for small models."""
_MAX_DRAFTED = 16
_DRAFT_SECONDS = 5.0


# Costs


@dataclass(frozen=True, slots=True)
class StepCosts:
    """`target_s[n - 1]`: seconds of a target call over n tokens, `draft_s`: of a step of the draft."""

    target_s: tuple[float, ...]
    draft_s: float

    @property
    def max_draft(self) -> int:
        """The longest draft whose verification has a known cost."""
        return len(self.target_s) - 1


def measure_costs(target: ModelFile, draft: Path, stored: Path, threads: int) -> StepCosts:
    """Costs of a target's calls and of a step of the draft in the file `draft`, weights untrained or not.

    Taken from `stored` where they were written there before: the choice of the best draft depends on them,
    and a run that is resumed must choose as it began. Raises InputError when that file is damaged,
    BackendError when a call fails.
    """
    if stored.exists():
        try:
            found = json.loads(stored.read_text(encoding="utf-8"))
            return StepCosts(tuple(map(float, found["target_s"])), float(found["draft_s"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                str(stored), f"it is damaged ({error})", "Remove it: prices are measured anew."
            ) from error
    options = LoadOptions(threads=threads)
    large = _curve(target.path, options, "all", None)
    small = _curve(draft, options, "last", _DRAFT_SECONDS)
    costs = StepCosts(
        tuple(large.call_s(n + 1, context=_CONTEXT_TOKENS) for n in range(_MAX_DRAFTED + 1)),
        small.call_s(1, context=_CONTEXT_TOKENS),
    )
    write_whole(stored, json.dumps(asdict(costs)) + "\n", "prices")
    return costs


def _curve(path: Path, options: LoadOptions, rows: Rows, seconds: float | None) -> CallCosts:
    weights = load_weights(path, read_card(path), options, [], draft=rows == "last")
    try:
        model = weights.open(2 * _CONTEXT_TOKENS)
        if seconds is None:
            return costs_of(model, rows=rows)[0]
        return costs_of(model, rows=rows, seconds=seconds, fresh=True)[0]
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

    `longest`: tokens of the longest draft that is allowed, 0 for none; `accepted` / `drafted`: tokens.
    """

    tokens_per_s: float
    plain_tokens_per_s: float
    threshold: float
    longest: int
    drafted: int
    accepted: int

    @property
    def speedup(self) -> float:
        """Over plain decoding."""
        return self.tokens_per_s / self.plain_tokens_per_s

    @property
    def acceptance(self) -> float:
        """Accepted tokens of those drafted, 0-1; 0 where none are."""
        return self.accepted / self.drafted if self.drafted else 0.0


def expected_speed(answers: Sequence[Predictions], costs: StepCosts) -> ExpectedSpeed:
    """Expected speed over some answers, each of which starts after its own prompt."""
    plain = 1 / costs.target_s[0]
    best = ExpectedSpeed(plain, plain, 1.0, 0, 0, 0)
    if not sum(len(answer.matches) for answer in answers) or not costs.max_draft:
        return best
    replay = _Replay(answers, costs)
    for threshold in THRESHOLDS:
        for longest, (seconds, drafted, accepted) in enumerate(replay.totals(threshold).tolist(), start=1):
            speed = replay.num_tokens / seconds
            if speed > best.tokens_per_s:
                best = ExpectedSpeed(speed, plain, threshold, longest, round(drafted), round(accepted))
    return best


class _Replay:
    """All answers one after the other, replayed at once for every greatest length of a draft."""

    def __init__(self, answers: Sequence[Predictions], costs: StepCosts) -> None:
        sizes = np.array([len(answer.matches) for answer in answers])
        self._ends = np.cumsum(sizes)
        self._starts = self._ends - sizes
        self.num_tokens = int(self._ends[-1])
        self._target_s = np.array(costs.target_s)
        self._draft_s = costs.draft_s
        self._confidences = np.concatenate([answer.confidences for answer in answers]).astype(np.float64)
        places = np.arange(self.num_tokens)
        wrong = np.where(np.concatenate([answer.matches for answer in answers]), self.num_tokens, places)
        self._correct = np.minimum.accumulate(wrong[::-1])[::-1] - places
        """tokens in a row that are correct from each place on; these may run past an answer's end"""

    def totals(self, threshold: float) -> npt.NDArray[np.float64]:
        """Seconds, drafted and accepted tokens (longest draft - 1, 3) of all answers."""
        limit = len(self._target_s) - 1
        confident = self._confident(threshold, limit)
        at, end = np.repeat(self._starts, limit), np.repeat(self._ends, limit)
        longest = np.tile(np.arange(1, limit + 1), len(self._starts))
        found = np.zeros((limit, 3))
        while (going := at < end).any():
            at, end, longest = at[going], end[going], longest[going]
            room = np.minimum(longest, end - at - 1)
            length = np.minimum(confident[at], room)
            # The step whose confidence ends a draft is made as well.
            spent_s = self._target_s[length] + (length + (length < room)) * self._draft_s
            accepted = np.minimum(self._correct[at], length)
            for column, values in enumerate((spent_s, length, accepted)):
                found[:, column] += np.bincount(longest - 1, values, minlength=limit)
            at = at + accepted + 1
        return found

    def _confident(self, threshold: float, limit: int) -> npt.NDArray[np.int64]:
        """How many tokens from each place on are drafted until the product of confidences is too small."""
        products = np.ones(self.num_tokens)
        confident = np.zeros(self.num_tokens, dtype=np.int64)
        for ahead in range(min(limit, self.num_tokens)):
            products[: self.num_tokens - ahead] *= self._confidences[ahead:]
            products[self.num_tokens - ahead :] = 0
            confident += products >= threshold
        return confident


# Held-out answers


def evaluate(
    texts: Sequence[Text],
    logits_of: Callable[[Batch], Tensor],
    loss: Loss,
    batch_tokens: int,
    costs: StepCosts,
    device: torch.device,
) -> tuple[float, float, float, float, float]:
    """Loss, acceptance, agreement, expected tokens per second and speed-up over held-out texts: what
    `report.Evaluation` explains. `logits_of` gives logits (labelled positions, vocabulary) of a batch of up
    to `batch_tokens`."""
    losses, alphas, answers = [], [], []
    with torch.no_grad():
        for group in grouped(texts, batch_tokens):
            batch = batch_of(group, device)
            logits = logits_of(batch)
            losses.append(loss_of(loss, logits, batch.labels).cpu())
            alphas.append(acceptance(logits, batch.labels).cpu())
            answers += predictions_of(group, logits)
    speed = expected_speed(answers, costs)
    matches = np.concatenate([answer.matches for answer in answers]) if answers else np.zeros(1)
    mean = [float(torch.cat(values).mean()) if values else math.nan for values in (losses, alphas)]
    return mean[0], mean[1], float(matches.mean()), speed.tokens_per_s, speed.speedup


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
            unknown = (tokens == text.ids[:, -1]) & text.has_other
            target = text.ids[:, 0]
            found.append(Predictions(np.where(unknown, 0, confidences), (tokens == target) & ~unknown))
        at += size
    return found


def grouped(texts: Sequence[Text], batch_tokens: int) -> Iterator[list[Text]]:
    """Texts of like length together, up to so many tokens with their padding."""
    group: list[Text] = []
    for text in sorted(texts, key=lambda text: len(text.tokens)):
        if group and len(text.tokens) * (len(group) + 1) > batch_tokens:
            yield group
            group = []
        group.append(text)
    if group:
        yield group
