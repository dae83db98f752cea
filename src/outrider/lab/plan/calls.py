"""The cost model: how long a call takes, from the bytes that it moves and the operations that it does.

A call over n tokens for each of b sequences, with c tokens stored of each, on D devices:

(1) Bytes. The dense weights once, the experts that n·b tokens are expected to use, K and V of each sequence
    once, and the logits written and read: B = W + e(n·b)·W_e + b·KV(c) + 2·2·n·b·V.
(2) Operations. Two for each parameter that a token uses, and 4·h·c for its attention:
    O = n·b·(2·P + 4·h·(c + n/2)).
(3) One device takes t = ((B / bandwidth)^p + (O / operations)^p)^(1/p): both at once where p is large
    (Williams et al., "Roofline", 2009), one after the other where it is 1.
(4) Devices that share each layer (tensor parallelism) take t/D and two all-reduces for each layer, of
    2(D-1)/D · n·b·width values each (Shoeybi et al., "Megatron-LM", 2019). Devices that have a part of the
    layers each take t, and D-1 hops.
(5) Beside that every call takes a fixed time, every layer, and every token in every layer.
(6) llama.cpp's kernels for few tokens are not free: up to KERNEL_TOKENS, each further token of a call takes
    the part `token_ratio` of reading the weights that a token uses at 4.85 bits (Q4_K_M), whatever their
    type; the part is fitted to published rows for each kind of card, and more for models with layers of
    linear attention. Larger calls compute for whole tiles of TILE_TOKENS.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from outrider.core.errors import SettingError
from outrider.lab.plan.acceptance import Acceptance
from outrider.lab.plan.catalogue import Catalogue, Device, bundled, token_ratios
from outrider.lab.plan.shapes import ModelShape

_ACTIVATION_BYTES = 2
_LOGIT_BYTES = 2
_COUNTED = (
    re.compile(r"(?P<count>\d+) ?[x×] ?(?P<name>.+)"),
    re.compile(r"(?P<name>.+?) ?[x×] ?(?P<count>\d+)"),
)
_RESERVED_RATIO = 0.1
"""of the memory, for what is computed in: as vLLM's --gpu-memory-utilization leaves it"""
KERNEL_TOKENS = 8
TILE_TOKENS = 32
"""Calls of more than KERNEL_TOKENS take llama.cpp's kernels for tiles, which cost about as much for 9 as for
32."""
_KERNEL_BITS = 4.85
Engine = Literal["llama.cpp", "vllm"]


@dataclass(frozen=True, slots=True)
class Machine:
    """So many devices of a kind, under an engine."""

    device: Device
    count: int = 1
    engine: Engine = "vllm"

    @property
    def name(self) -> str:
        return self.device.name + (f"x{self.count}" if self.count > 1 else "")

    @property
    def parts(self) -> int:
        return self.count if self.device.parallel == "tensor" else 1

    @property
    def bytes_s(self) -> float:
        """Read a second, by those that share a layer."""
        return self.device.memory_gb_s * 1e9 * self.device.bandwidth_ratio * self.parts

    @property
    def usable_bytes(self) -> float:
        """Of all devices, for weights and KV."""
        return self.device.memory_gb * 1e9 * self.count * (1 - _RESERVED_RATIO)

    def as_json(self) -> dict[str, Any]:
        known = {"name": self.name, "title": self.device.title, "count": self.count}
        return known | {"usable_bytes": self.usable_bytes, "source": self.device.source}


def machine_of(name: str, known: Catalogue, engine: Engine | None = None) -> Machine:
    """The machine of a name such as h100, 3090 or h100x8, under the engine that is usual there or this one.
    Raises SettingError, with the nearest names."""
    base, count = name.strip(), 1
    for pattern in _COUNTED:
        match = pattern.fullmatch(base.lower())
        if match and known.spelled("hardware", match["name"]) in known.tables["hardware"]:
            base, count = match["name"], int(match["count"])
    if not 1 <= count <= 4096:
        raise SettingError(name, f"{count} devices are out of range", "Give 1 to 4096.")
    device = known.device(base)
    return Machine(device, count, engine or device.engine)


def call_bytes(shape: ModelShape, num_tokens: int, *, batch: int = 1, context: int = 0) -> float:
    """What a call moves, equation (1)."""
    tokens = num_tokens * batch
    weights = shape.dense_bytes + shape.distinct_experts(tokens) * shape.expert_bytes
    logits = 2 * _LOGIT_BYTES * tokens * shape.vocabulary
    return weights + batch * shape.kv_bytes(context) + logits


def call_operations(shape: ModelShape, num_tokens: int, *, batch: int = 1, context: int = 0) -> float:
    """What a call computes, equation (2)."""
    seen = context + num_tokens / 2
    windowed = min(seen, shape.window_tokens)
    attention = 4 * (shape.attention_width * seen + shape.window_attention_width * windowed)
    return num_tokens * batch * (2 * shape.active_parameters + attention)


