"""The training of a draft: steps, evaluation on held-out answers, checkpoints, and going on after a kill.

What a step sees depends on the seed and its number alone, and a checkpoint holds everything else, so that
an interrupted training ends in the same weights as one that ran through.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from outrider.distill.checkpoint import Array, Checkpoint
from outrider.distill.corpus import Batch, Corpus, Text, batch_of
from outrider.distill.device import device_of, has_fast_half
from outrider.distill.evaluation import Evaluation, evaluate, grouped, predictions_of
from outrider.distill.losses import loss_of
from outrider.distill.network import Network, causal
from outrider.distill.rounding import rounded
from outrider.distill.schedule import TrainingSettings, optimizers_of, rate_at
from outrider.distill.training_file import read_training, write_training
from outrider.distill.worth import Predictions, Prices

__all__ = ["Evaluation", "Trainer", "TrainingSettings"]

_CHECKPOINT = "checkpoint.pt"

_PIECE_POSITIONS = 1024
"""whose logits are held at once: few enough for the caches, many enough for one addition to the gradients"""

OwnTexts = Callable[[Network, int], Sequence[Text]]
"""Texts that the draft continued itself, at a step; see `on_policy`."""


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
        self._optimizers = optimizers_of(self.network.weights, settings)
        self.state = _State()
        self._best: dict[str, Tensor] = self._copy()
        self._load()

    @property
    def is_over(self) -> bool:
        """Whether all steps are done, or none of the last evaluations was a better one."""
        settings, state = self.settings, self.state
        since_best = sum(found.step > state.best_step for found in state.history)
        return state.step >= settings.steps or since_best >= settings.patience

    def run(self, told: Callable[[Trainer], None] | None = None) -> Checkpoint:
        """Train to the end: the best draft by expected tokens per second. `told` is called behind each
        step."""
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

    def time_steps(self, count: int) -> list[float]:
        """Seconds of the first steps, which are lost: for a trainer that is thrown away."""
        times = []
        for numbers in islice(self.corpus.batches(), count):
            before = perf_counter()
            self._step(numbers)
            times.append(perf_counter() - before)
        return times

    @property
    def trained_tokens(self) -> int:
        """Labelled positions that it was trained on, each as often as it was."""
        return self.state.trained_tokens

    def best(self) -> Checkpoint:
        """The best draft so far."""
        weights: dict[str, Array] = {name: w.cpu().numpy() for name, w in self._best.items()}
        return self._start.with_weights(self._start.shape, weights)

    def predictions(self) -> list[Predictions]:
        """What the best draft so far, rounded as in its file, predicts along the held-out greedy answers."""
        network = self._as_written(self._best)
        found: list[Predictions] = []
        with torch.no_grad():
            for group in grouped(self._held_out, self.settings.batch_tokens):
                found += predictions_of(group, self._logits(batch_of(group, self.device), network))
        return found

    def _step(self, numbers: Sequence[int]) -> None:
        batch = batch_of(self._texts(numbers), self.device)
        early = self.state.step < self.settings.round_from * self.settings.steps
        loss = self._backward(batch, self.network if early else self._as_written())
        torch.nn.utils.clip_grad_norm_(self.network.weights.values(), self.settings.clip)
        rate = self.settings.learning_rate * rate_at(self.state.step, self.settings)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.state.step += 1
        self.state.last_loss = loss
        self.state.losses.append(loss)
        self.state.trained_tokens += len(batch.places)

    def _backward(self, batch: Batch, network: Network) -> float:
        """Add a batch's gradients to the weights'; its mean loss.

        The output layer is gone through in pieces, forth and back: the logits of a whole batch would fill
        more memory than everything else, and moving them would take longer than computing them.
        """
        states = self._states(batch, network)
        ends = states.detach().requires_grad_()
        total, size = 0.0, len(batch.places)
        for at in range(0, size, _PIECE_POSITIONS):
            piece = slice(at, at + _PIECE_POSITIONS)
            with self._autocast():
                logits = network.logits(ends[piece])
            loss = loss_of(self.settings.loss, logits, batch.labels.at(piece)).sum() / size
            loss.backward()
            total += float(loss.detach())
        states.backward(ends.grad)
        return total

    def _texts(self, numbers: Sequence[int]) -> Sequence[Text]:
        """What the next step trains on: a batch of the target's answers, or texts of the draft's own."""
        step, settings = self.state.step, self.settings
        is_late = 2 * step >= settings.steps
        texts: Sequence[Text] = ()
        if self._own_texts is not None and is_late and self._chance(step) < settings.on_policy:
            texts = self._own_texts(self.network, step)
        return texts or [self.corpus.texts[i] for i in numbers]

    def _chance(self, step: int) -> float:
        return float(np.random.default_rng((self.settings.seed, step)).random())

    def _as_written(self, weights: Mapping[str, Tensor] | None = None) -> Network:
        """The draft with its weights (None: those in training) rounded as in its file."""
        settings, weights = self.settings, weights or self.network.weights

        def kind(name: str) -> str:
            is_embedding = name in ("token_embd.weight", "output.weight")
            return settings.embedding_quantization if is_embedding else settings.quantization

        return self.network.with_weights({name: rounded(w, kind(name)) for name, w in weights.items()})

    def _autocast(self) -> AbstractContextManager[None]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._half)  # type: ignore[no-any-return]

    def _states(self, batch: Batch, network: Network) -> Tensor:
        """The last states (labelled positions, width) of a batch."""
        network.reach(batch.tokens.shape[1])
        positions = torch.arange(batch.tokens.shape[1], device=self.device).expand_as(batch.tokens)
        with self._autocast():
            states = network.hidden(batch.tokens, positions, causal)
            return states.flatten(0, 1)[batch.places]

    def _logits(self, batch: Batch, network: Network) -> Tensor:
        """Logits (labelled positions, vocabulary) of a batch."""
        states = self._states(batch, network)
        with self._autocast():
            return network.logits(states)

    def _evaluate(self) -> None:
        state, settings = self.state, self.settings
        with torch.no_grad():
            logits_of = partial(self._logits, network=self._as_written())
        found = evaluate(
            self._held_out, logits_of, settings.loss, settings.batch_tokens, self._prices, self.device
        )
        trained = float(np.mean(state.losses)) if state.losses else math.nan
        state.losses.clear()
        evaluation = Evaluation(state.step, trained, *found)
        if not state.history or evaluation.rank > max(e.rank for e in state.history):
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
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "state": asdict(self.state),
        }
        write_training(self._folder / _CHECKPOINT, content)

    def _load(self) -> None:
        path = self._folder / _CHECKPOINT
        if not path.exists():
            return
        content = read_training(path, asdict(self.settings), self.network.weights, self.device)
        with torch.no_grad():
            for name, weight in self.network.weights.items():
                weight.copy_(content["weights"][name])
        self._best = content["best"]
        for optimizer, held in zip(self._optimizers, content["optimizers"], strict=True):
            optimizer.load_state_dict(held)
        state = content["state"]
        self.state = _State(**state | {"history": [Evaluation(**found) for found in state["history"]]})
