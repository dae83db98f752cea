"""Who makes the target's calls while its answers are recorded: llama.cpp, or PyTorch where it is faster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from outrider.backends.gguf import GgufModel, LoadOptions
from outrider.core.contracts import Model
from outrider.core.errors import ModelFileError
from outrider.distill.checkpoint import ARCHITECTURES, read_gguf
from outrider.distill.device import device_of, has_fast_half
from outrider.distill.network import Network
from outrider.distill.plan import DistillPlan
from outrider.distill.torch_model import TorchModel
from outrider.lab.loaded import LoadedTarget
from outrider.lab.models import ModelFile
from outrider.session.loading import load_weights, template_of

__all__ = ["Teacher", "open_teacher"]

_AT_ONCE = {"llama.cpp": 32, "torch": 192}
"""Answers under way at once: llama.cpp's calls grow with every token, PyTorch's hardly do at first."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """A target that answers: `target` encodes and constrains, `model` makes the calls; `told`: which, and
    why."""

    target: LoadedTarget
    model: Model
    told: str

    def rest(self) -> None:
        """No more calls: free all but what is needed to read tokens."""
        self.model.close()


@contextmanager
def open_teacher(file: ModelFile, plan: DistillPlan, notices: list[str]) -> Iterator[Teacher]:
    """The target of a plan, open for its answers. Raises ModelFileError or OutOfMemory."""
    uses_torch, why = _choose(file, plan)
    at_once = plan.data.parallel or _AT_ONCE["torch" if uses_torch else "llama.cpp"]
    weights = load_weights(file.path, file.card, LoadOptions(threads=plan.threads), notices)
    try:
        length = min(plan.context, weights.trained_context)
        native = weights.open(length, max_sequences=1 if uses_torch else at_once)
        target = LoadedTarget(file.name, native, template_of(weights, file.card))
        model: Model = native
        if uses_torch:
            model = _in_torch(file, native, at_once, length)
        yield Teacher(target, model, why)
    finally:
        weights.close()


def _choose(file: ModelFile, plan: DistillPlan) -> tuple[bool, str]:
    if plan.data.teacher == "llama.cpp":
        return False, "llama.cpp answers, as asked"
    if file.card.architecture not in ARCHITECTURES:
        if plan.data.teacher == "torch":
            known = ", ".join(ARCHITECTURES)
            reason = f"PyTorch runs no {file.card.architecture} here (known: {known})"
            raise ModelFileError(str(file.path), reason, "Leave out --teacher torch.")
        return False, f"llama.cpp answers: PyTorch runs no {file.card.architecture} here"
    if plan.data.teacher == "torch":
        return True, "PyTorch answers, as asked"
    device = device_of()
    if has_fast_half(device):
        return True, f"PyTorch answers: on this {device.type} its batches are faster than llama.cpp's"
    return False, "llama.cpp answers: this machine has no fast 16-bit products for PyTorch"


def _in_torch(file: ModelFile, native: GgufModel, at_once: int, length: int) -> TorchModel:
    device = device_of()
    dtype = torch.bfloat16 if has_fast_half(device) else torch.float32
    network = Network.of(read_gguf(file.path), length + 1, dtype=dtype, device=device)
    return TorchModel(file.name, network, native.vocabulary, at_once, length)