def call_time(
    shape: ModelShape, machine: Machine, num_tokens: int, *, batch: int = 1, context: int = 0
) -> float:
    """Seconds of a call: equations (1) to (6)."""
    device, tokens = machine.device, num_tokens * batch
    memory_s = call_bytes(shape, num_tokens, batch=batch, context=context) / machine.bytes_s
    operations = call_operations(shape, num_tokens, batch=batch, context=context)
    operations *= _tiled(machine, tokens) / tokens
    operations_s = operations / (device.operations_s(shape.operations) * machine.parts)
    longer, shorter = max(memory_s, operations_s), min(memory_s, operations_s)
    device_s = longer * (1 + (shorter / longer) ** device.overlap) ** (1 / device.overlap) if longer else 0.0
    layers_s = shape.layers * (device.layer_s + tokens * device.layer_token_s)
    more_s = _link_s(shape, machine, tokens) + _kernels_s(shape, machine, tokens)
    return device_s + device.call_s + layers_s + more_s


def _link_s(shape: ModelShape, machine: Machine, num_tokens: int) -> float:
    device, others = machine.device, machine.count - 1
    activation_s = num_tokens * shape.width * _ACTIVATION_BYTES / (device.link_gb_s * 1e9)
    if others and device.parallel == "tensor":
        return 2 * shape.layers * (device.link_s + 2 * others / machine.count * activation_s)
    return others * (device.link_s + activation_s)


def _tiled(machine: Machine, num_tokens: int) -> int:
    is_tiled = machine.engine == "llama.cpp" and machine.device.kind != "cpu" and num_tokens > KERNEL_TOKENS
    return math.ceil(num_tokens / TILE_TOKENS) * TILE_TOKENS if is_tiled else num_tokens


def _kernels_s(shape: ModelShape, machine: Machine, num_tokens: int) -> float:
    if machine.engine != "llama.cpp" or num_tokens > KERNEL_TOKENS:
        return 0.0
    hybrid = token_ratios()["hybrid"] if shape.state_bytes else 1.0
    read_s = shape.active_parameters * _KERNEL_BITS / 8 / machine.bytes_s
    return hybrid * machine.device.token_ratio * (num_tokens - 1) * read_s


@dataclass(frozen=True, slots=True, eq=False)
class PlannedModel:
    """A target or a draft on the best of `machines` for each call: a small draft may be faster on one device
    than on all. A target's calls also take what a step takes besides, once (`is_target`). `acceptance`: what
    a draft's tokens are expected to bring."""

    shape: ModelShape
    machines: tuple[Machine, ...]
    is_target: bool = False
    acceptance: Acceptance | None = None

    @property
    def name(self) -> str:
        return self.shape.name

    def call_s(self, num_tokens: int, *, batch: int = 1, context: int = 0) -> float:
        return min(
            call_time(self.shape, machine, num_tokens, batch=batch, context=context)
            + self.is_target * machine.device.step_s
            for machine in self.machines
        )


def memory_bytes(shapes: Iterable[ModelShape], *, batch: int, context: int) -> tuple[float, float]:
    """Weights and KV of all these models, for `batch` sequences of `context` tokens."""
    models = list(shapes)
    kv = sum(batch * shape.kv_bytes(context) for shape in models)
    return sum(shape.memory_bytes for shape in models), kv


def largest_batch(shapes: Iterable[ModelShape], machine: Machine, context: int) -> int:
    """The most sequences that fit, 0 where the weights alone do not."""
    models = list(shapes)
    free = machine.usable_bytes - sum(shape.memory_bytes for shape in models)
    each = sum(shape.kv_bytes(context) for shape in models)
    if free < 0:
        return 0
    return int(free // each) if each else 1_000_000


# How wrong the cost model was where it was checked: what `benchmarks/plan/check.py` found.


def model_error() -> Mapping[str, Any]:
    """Relative errors of calls, of calls over a call of one token, and of published speed-ups: `median`, and
    `most`, which nine in ten were below; `range`: how wide a planned range is, and how many rows it held."""
    return {name: part for name, part in bundled("fitted").items() if name != "token_ratio"}


def error_line() -> str:
    """The same in a sentence."""
    speedups, consumer, inside = (model_error()[name] for name in ("speedups", "consumer", "range"))
    return (
        f"A prediction: off by {speedups['median']:.0%} in the median of {speedups['rows']} published "
        f"speed-ups ({consumer['median']:.0%} of {consumer['rows']} on consumer cards); {inside['held']} of "
        f"{inside['rows']} lay in the range. Measure with outrider check."
    )
