"""The training of a draft: steps, evaluation on held-out answers, checkpoints, and going on after a kill.

What a step sees depends on the seed and its number alone, and a checkpoint holds everything else, so that
an interrupted training ends in the same weights as one that ran through.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.core.errors import InputError, SettingError
from outrider.distill.checkpoint import Array, Checkpoint
from outrider.distill.corpus import Batch, Corpus, Text, batch_of
from outrider.distill.device import device_of, has_fast_half
from outrider.distill.losses import acceptance, loss_of
from outrider.distill.network import Network, causal
from outrider.distill.plan import Loss
from outrider.distill.worth import Predictions, Prices, worth_of

__all__ = ["Evaluation", "Trainer", "TrainingSettings"]

_CHECKPOINT = "checkpoint.pt"
_PARTIAL = "checkpoint.pt.partial"


OwnTexts = Callable[[Network, int], Sequence[Text]]
"""Texts that the draft continued itself, at a step; see `on_policy`."""


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """How a draft is trained. `batch_tokens`: of a step, padding included; `patience`: evaluations without
    a better one before training ends early."""

    steps: int
    batch_tokens: int = 8192
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    least_rate: float = 0.05
    """of the learning rate, at the last step"""
    weight_decay: float = 0.01
    clip: float = 1.0
    loss: Loss = "hybrid"
    on_policy: float = 0.0
    """share of the steps of the second half that train on the draft's own text"""
    evaluate_every: int = 200
    patience: int = 5
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A draft on held-out answers, after so many steps.

    `agreement`: share of positions of greedy answers where its likeliest token is the target's;
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


@dataclass(slots=True)
class _State:
    step: int = 0
    history: list[Evaluation] = field(default_factory=list)
    best_step: int = 0
    losses: list[float] = field(default_factory=list)
    """of the steps since the last evaluation"""
    last_loss: float = math.nan
    trained_tokens: int = 0
    """labelled positions of all steps"""


