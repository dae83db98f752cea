"""The training of a draft: steps, and evaluations on held-out answers, of which the best is kept. With a
number of steps its outcome depends on the seed alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.core.contracts import Model
from outrider.core.data import Logits
from outrider.costs.expected_speed import StepCosts
from outrider.lab.comparison import teacher_forced
from outrider.lab.distill.answers import MIN_LOG, Example, Tokens
from outrider.lab.distill.checkpoint import Array, Checkpoint
from outrider.lab.distill.corpus import (
    Evaluation,
    Labels,
    Predictions,
    Text,
    TrainingBatch,
    batch_of,
    batches,
    evaluate,
    loss_of,
    packed,
    predictions_of,
    text_of,
)
from outrider.lab.distill.network import Cache, Network, device_of, has_fast_half
from outrider.lab.distill.plan import USUAL_MINUTES, Training
from outrider.models.vocab.subset import Subset

_ENDS = ("token_embd.weight", "output.weight")
_WARM_UP = 0.05
"""of a training, in which the learning rate rises"""
_FINAL_RATE = 0.05
"""of the learning rate, at the end"""
_WEIGHT_DECAY = 0.01
_MAX_NORM = 1.0
"""of a step's gradient"""
_ROUND_FROM = 0.5
"""of a training: then weights are seen rounded as in the draft's file; evaluations always see them so"""
_PIECE_POSITIONS = 1024
"""whose logits are held at once: few enough for the caches, many enough for one addition to the gradients"""
_JUDGED = 128
"""texts that an evaluation in between reads"""
_EVALUATIONS = 12
"""of a training that is not ended early"""
_PATIENCE = 5
"""evaluations without a better one, which end it"""
_CONTINUED_TOKENS = 24
"""More than is ever drafted at once on most machines."""


def rate_at(done: float) -> float:
    """The learning rate as a part of the highest, by the part of the training that is done: a linear start,
    then half a cosine."""
    if done < _WARM_UP:
        return max(done / _WARM_UP, _WARM_UP)
    left = (1 + math.cos(math.pi * (done - _WARM_UP) / (1 - _WARM_UP))) / 2
    return _FINAL_RATE + (1 - _FINAL_RATE) * left


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


# The draft's own text: it continues the target's answers, and the target's most likely tokens there are the
# labels. DistillSpec (arXiv 2310.08461, section 4) found this to matter more than any choice of loss. Under
# exact verification a draft is verified after what the target accepted, so it is a share of the steps here.


def top_tokens(rows: Logits, top: int) -> tuple[Tokens, npt.NDArray[np.float16], npt.NDArray[np.float16]]:
    """Of rows of logits (n, vocabulary): the `top` most likely tokens (n, top), the natural logarithms
    of their probabilities (n, top), and the probability of all others together (n,)."""
    logits = torch.from_numpy(rows)
    found = logits.topk(min(top, rows.shape[1]), dim=-1)
    log_probs = found.values - logits.logsumexp(-1, keepdim=True)
    others = (1 - log_probs.exp().sum(-1)).clamp(min=0)
    clamped = log_probs.clamp(min=MIN_LOG)
    return found.indices.to(torch.int32).numpy(), clamped.half().numpy(), others.half().numpy()


@dataclass(frozen=True, slots=True)
class OnPolicy:
    """Texts that the draft itself continued from the beginnings of `examples`, `num_texts` of up to
    `max_tokens` for a step. The target labels them in its first sequence, which is empty before and after."""

    examples: Sequence[Example]
    target: Model
    subset: Subset
    num_texts: int
    max_tokens: int
    seed: int

    def texts(self, network: Network, step: int) -> list[Text]:
        """What the draft makes of some answers' beginnings; depends on the seed, the step and its weights.
        Empty where no answer has two tokens."""
        examples = [example for example in self.examples if len(example.answer) > 1]
        if not examples:
            return []
        random = np.random.default_rng((self.seed, step, 1))
        picked = [examples[i] for i in random.integers(len(examples), size=self.num_texts)]
        max_tokens = min(self.max_tokens, self.target.context_length)
        begun = []
        for example in picked:
            cut = int(random.integers(len(example.answer)))
            tokens = np.concatenate([example.prompt, example.answer[:cut]])
            begun.append(tokens[-max(1, max_tokens - _CONTINUED_TOKENS) :])
        found = []
        for example, tokens, own in zip(picked, begun, self._continue(network, begun, random), strict=True):
            labelled = text_of(self._label(example, tokens, own), self.subset, max_tokens)
            if labelled is not None:
                found.append(labelled)
        return found

    def _continue(
        self, network: Network, begun: Sequence[Tokens], random: np.random.Generator
    ) -> list[list[int]]:
        """Tokens drawn from the draft after each beginning, in the target's ids, up to an end token."""
        subset, ends = self.subset, self.target.vocabulary.ends_generation
        longest = max(map(len, begun))
        device = network.weights["token_embd.weight"].device
        cache = Cache(torch.tensor([longest - len(tokens) for tokens in begun], device=device))
        new = np.zeros((len(begun), longest), dtype=np.int64)
        for line, tokens in zip(new, begun, strict=True):
            line[longest - len(tokens) :] = subset.to_draft[tokens]
        drawn = np.zeros((len(begun), 0), dtype=np.int64)
        for _ in range(_CONTINUED_TOKENS):
            with torch.inference_mode():
                states = network.states(torch.from_numpy(new).to(device), cache)
                logits = network.logits(states[:, -1]).double().cpu()
                if subset.has_other:
                    logits[:, -1] = -torch.inf
                sums = logits.softmax(-1).cumsum(-1).numpy()
            places = random.random(len(begun)) * sums[:, -1]
            new = (sums <= places[:, None]).sum(axis=1, keepdims=True)
            drawn = np.concatenate([drawn, new], axis=1)
        texts = []
        for tokens in subset.to_target[drawn].tolist():
            last = next((i for i, token in enumerate(tokens, 1) if ends(token)), len(tokens))
            texts.append(tokens[:last])
        return texts

    def _label(self, example: Example, begun: Tokens, own: Sequence[int]) -> Example:
        tokens = (*begun.tolist(), *own[:-1])
        found = teacher_forced(self.target, tokens, len(begun) - 1)
        rows = np.concatenate([rows.copy() for rows in found])
        self.target.truncate(0, 0)
        ids, log_probs, others = top_tokens(rows, example.ids.shape[1])
        return replace(
            example, prompt=begun, answer=np.asarray(own, dtype=np.int32),
            ids=ids, log_probs=log_probs, rest=others, temperature=1.0,
        )  # fmt: skip


