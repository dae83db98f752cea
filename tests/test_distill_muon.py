"""The optimizer of a draft's matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

# What is imported below needs it, and it need not be installed.
# ruff: noqa: E402
torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tiny products take longer on more

from torch.utils._python_dispatch import TorchDispatchMode

from outrider.lab.distill.muon import Muon, orthogonal
from outrider.lab.distill.train import TrainingSettings, optimizers_of


def drawn(seed: int, *shape: int) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).float()


@given(st.integers(1, 24), st.integers(1, 24), st.integers(0, 9), st.floats(1e-6, 1e6))
def test_singular_values_become_alike_and_vectors_stay(
    rows: int, columns: int, seed: int, scale: float
) -> None:
    matrix = drawn(seed, rows, columns)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    made = left.T @ orthogonal(scale * matrix) @ right.T
    alike = values > 0.1 * values.norm()
    found = made.diagonal()[alike]
    assert ((found > 0.6) & (found < 1.3)).all()
    assert (made - made.diagonal().diag()).abs().max() < 1e-3


def test_nothing_becomes_nothing() -> None:
    assert not orthogonal(torch.zeros(3, 5)).any()


@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (16, 16)])
def test_steps_are_those_of_the_optimizer_that_pytorch_has(shape: tuple[int, int]) -> None:
    # But for the rounding of that one's 16-bit floats.
    ours, theirs = (torch.nn.Parameter(drawn(1, *shape)) for _ in range(2))
    both = (
        Muon([ours], lr=0.01, weight_decay=0.1),
        torch.optim.Muon([theirs], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    )
    for step in range(4):
        before = theirs.detach().clone()
        for weight, optimizer in zip((ours, theirs), both, strict=True):
            weight.grad = drawn(step + 2, *shape)
            optimizer.step()
        moved = (theirs.detach() - before).norm()
        assert (ours.detach() - theirs.detach()).norm() < 0.05 * moved


def test_a_weight_without_a_gradient_stays() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3))
    Muon([weight], lr=1.0, weight_decay=0.5).step()
    assert (weight == 1).all()


def test_no_step_multiplies_16_bit_floats() -> None:
    # On processors without instructions for them one product of a small model's matrix took seconds.
    kinds: set[object] = set()

    class Products(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "mm" in func.__name__:
                kinds.update(argument.dtype for argument in args if isinstance(argument, torch.Tensor))
            return func(*args, **(kwargs or {}))

    weights = {
        "blk.0.ffn_up.weight": drawn(0, 8, 4),
        "token_embd.weight": drawn(1, 9, 4),
        "norm": drawn(2, 4),
    }
    for weight in weights.values():
        weight.grad = torch.ones_like(weight)
    with Products():
        for optimizer in optimizers_of(weights, TrainingSettings(steps=1)):
            optimizer.step()
    assert kinds == {torch.float32}