class Trainer:
    """One training of a draft in a folder, which may hold a checkpoint of it.

    Raises InputError when that checkpoint is damaged or of another training.
    """

    def __init__(
        self,
        start: Checkpoint,
        corpus: Corpus,
        held_out: Sequence[Text],
        prices: Prices,
        settings: TrainingSettings,
        folder: Path,
        *,
        own_texts: OwnTexts | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.settings = settings
        self.corpus = corpus
        self._held_out = held_out
        self._prices = prices
        self._folder = folder
        self._start = start
        self._own_texts = own_texts
        self.device = device or device_of()
        longest = max((len(text.tokens) for text in (*corpus.texts, *held_out)), default=1)
        self.network = Network.of(start, longest, dtype=torch.float32, device=self.device)
        for weight in self.network.weights.values():
            weight.requires_grad_()
        self._half = has_fast_half(self.device)
        self._optimizer = self._make_optimizer()
        self.state = _State()
        self._best: dict[str, Tensor] = self._copy()
        self._load()

    def _make_optimizer(self) -> torch.optim.Optimizer:
        weights = self.network.weights.values()
        groups = [
            {"params": [w for w in weights if w.dim() > 1], "weight_decay": self.settings.weight_decay},
            {"params": [w for w in weights if w.dim() == 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.settings.learning_rate, betas=(0.9, 0.95))

    @property
    def is_over(self) -> bool:
        """Whether all steps are done, or none of the last evaluations was a better one."""
        settings, state = self.settings, self.state
        since_best = sum(found.step > state.best_step for found in state.history)
        return state.step >= settings.steps or since_best >= settings.patience

    def run(self, told: Callable[[Trainer], None] | None = None) -> Checkpoint:
        """Train to the end; the best draft by expected tokens per second. `told` is called behind each step."""
        if not self.state.history:
            self._evaluate()
        batches = islice(self.corpus.batches(), self.state.step, None)
        while not self.is_over:
            self._step(next(batches))
            if self.state.step % self.settings.evaluate_every == 0 or self.state.step == self.settings.steps:
                self._evaluate()
                self.save()
            if told is not None:
                told(self)
        return self.best()

    def time_steps(self, count: int) -> float:
        """Median seconds of so many steps, which are lost: for a trainer that is thrown away."""
        times = []
        for numbers in islice(self.corpus.batches(), count):
            before = perf_counter()
            self._step(numbers)
            times.append(perf_counter() - before)
        return float(np.median(times[1:]))

    @property
    def trained_tokens(self) -> int:
        """Labelled positions that it was trained on, each as often as it was."""
        return self.state.trained_tokens

    def best(self) -> Checkpoint:
        """The best draft so far."""
        weights: dict[str, Array] = {name: w.cpu().numpy() for name, w in self._best.items()}
        return self._start.with_weights(self._start.shape, weights)

    def _step(self, numbers: Sequence[int]) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * _rate(self.state.step, self.settings)
        batch = batch_of(self._texts(numbers), self.device)
        loss = loss_of(self.settings.loss, self._logits(batch), batch.labels).mean()
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.weights.values(), self.settings.clip)
        self._optimizer.step()
        self.state.step += 1
        self.state.last_loss = float(loss.detach())
        self.state.losses.append(self.state.last_loss)
        self.state.trained_tokens += len(batch.places)

    def _texts(self, numbers: Sequence[int]) -> Sequence[Text]:
        """What the next step trains on: a batch of the target's answers, or texts of the draft's own."""
        step, settings = self.state.step, self.settings
        if self._own_texts is not None and 2 * step >= settings.steps:
            if np.random.default_rng((settings.seed, step)).random() < settings.on_policy:
                if texts := self._own_texts(self.network, step):
                    return texts
        return [self.corpus.texts[i] for i in numbers]

    def _logits(self, batch: Batch) -> Tensor:
        """Logits (labelled positions, vocabulary) of a batch."""
        positions = torch.arange(batch.tokens.shape[1], device=self.device).expand_as(batch.tokens)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._half):
            states = self.network.hidden(batch.tokens, positions, causal)
            return self.network.logits(states.flatten(0, 1)[batch.places])

    def _evaluate(self) -> None:
        found = evaluate(self._held_out, self._logits, self.settings, self._prices, self.device)
        state = self.state
        trained = float(np.mean(state.losses)) if state.losses else math.nan
        state.losses.clear()
        evaluation = Evaluation(state.step, trained, *found)
        if not state.history or evaluation.tokens_per_s > max(e.tokens_per_s for e in state.history):
            state.best_step = state.step
            self._best = self._copy()
        state.history.append(evaluation)

    def _copy(self) -> dict[str, Tensor]:
        return {name: weight.detach().clone() for name, weight in self.network.weights.items()}

    # Checkpoints

    def save(self) -> None:
        """Write the checkpoint, whole or not at all. Raises SettingError when the disk is full."""
        content = {
            "settings": asdict(self.settings),
            "weights": {name: w.detach() for name, w in self.network.weights.items()},
            "best": self._best,
            "optimizer": self._optimizer.state_dict(),
            "state": asdict(self.state),
        }
        partial = self._folder / _PARTIAL
        try:
            torch.save(content, partial)
            partial.replace(self._folder / _CHECKPOINT)
        except (OSError, RuntimeError) as error:
            partial.unlink(missing_ok=True)
            reason = f"the checkpoint could not be written ({error})"
            raise SettingError(
                str(self._folder), reason, "Free some space; training goes on from the last."
            ) from error

    def _load(self) -> None:
        path = self._folder / _CHECKPOINT
        if not path.exists():
            return
        try:
            content: dict[str, Any] = torch.load(path, map_location=self.device, weights_only=True)
            settings, weights = content["settings"], content["weights"]
        except Exception as error:
            raise InputError(
                str(path), f"it is damaged ({error})", "Remove it: training starts anew."
            ) from error
        if settings != asdict(self.settings):
            changed = ", ".join(k for k, v in asdict(self.settings).items() if settings.get(k) != v)
            reason = f"it is of a training with other settings ({changed})"
            raise InputError(str(path), reason, "Use the same settings, or another folder.")
        with torch.no_grad():
            for name, weight in self.network.weights.items():
                weight.copy_(weights[name])
        self._best = content["best"]
        self._optimizer.load_state_dict(content["optimizer"])
        state = content["state"]
        self.state = _State(**state | {"history": [Evaluation(**found) for found in state["history"]]})


def _rate(step: int, settings: TrainingSettings) -> float:
    """A linear start, then half a cosine down to `least_rate`."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(settings.steps - settings.warmup_steps, 1)
    return settings.least_rate + (1 - settings.least_rate) * (1 + math.cos(math.pi * done)) / 2


@torch.no_grad()
def evaluate(
    texts: Sequence[Text],
    logits_of: Callable[[Batch], Tensor],
    settings: TrainingSettings,
    prices: Prices,
    device: torch.device,
) -> tuple[float, float, float, float, float]:
    """Loss, acceptance, agreement, expected tokens per second and speed-up over held-out texts."""
    losses, alphas, answers = [], [], []
    for group in _groups(texts, settings.batch_tokens):
        batch = batch_of(group, device)
        logits = logits_of(batch)
        losses.append(loss_of(settings.loss, logits, batch.labels).cpu())
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


def _groups(texts: Sequence[Text], batch_tokens: int) -> Iterator[list[Text]]:
    ordered = sorted(texts, key=lambda text: len(text.tokens))
    group: list[Text] = []
    for text in ordered:
        if group and len(text.tokens) * (len(group) + 1) > batch_tokens:
            yield group
            group = []
        group.append(text)
    if group:
        yield group