# The training


@dataclass(eq=False)
class Trainer:
    """One training of a draft, whose file has these `quantizations` of its layers and ends. `trained_tokens`
    are the labelled positions of all steps."""

    start: Checkpoint
    texts: Sequence[Text]
    held_out: Sequence[Text]
    costs: StepCosts
    wanted: Training
    quantizations: tuple[str, str] = ("F32", "F32")
    own: OnPolicy | None = None

    def __post_init__(self) -> None:
        self.step = self.best_step = self.trained_tokens = 0
        self.history: list[Evaluation] = []
        self.last_loss = math.nan
        self.device = device_of()
        self.network = Network.of(self.start, self.device)
        for weight in self.network.weights.values():
            weight.requires_grad_()
        self._groups = batches(self.texts, self.wanted.batch_tokens, self.wanted.seed)
        self._judged = self.held_out[:: max(1, len(self.held_out) // _JUDGED)]
        self._half = has_fast_half(self.device)
        self._optimizer = optimizer_of(self.network.weights)
        self._best: dict[str, Tensor] = {}
        self._began = perf_counter()

    @property
    def done(self) -> float:
        if self.wanted.steps:
            return self.step / self.wanted.steps
        seconds = 60 * (self.wanted.minutes or USUAL_MINUTES)
        return min((perf_counter() - self._began) / seconds, 1.0)

    def run(self, on_step: Callable[[Trainer], None] = lambda _trainer: None) -> Checkpoint:
        """Train to the end: the best draft by expected tokens per second. What `on_step` raises ends it, and
        leaves the best so far."""
        self._began = perf_counter()
        self._evaluate()
        done = 0.0
        while done < 1 and sum(found.step > self.best_step for found in self.history) < _PATIENCE:
            self._step(next(self._groups), done)
            before, done = done, self.done
            if int(done * _EVALUATIONS) > int(before * _EVALUATIONS):
                self._evaluate()
            on_step(self)
        return self.best()

    def best(self) -> Checkpoint:
        weights: dict[str, Array] = {name: w.cpu().numpy() for name, w in self._best.items()}
        return self.start.with_weights(self.start.shape, weights)

    def predictions(self) -> list[Predictions]:
        read = self._read(self.held_out, self._best)
        return [found for texts, logits, _ in read for found in predictions_of(texts, logits)]

    def _step(self, group: Sequence[Text], done: float) -> None:
        batch = batch_of(self._own(done) or group, self.device)
        network = self.network if done < _ROUND_FROM else self._as_written(self.network.weights)
        self.last_loss = self._backward(batch, network)
        torch.nn.utils.clip_grad_norm_(self.network.weights.values(), _MAX_NORM)
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = self.wanted.learning_rate * rate_at(done)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.trained_tokens += len(batch.places)

    def _own(self, done: float) -> Sequence[Text]:
        if self.own is None or done < 0.5:
            return ()
        is_drawn = np.random.default_rng((self.wanted.seed, self.step)).random() < self.wanted.on_policy
        return self.own.texts(self.network, self.step) if is_drawn else ()

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

    def _read(
        self, texts: Sequence[Text], weights: Mapping[str, Tensor]
    ) -> Iterator[tuple[list[Text], Tensor, Labels]]:
        """Texts of like length together, with what the draft's file would say and the labels."""
        network = self._as_written(weights)
        for group in packed(sorted(texts, key=lambda text: len(text.tokens)), self.wanted.batch_tokens):
            batch = batch_of(group, self.device)
            with torch.no_grad(), self._autocast():
                logits = network.logits(self._states(batch, network))
            yield group, logits, batch.labels

    def _as_written(self, weights: Mapping[str, Tensor]) -> Network:
        layers, ends = self.quantizations
        held = {name: rounded(weight, ends if name in _ENDS else layers) for name, weight in weights.items()}
        return replace(self.network, weights=held)

    def _autocast(self) -> AbstractContextManager[None]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._half)  # type: ignore[no-any-return]

    def _evaluate(self) -> None:
        read = self._read(self._judged, self.network.weights)
        found = replace(evaluate(read, self.costs), step=self.step)
        if not self.history or found.rank > max(each.rank for each in self.history):
            self.best_step = self.step
            self._best = {name: weight.detach().clone() for name, weight in self.network.weights.items()}
        self.history.append(found)
