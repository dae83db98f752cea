"""The kinds of model that the tests of the Model contract run over, and what each can forget."""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.contracts import RewindKind


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of model. `arch` is empty for one that the fake alone has; `on_ik`: whether
    ik_llama.cpp runs it; `slow`: its tests are left out of the quick ones."""

    arch: str
    rewind: RewindKind
    full_window: bool = True
    mtp_layers: int = 0
    on_ik: bool = False
    slow: bool = False


KINDS = {
    "dense": Kind("llama", "free", on_ik=True),
    "experts": Kind("qwen2moe", "free", on_ik=True),
    "chosen experts": Kind("qwen3moe", "free", on_ik=True, slow=True),
    "balanced experts": Kind("glm4moe", "free", on_ik=True, slow=True),
    "experts and a head": Kind("glm4moe", "free", mtp_layers=1, slow=True),
    "whole window": Kind("gemma3", "free", on_ik=True),
    "window": Kind("gemma3", "window", full_window=False),
    "recurrent": Kind("mamba", "checkpoints"),
    "recurrent of heads": Kind("mamba2", "checkpoints", slow=True),
    "token shift": Kind("rwkv6", "checkpoints", slow=True),
    "token shift and delta rule": Kind("rwkv7", "checkpoints", slow=True),
    "hybrid": Kind("jamba", "checkpoints"),
    "parallel hybrid": Kind("falcon-h1", "checkpoints", slow=True),
    "hybrid of heads": Kind("granitehybrid", "checkpoints", slow=True),
    "layers of three kinds": Kind("nemotron_h", "checkpoints", slow=True),
    "delta net": Kind("qwen35", "checkpoints"),
    "delta net of experts and a head": Kind("qwen3next", "checkpoints", mtp_layers=1, slow=True),
    "convolution": Kind("lfm2", "checkpoints"),
    "unforgetting": Kind("", "none"),
}


def kinds_with(*rewinds: RewindKind) -> Sequence[str]:
    """The kinds that are taken back in these ways."""
    return [name for name, kind in KINDS.items() if kind.rewind in rewinds]


FREE, CHECKPOINTS, UNFORGETTING = kinds_with("free"), kinds_with("checkpoints"), kinds_with("none")
