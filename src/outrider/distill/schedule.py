"""How a draft is trained: the settings, the rate of learning at each step, the optimizers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.distill.plan import Loss

__all__ = ["TrainingSettings", "optimizers_of", "rate_at"]


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
    quantization: str = "F32"
    """of the file that the draft will be written to, and of its embedding: evaluations see the weights as
    they will be there, and so do the steps behind `round_from` of all"""
    embedding_quantization: str = "F32"
    round_from: float = 0.5
    evaluate_every: int = 200
    patience: int = 5
    seed: int = 0


def optimizers_of(
    weights: Mapping[str, Tensor], settings: TrainingSettings
) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the layers' matrices (Jordan et al. 2024), scaled so that AdamW's rate suits it (Liu et al.
    2025, arXiv 2502.16982, section 2.2); AdamW for embeddings, norms and biases."""
    layers = [w for name, w in weights.items() if w.dim() > 1 and name.startswith("blk.")]
    others = [w for name, w in weights.items() if w.dim() < 2 or not name.startswith("blk.")]
    rate = settings.learning_rate
    muon = torch.optim.Muon(
        layers, lr=rate, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    return muon, torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)


def rate_at(step: int, settings: TrainingSettings) -> float:
    """A linear start, then half a cosine down to `least_rate`."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(settings.steps - settings.warmup_steps, 1)
    return settings.least_rate + (1 - settings.least_rate) * (1 + math.cos(math.pi * done)) / 2
