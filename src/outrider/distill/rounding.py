"""What a file's quantization makes of a weight, so that training can reckon with it.

The forward pass takes the rounded weights, the gradient goes to the ones behind them as if nothing had been
rounded (the straight-through estimator: Bengio et al. 2013, arXiv 1308.3432). A draft that is trained so in
its last steps loses next to nothing when it is written.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["ROUNDED", "rounded"]

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
