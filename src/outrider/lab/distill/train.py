"""The training of a draft: steps, evaluation on held-out answers, checkpoints, and resuming after a kill.

What a step sees depends on the seed and its number alone, and a checkpoint holds everything else, so that
an interrupted training ends in the same weights as one that ran through.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from outrider.core.errors import InputError, SettingError
from outrider.costs.expected_speed import StepCosts
from outrider.lab.distill.checkpoint import Array, Checkpoint
from outrider.lab.distill.corpus import Text, TrainingBatch, batch_of, batches
from outrider.lab.distill.evaluation import Evaluation, Predictions, evaluate, predictions_of, read_along
from outrider.lab.distill.losses import loss_of
from outrider.lab.distill.network import Network, device_of, has_fast_half

_ENDS = ("token_embd.weight", "output.weight")
_FINAL_RATE = 0.05
"""of the learning rate, at the last step"""
_WEIGHT_DECAY = 0.01
_MAX_NORM = 1.0
"""of a step's gradient"""
_ROUND_FROM = 0.5
"""of all steps: the later ones see the weights rounded as in the draft's file; evaluations always do"""

_PIECE_POSITIONS = 1024
"""whose logits are held at once: few enough for the caches, many enough for one addition to the gradients"""
_EVALUATED_RATIO = 0.1
"""of a training's time goes to evaluations at most"""
_PASS_RATIO = 1 / 3
"""of the time of a step over as many tokens"""
_LEAST_JUDGING = 16
"""texts"""


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """How a draft is trained: as `lab.distill.plan` has it, with evaluations between so many steps, and an
    early end after `patience` of them without a better one."""

    steps: int
    batch_tokens: int
    learning_rate: float
    on_policy: float = 0.0
    seed: int = 0
    quant: str = "F32"
    embedding_quant: str = "F32"
    evaluate_every: int = 200
    patience: int = 5

    def rate_at(self, step: int) -> float:
        """The learning rate at a step: a linear start, then half a cosine down to a part of it."""
        warmup = max(1, min(50, self.steps // 20))
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        done = (step - warmup) / max(self.steps - warmup, 1)
        share = _FINAL_RATE + (1 - _FINAL_RATE) * (1 + math.cos(math.pi * done)) / 2
        return self.learning_rate * share


def optimizer_of(weights: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    """AdamW, with weight decay for the layers' matrices alone.

    Muon needs fewer steps, but PyTorch's multiplies 16-bit floats, which takes a processor without
    instructions for them minutes a step.
    """
    layers = [weight for name, weight in weights.items() if weight.dim() > 1 and name not in _ENDS]
    others = [weight for name, weight in weights.items() if weight.dim() < 2 or name in _ENDS]
    groups = [{"params": layers, "weight_decay": _WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], betas=(0.9, 0.95))


ROUNDED = {"Q4_0": 8, "Q5_0": 16}
"""Quantizations of one scale for each 32 numbers, and the steps below zero that they have."""
_BLOCK = 32


def rounded(weight: Tensor, quantization: str) -> Tensor:
    """A matrix (outputs, inputs) as `quantization` would hold it; as it is where that is not known here, or
    where the inputs are no whole blocks. The gradient passes unchanged."""
    steps = ROUNDED.get(quantization)
    if steps is None or weight.dim() != 2 or weight.shape[1] % _BLOCK:
        return weight
    blocks = weight.detach().reshape(-1, _BLOCK)
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    scale = largest / -steps
    inverse = scale.reciprocal().nan_to_num(posinf=0.0, neginf=0.0)
    levels = (blocks * inverse + steps + 0.5).floor().clamp(0, 2 * steps - 1) - steps
    held = (levels * scale.half().float()).reshape(weight.shape)
    return weight + (held - weight).detach()


def _judging(held_out: Sequence[Text], settings: TrainingSettings) -> Sequence[Text]:
    evaluations = settings.steps / settings.evaluate_every + 1
    tokens = _EVALUATED_RATIO / _PASS_RATIO * settings.steps * settings.batch_tokens / evaluations
    every = math.ceil(sum(len(text.tokens) for text in held_out) / tokens)
    return held_out[:: max(1, min(every, len(held_out) // _LEAST_JUDGING))]


OwnTexts = Callable[[Network, int], Sequence[Text]]
"""Texts that the draft continued itself, at a step; see `on_policy`."""


@dataclass(slots=True)
class TrainingState:
    """Where a training is: all but its weights and optimizer. `losses` are those since the last evaluation,
    `trained_tokens` the labelled positions of all steps."""

    step: int = 0
    history: list[Evaluation] = field(default_factory=list)
    best_step: int = 0
    losses: list[float] = field(default_factory=list)
    last_loss: float = math.nan
    trained_tokens: int = 0


class Trainer:
    """One training of a draft, in a folder which may hold a checkpoint of it. Raises InputError when that
    checkpoint is damaged or of another training."""

    def __init__(
        self,
        start: Checkpoint,
        texts: Sequence[Text],
        held_out: Sequence[Text],
        costs: StepCosts,
        settings: TrainingSettings,
        folder: Path,
        *,
        own_texts: OwnTexts | None = None,
    ) -> None:
        self.settings = settings
        self._training = texts
        self._held_out = held_out
        self._judging = _judging(held_out, settings)
        self._costs = costs
        self._path = folder / "checkpoint.pt"
        self._start = start
        self._own_texts = own_texts
        self.device = device_of()
        self.network = Network.of(start, self.device)
        for weight in self.network.weights.values():
            weight.requires_grad_()
        self._half = has_fast_half(self.device)
        self._optimizer = optimizer_of(self.network.weights)
        self.state = TrainingState()
        self._best: dict[str, Tensor] = self._copy()
        self._load()

    @property
    def is_over(self) -> bool:
        """Whether all steps are done, or none of the last evaluations was a better one."""
        settings, state = self.settings, self.state
        since_best = sum(found.step > state.best_step for found in state.history)
        return state.step >= settings.steps or since_best >= settings.patience

    def run(self, on_step: Callable[[Trainer], None] = lambda _trainer: None) -> Checkpoint:
        """Train to the end: the best draft by expected tokens per second."""
        if not self.state.history:
            self._evaluate()
        groups = islice(self._batches(), self.state.step, None)
        while not self.is_over:
            self._step(next(groups))
            if self.state.step % self.settings.evaluate_every == 0 or self.state.step == self.settings.steps:
                self._evaluate()
                self.save()
            on_step(self)
        return self.best()

    def time_steps(self, count: int) -> list[float]:
        """Take the first steps, for a trainer that is thrown away; the seconds of each."""
        times = []
        for group in islice(self._batches(), count):
            before = perf_counter()
            self._step(group)
            times.append(perf_counter() - before)
        return times

    def best(self) -> Checkpoint:
        weights: dict[str, Array] = {name: w.cpu().numpy() for name, w in self._best.items()}
        return self._start.with_weights(self._start.shape, weights)

    def predictions(self) -> list[Predictions]:
        """What the best draft so far, rounded as in its file, predicts along the held-out greedy answers."""
        logits_of = partial(self._logits, network=self._as_written(self._best))
        read = read_along(self._held_out, logits_of, self.settings.batch_tokens, self.device)
        return [found for texts, logits, _ in read for found in predictions_of(texts, logits)]

    def _batches(self) -> Iterable[Sequence[Text]]:
        return batches(self._training, self.settings.batch_tokens, self.settings.seed)

    def _step(self, group: Sequence[Text]) -> None:
        batch = batch_of(self._own() or group, self.device)
        early = self.state.step < _ROUND_FROM * self.settings.steps
        loss = self._backward(batch, self.network if early else self._as_written())
        torch.nn.utils.clip_grad_norm_(self.network.weights.values(), _MAX_NORM)
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = self.settings.rate_at(self.state.step)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.state.step += 1
        self.state.last_loss = loss
        self.state.losses.append(loss)
        self.state.trained_tokens += len(batch.places)

    def _own(self) -> Sequence[Text]:
        step, settings = self.state.step, self.settings
        if self._own_texts is None or 2 * step < settings.steps:
            return ()
        is_drawn = np.random.default_rng((settings.seed, step)).random() < settings.on_policy
        return self._own_texts(self.network, step) if is_drawn else ()

    def _backward(self, batch: TrainingBatch, network: Network) -> float:
        """Add a batch's gradients to the weights'; its mean loss.

        The output layer is computed in pieces, forward and backward: the logits of a whole batch would fill
        more memory than everything else, and moving them would take longer than computing them.
        """
        with self._autocast():
            states = self._states(batch, network)
        ends = states.detach().requires_grad_()
        total = 0.0
        for at in range(0, len(ends), _PIECE_POSITIONS):
            piece = slice(at, at + _PIECE_POSITIONS)
            with self._autocast():
                logits = network.logits(ends[piece])
            loss = loss_of(logits, batch.labels.at(piece)).sum() / len(ends)
            loss.backward()
            total += float(loss.detach())
        states.backward(ends.grad)
        return total

    def _states(self, batch: TrainingBatch, network: Network) -> Tensor:
        return network.states(batch.tokens).flatten(0, 1)[batch.places]

    def _logits(self, batch: TrainingBatch, network: Network) -> Tensor:
        with self._autocast():
            return network.logits(self._states(batch, network))

    def _as_written(self, weights: Mapping[str, Tensor] | None = None) -> Network:
        """The draft with its weights (None: those in training) rounded as in its file."""
        layers, ends = self.settings.quant, self.settings.embedding_quant
        given = (weights or self.network.weights).items()
        held = {name: rounded(weight, ends if name in _ENDS else layers) for name, weight in given}
        return replace(self.network, weights=held)

    def _autocast(self) -> AbstractContextManager[None]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._half)  # type: ignore[no-any-return]

    def _evaluate(self) -> None:
        state, settings = self.state, self.settings
        logits_of = partial(self._logits, network=self._as_written())
        found = evaluate(self._judging, logits_of, settings.batch_tokens, self._costs, self.device)
        trained = float(np.mean(state.losses)) if state.losses else None
        state.losses.clear()
        found = replace(found, step=state.step, train_loss=trained)
        if not state.history or found.rank > max(e.rank for e in state.history):
            state.best_step = state.step
            self._best = self._copy()
        state.history.append(found)

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
        partial = self._path.with_name(f"{self._path.name}.partial")
        try:
            torch.save(content, partial)
            partial.replace(self._path)
        except (OSError, RuntimeError) as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            reason = f"the checkpoint could not be written ({error})"
            way_out = "Free some space; training goes on from the last."
            raise SettingError(str(self._path.parent), reason, way_out) from error

    def _load(self) -> None:
        if not self._path.exists():
            return
        path, settings = str(self._path), asdict(self.settings)
        try:
            content = torch.load(self._path, map_location=self.device, weights_only=True)
            if changed := [key for key, value in settings.items() if content["settings"].get(key) != value]:
                reason = f"it is of a training with other settings ({', '.join(changed)})"
                raise InputError(path, reason, "Use the same settings, or another folder.")
            with torch.no_grad():
                for name, weight in self.network.weights.items():
                    weight.copy_(content["weights"][name])
            self._best = content["best"]
            self._optimizer.load_state_dict(content["optimizer"])
            history = [Evaluation(**found) for found in content["state"]["history"]]
            self.state = TrainingState(**content["state"] | {"history": history})
        except InputError:
            raise
        except Exception as error:  # torch.load raises whatever its parts do
            way_out = "Remove it: training starts again."
            raise InputError(path, f"it is damaged, or of another draft ({error})", way_out) from error
