"""The target's answers as a draft is trained on them, in its own token ids and in batches of like length, and
how far a draft's distributions are from the target's along them.

A target's distribution is known by its K most likely tokens and what is left for the rest, which is taken
as one more token. p is the target's, q the draft's, and α = Σ min(p, q) the acceptance at a position: the
share of sampled drafts that are accepted (Leviathan et al. 2023, arXiv 2211.17192, section 3.2). The loss is
λ KL(p || q) + (1 - λ)(1 - α) with λ = exp(-3 α): far from the target KL pulls, near it acceptance itself is
what counts (speculators, "lk_hybrid").
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import log_softmax, pad
from torch.nn.utils.rnn import pad_sequence

from outrider.costs.expected_speed import StepCosts
from outrider.lab.distill.answers import Example
from outrider.models.vocab.subset import Subset

_HYBRID_RATE = 3.0
_MIN_P = 1e-9
_MIN_Q = 1e-7
"""about the rounding of 1 - Σ q in 32 bits"""


@dataclass(frozen=True, slots=True)
class Text:
    """One answer after its prompt, in the draft's ids. `tokens` (prompt and answer but its last token) are
    read; at the last `len(ids)` of them the target's distribution is known: `ids` and `probs` (answer, K + 1;
    the last column is `<|other|>`), `rest` (answer,). `has_other`: whether that column counts."""

    tokens: npt.NDArray[np.int32]
    ids: npt.NDArray[np.int32]
    probs: npt.NDArray[np.float16]
    rest: npt.NDArray[np.float16]
    is_greedy: bool
    has_other: bool


def text_of(example: Example, subset: Subset, max_tokens: int) -> Text | None:
    """An example in the draft's ids, cut to its last `max_tokens`; None when nothing of it is left."""
    known = subset.to_draft[example.ids]
    probs = np.exp(example.log_probs.astype(np.float32))
    rest = example.rest.astype(np.float32)
    total = probs.sum(-1) + rest  # the rounding of what is stored is evened out
    probs, rest = probs / total[:, None], rest / total
    other = np.zeros(len(rest), dtype=np.float32)
    other_id = subset.size - 1
    if subset.has_other:
        unknown = known == other_id
        other = (probs * unknown).sum(-1)
        probs = np.where(unknown, 0, probs)
    ids = np.concatenate([known, np.full((len(rest), 1), other_id)], axis=1).astype(np.int32)
    probs = np.concatenate([probs, other[:, None]], axis=1).astype(np.float16)
    tokens = subset.to_draft[np.concatenate([example.prompt, example.answer[:-1]])].astype(np.int32)
    size = min(len(ids), max_tokens)
    if not size:
        return None
    return Text(
        tokens[-max_tokens:], ids[-size:], probs[-size:], rest[-size:].astype(np.float16),
        example.temperature == 0, subset.has_other,
    )  # fmt: skip


def batches(texts: Sequence[Text], batch_tokens: int, seed: int) -> Iterator[list[Text]]:
    """Texts of like length together, so that little is padding, epoch after epoch without an end; the order
    depends on the seed alone."""
    lengths = np.array([len(text.tokens) for text in texts])
    epoch = 0
    while texts:
        random = np.random.default_rng((seed, epoch))
        # Lengths are blurred, so that the same texts do not meet in every epoch.
        blurred = lengths * random.uniform(0.9, 1.1, len(lengths))
        found = packed([texts[i] for i in np.argsort(blurred)], batch_tokens)
        yield from (found[i] for i in random.permutation(len(found)))
        epoch += 1


def packed(texts: Iterable[Text], batch_tokens: int) -> list[list[Text]]:
    """Texts, taken in this order, in batches of up to `batch_tokens` with their padding."""
    found: list[list[Text]] = []
    longest = 0
    for text in texts:
        longest = max(longest, len(text.tokens))
        if not found or longest * (len(found[-1]) + 1) > batch_tokens:
            found.append([])
            longest = len(text.tokens)
        found[-1].append(text)
    return found


