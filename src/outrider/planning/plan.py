"""The plan: for each batch size who should draft and how far, what comes of it, and whether it fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.core.errors import SettingError
from outrider.costs.break_even import break_even
from outrider.lab.numbers import gigabytes
from outrider.lab.statistics import Interval, speedup_of
from outrider.planning.acceptance import LONGEST, PLAIN, Acceptance, Drafting, Steps, expected_steps
from outrider.planning.calls import Curve, Machine, largest_batch, memory_bytes
from outrider.planning.shapes import ModelShape

SCHEMA = "outrider.plan/1"
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, LONGEST)
"""draft lengths that are compared"""
_MAX_BATCH = 4096
"""Larger batches are not looked at."""


@dataclass(frozen=True, slots=True)
class Model:
    """A target or a draft: what its calls take, its sizes where they are known, and of a draft what its
    tokens are expected to bring."""

    name: str
    curve: Curve
    shape: ModelShape | None = None
    acceptance: Acceptance | None = None


Counted = Callable[[Drafting, str, int], Sequence[Steps] | None]
"""The steps of each recorded text, or one expected step, by who drafts, the draft's name ("" for lookup) and
the length; None where nothing is known."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What is planned."""

    target: Model
    drafts: Sequence[Model]
    batches: Sequence[int]
    context: int
    machine: Machine | None = None
    lookup: Acceptance | None = None
    counted: Counted | None = None
    """of recordings, where there are any"""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to draft at one batch size. `speedup` is over plain decoding of the same batch; without
    recordings its ends are its value."""

    drafting: Drafting
    draft: str
    length: int
    tokens_per_call: float
    tokens_per_s: float
    speedup: Interval

    @property
    def name(self) -> str:
        """Who drafts, in words."""
        who = {"lookup": "lookup", "draft": self.draft, "both": f"lookup and {self.draft}"}
        return who[self.drafting]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a batch takes, and those that there are (None: not known)."""

    weights: float
    kv: float
    usable: float | None

    @property
    def missing(self) -> float:
        """How many are too few."""
        return 0.0 if self.usable is None else max(self.weights + self.kv - self.usable, 0.0)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One batch size: plain decoding in tokens per second of all sequences, and every way to draft.
    `break_even` is the least acceptance at which a draft of each draft model pays, with the length that it is
    least at; `joules` those of a token, plain and by the best way, at the machine's rated power."""

    batch: int
    plain_tokens_per_s: float
    ways: Sequence[Way]
    memory: Memory | None
    break_even: Mapping[str, tuple[float, int] | None]
    watts: float | None = None

    @property
    def best(self) -> Way | None:
        """The fastest way; None where plain decoding is as fast."""
        fastest = max(self.ways, key=lambda way: way.speedup.value, default=None)
        return fastest if fastest is not None and fastest.speedup.value > 1 else None

    def best_of(self, drafting: Drafting, draft: str) -> Way | None:
        """The fastest way of one drafter, whether it pays or not."""
        mine = [way for way in self.ways if (way.drafting, way.draft) == (drafting, draft)]
        return max(mine, key=lambda way: way.speedup.value, default=None)

    @property
    def joules(self) -> tuple[float, float] | None:
        """Of a token: plain, and by the best way; at the rated power, which decoding seldom draws."""
        if self.watts is None:
            return None
        best = self.best
        return self.watts / self.plain_tokens_per_s, self.watts / (
            best.tokens_per_s if best else self.plain_tokens_per_s
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """All batch sizes. `pays_to` is the largest batch up to which some way pays, `fits_to` the largest that
    fits; either is None where there is no end to it up to the largest that is looked at."""

    asked: Asked
    batches: Sequence[BatchPlan]
    pays_to: int | None
    fits_to: int | None
    notices: Sequence[str] = field(default_factory=tuple)


def make_plan(asked: Asked) -> Plan:
    """Plan every batch size. Raises SettingError for a draft that is larger than the target, and where not
    even the smallest batch fits, with how much is missing."""
    _check(asked)
    batches = [plan_batch(asked, batch) for batch in asked.batches]
    fits = None
    shapes = [model.shape for model in (asked.target, *asked.drafts) if model.shape is not None]
    if asked.machine is not None and shapes:
        fits = min(largest_batch(shapes, asked.machine, asked.context), _MAX_BATCH)
    pays = _pays_to(asked, fits or _MAX_BATCH)
    limit = fits or _MAX_BATCH
    return Plan(
        asked,
        batches,
        None if pays >= limit else pays,
        None if fits == _MAX_BATCH else fits,
    )


def _check(asked: Asked) -> None:
    target = asked.target.shape
    for draft in asked.drafts:
        shape = draft.shape
        if target is not None and shape is not None and shape.active_parameters > target.active_parameters:
            sizes = f"{_billions(shape)} active parameters against {_billions(target)}"
            reason = f"it is larger than its target ({sizes})"
            raise SettingError(f"draft {draft.name}", reason, "Swap the two.")
    if asked.machine is None or target is None:
        return
    shapes = [model.shape for model in (asked.target, *asked.drafts) if model.shape is not None]
    least = min(asked.batches)
    weights, kv = memory_bytes(shapes, batch=least, context=asked.context)
    missing = weights + kv - asked.machine.usable_bytes
    if missing > 0:
        device = asked.machine.device
        needed = math.ceil((weights + kv) / (asked.machine.usable_bytes / asked.machine.count))
        reason = (
            f"{gigabytes(round(missing))} too little memory: {gigabytes(round(weights))} of weights and "
            f"{gigabytes(round(kv))} of KV for {least} x {asked.context} tokens, where "
            f"{gigabytes(round(asked.machine.usable_bytes))} of {asked.machine.count} x "
            f"{device.memory_gb:g} GB can be used"
        )
        way_out = f"Take {device.name}x{needed}, weights of fewer bits (:fp8, :int4), or a smaller model."
        raise SettingError(f"{asked.target.name} on {asked.machine.name}", reason, way_out)


def _billions(shape: ModelShape) -> str:
    return f"{shape.active_parameters / 1e9:.3g}B"


def plan_batch(asked: Asked, batch: int) -> BatchPlan:
    """One batch size."""
    target, context = asked.target, asked.context
    costs = _Costs(batch, context)
    plain_s = costs.seconds([PLAIN], target.curve, None)[0]
    ways = [
        way for drafting, draft in _drafters(asked) for way in _ways(asked, drafting, draft, costs, plain_s)
    ]
    memory = None
    shapes = [model.shape for model in (target, *asked.drafts) if model.shape is not None]
    if target.shape is not None:
        weights, kv = memory_bytes(shapes, batch=batch, context=context)
        memory = Memory(weights, kv, asked.machine.usable_bytes if asked.machine else None)
    return BatchPlan(
        batch=batch,
        plain_tokens_per_s=batch / plain_s,
        ways=ways,
        memory=memory,
        break_even={draft.name: _break_even(target, draft, costs) for draft in asked.drafts},
        watts=asked.machine.watts if asked.machine else None,
    )


def _drafters(asked: Asked) -> Iterator[tuple[Drafting, Model | None]]:
    yield "lookup", None
    for draft in asked.drafts:
        yield "draft", draft
        yield "both", draft


def _ways(
    asked: Asked, drafting: Drafting, draft: Model | None, costs: _Costs, plain_s: float
) -> Iterator[Way]:
    name = draft.name if draft else ""
    for length in LENGTHS:
        texts = _steps(asked, drafting, draft, length)
        if not texts:
            return
        seconds = costs.seconds(texts, asked.target.curve, draft.curve if draft else None)
        tokens = [text.tokens for text in texts]
        plain = [number * plain_s for number in tokens]
        if len(texts) > 1:
            speedup = speedup_of(plain, seconds)
        else:
            value = plain[0] / seconds[0]
            speedup = Interval(value, value, value)
        calls = sum(sum(text.target_calls.values()) for text in texts)
        rate = costs.batch / plain_s * speedup.value
        yield Way(drafting, name, length, sum(tokens) / calls, rate, speedup)


def _steps(asked: Asked, drafting: Drafting, draft: Model | None, length: int) -> Sequence[Steps] | None:
    if asked.counted is not None:
        return asked.counted(drafting, draft.name if draft else "", length)
    tables: dict[Drafting, Acceptance] = {}
    if asked.lookup is not None:
        tables["lookup"] = asked.lookup
    if draft is not None and draft.acceptance is not None:
        tables["draft"] = draft.acceptance
    step = expected_steps(drafting, length, tables)
    return None if step is None else [step]


class _Costs:
    """Seconds of calls of one batch size and context, each asked for once."""

    def __init__(self, batch: int, context: int) -> None:
        self.batch = batch
        self._context = context
        self._known: dict[tuple[int, int], float] = {}

    def call_s(self, curve: Curve, num_tokens: int) -> float:
        """A call over so many tokens of each sequence."""
        key = id(curve), num_tokens
        if key not in self._known:
            self._known[key] = curve.call_s(num_tokens, batch=self.batch, context=self._context)
        return self._known[key]

    def seconds(self, texts: Sequence[Steps], target: Curve, draft: Curve | None) -> list[float]:
        """Of each text, in a batch of its like."""
        found = []
        for text in texts:
            total = sum(count * self.call_s(target, n) for n, count in text.target_calls.items())
            if draft is not None:
                total += sum(count * self.call_s(draft, n) for n, count in text.draft_calls.items())
            found.append(total)
        return found


def _break_even(target: Model, draft: Model, costs: _Costs) -> tuple[float, int] | None:
    """The least acceptance of each token at which a draft pays, and the length of that draft."""
    calls_s = [costs.call_s(target.curve, n) for n in range(1, LONGEST + 2)]
    first_s, next_s = costs.call_s(draft.curve, 2), costs.call_s(draft.curve, 1)
    found = [(break_even(calls_s, n, first_s + (n - 1) * next_s), n) for n in range(1, LONGEST + 1)]
    return min(((value, n) for value, n in found if value is not None), default=None)


def _pays_to(asked: Asked, limit: int) -> int:
    """The largest batch up to `limit` up to which some way pays; 0 where none does at all."""

    def pays(batch: int) -> bool:
        return plan_batch(asked, batch).best is not None

    low, high = 0, 1
    while pays(high):
        low = high
        if high >= limit:
            return limit
        high = min(high * 2, limit)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain data."""
    asked = plan.asked
    return {
        "schema": SCHEMA,
        "target": _model_json(asked.target),
        "drafts": [_model_json(draft) for draft in asked.drafts],
        "hardware": None if asked.machine is None else _machine_json(asked.machine),
        "context_tokens": asked.context,
        "batches": [_batch_json(batch) for batch in plan.batches],
        "pays_to_batch": plan.pays_to,
        "fits_to_batch": plan.fits_to,
    }


def _model_json(model: Model) -> dict[str, Any]:
    shape = model.shape
    known = shape and {
        "parameters": shape.parameters,
        "active_parameters": shape.active_parameters,
        "weights_bytes": shape.memory_bytes,
        "kv_token_bytes": shape.kv_bytes(1),
        "weights_type": shape.type,
    }
    return {"name": model.name, **(known or {})}


def _machine_json(machine: Machine) -> dict[str, Any]:
    device = machine.device
    return {
        "name": machine.name,
        "title": device.title,
        "count": machine.count,
        "usable_bytes": machine.usable_bytes,
        "source": device.source,
    }


def _batch_json(batch: BatchPlan) -> dict[str, Any]:
    memory, joules, best = batch.memory, batch.joules, batch.best
    return {
        "batch": batch.batch,
        "plain_tokens_per_s": batch.plain_tokens_per_s,
        "best": None if best is None else _way_json(best),
        "ways": [_way_json(way) for way in batch.ways],
        "break_even_acceptance": {
            name: None if found is None else {"acceptance": found[0], "draft_length": found[1]}
            for name, found in batch.break_even.items()
        },
        "memory": memory
        and {
            "weights_bytes": memory.weights,
            "kv_bytes": memory.kv,
            "usable_bytes": memory.usable,
            "missing_bytes": memory.missing,
            "fits": memory.missing == 0,
        },
        "joules_per_token": joules and {"plain": joules[0], "best": joules[1]},
    }


def _way_json(way: Way) -> dict[str, Any]:
    return {
        "drafters": way.drafting,
        "draft": way.draft or None,
        "draft_length": way.length,
        "tokens_per_call": way.tokens_per_call,
        "tokens_per_s": way.tokens_per_s,
        "speedup": way.speedup.value,
        "low": way.speedup.low,
        "high": way.speedup.high,
    }