@dataclass(frozen=True, slots=True)
class Labels:
    """The target's distributions at n positions, in the draft's ids: `ids` (n, K) int64, distinct in a row
    but for entries of no probability; `probs` (n, K) and `rest` (n,) sum to 1 together."""

    ids: Tensor
    probs: Tensor
    rest: Tensor

    def at(self, positions: slice) -> Labels:
        return Labels(self.ids[positions], self.probs[positions], self.rest[positions])


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Texts side by side: `tokens` (texts, longest) padded at the end, the labels of all their positions in
    the order of the texts, and where these positions are, as indices into the flattened `tokens`."""

    tokens: Tensor
    places: Tensor
    labels: Labels


def batch_of(texts: Sequence[Text], device: torch.device) -> TrainingBatch:
    """Texts as tensors on a device."""
    tokens = pad_sequence([torch.from_numpy(text.tokens).long() for text in texts], batch_first=True)
    ends = [row * tokens.shape[1] + len(text.tokens) for row, text in enumerate(texts)]
    places = [torch.arange(end - len(text.ids), end) for text, end in zip(texts, ends, strict=True)]
    widest = max(text.ids.shape[1] for text in texts)

    def joined(arrays: Iterable[npt.NDArray[Any]]) -> Tensor:
        return torch.cat(
            [pad(found, (0, widest - found.shape[1])) for found in map(torch.from_numpy, arrays)]
        )

    labels = Labels(
        joined(text.ids for text in texts).long().to(device),
        joined(text.probs for text in texts).float().to(device),
        torch.from_numpy(np.concatenate([text.rest for text in texts])).float().to(device),
    )
    return TrainingBatch(tokens.to(device), torch.cat(places).to(device), labels)


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
    log_q = log_softmax(logits, dim=-1, dtype=torch.float32).gather(-1, labels.ids)
    q = log_q.exp()
    rest_q = 1 - (q * (labels.probs > 0)).sum(-1)
    # Raised without touching its gradient: a draft that has nothing left for the rest must still learn it.
    rest_q = rest_q + (rest_q.clamp(min=_MIN_Q) - rest_q).detach()
    return log_q, rest_q, torch.minimum(labels.probs, q).sum(-1) + torch.minimum(labels.rest, rest_q)


# How good a draft is on held-out answers. One that is right more often is not always faster: what counts is
# how many tokens in a row are right, and what the calls cost.


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The draft after so many steps, on the held-out answers: its `loss` and `acceptance` (mean Σ min(p, q))
    over all; over the greedy ones `agreement`, how often its most likely token is the target's, and the
    `speedup` expected at the measured costs."""

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
    """A draft's predictions along one greedy answer: `confidences` (answer,), the probability of its most
    likely token, 0 where that is one it does not know; `matches` (answer,): whether that is the target's."""

    confidences: npt.NDArray[np.float32]
    matches: npt.NDArray[np.bool_]


def expected_speedup(answers: Sequence[Predictions], costs: StepCosts) -> float:
    """Over plain decoding, of drafts of the best length that begin at each position of the answers."""
    positions = sum(len(answer.matches) for answer in answers)
    accepted = np.zeros(len(costs.lengths))
    for answer in answers:
        are_right = answer.matches
        for ahead in range(min(len(accepted), len(are_right))):
            # of drafts that begin so near the end that fewer tokens fit, none is so long
            run = answer.matches[ahead:]
            are_right = are_right[: len(run)] & run
            accepted[ahead] += are_right.sum()
    tokens = 1 + (accepted / max(positions, 1)).cumsum()
    return max([1.0, *(float(tokens[n - 1]) / costs.ratio(n) for n in costs.lengths)])


def evaluate(read: Iterable[tuple[Sequence[Text], Tensor, Labels]], costs: StepCosts) -> Evaluation:
    """Judge a draft by its logits (positions, vocabulary) and the labels at all labelled positions of some
    held-out texts, agreement and speed on the greedy ones; its step is 0."""
    losses: list[Tensor] = []
    alphas: list[Tensor] = []
    answers: list[Predictions] = []
    for group, logits, labels in read:
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
