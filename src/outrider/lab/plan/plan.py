"""The plan: for each batch size who should draft and how far, what that gains, and whether it fits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.core.errors import SettingError
from outrider.core.numbers import Interval, short_count
from outrider.costs.expected_speed import StepCosts
from outrider.lab.plan.acceptance import LONGEST, PLAIN, Acceptance, Drafting, Steps, expected_steps
from outrider.lab.plan.calls import Machine, PlannedModel, largest_batch, memory_bytes
from outrider.lab.plan.shapes import ModelShape

SCHEMA = "outrider.plan/1"
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, LONGEST)
"""draft lengths that are compared"""
MAX_BATCH = 4096
"""Larger batches are not looked at."""
SIZES: Sequence[int] = (*sorted({size for i in range(12) for size in (2**i, 3 * 2**i // 2)}), MAX_BATCH)
"""batch sizes that are tried where all are of interest"""
ODDS = 2.0
"""between kinds of text, and between pairs of models: about what published acceptances differ by from the
tables"""
COSTS = 1.15
"""about what the cost model is off by where it was checked"""


@dataclass(frozen=True, slots=True)
class Asked:
    """What is planned. The odds of a token's acceptance and the costs of a step may be off by the factors
    `odds` and `costs`, up or down; a range is from the worst of both to the best."""

    target: PlannedModel
    drafts: Sequence[PlannedModel]
    batches: Sequence[int]
    context: int
    machine: Machine
    lookup: Acceptance | None = None
    odds: float = 1.0
    costs: float = 1.0

    @property
    def models(self) -> tuple[PlannedModel, ...]:
        return (self.target, *self.drafts)

    def loaded(self, way: Way | None) -> list[ModelShape]:
        """What a way of drafting has in memory: the target, and its draft where it has one."""
        names = (self.target.name, way.draft if way else "")
        return [model.shape for model in self.models if model.name in names]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to draft at one batch size. `speedup` is over plain decoding of that batch, with a range."""

    drafting: Drafting
    draft: str
    length: int
    tokens_per_call: float
    tokens_per_s: float
    speedup: Interval

    @property
    def name(self) -> str:
        return {"lookup": "lookup", "draft": self.draft, "both": f"lookup and {self.draft}"}[self.drafting]

    def as_json(self) -> dict[str, Any]:
        return {
            "drafters": self.drafting,
            "draft": self.draft or None,
            "draft_length": self.length,
            "tokens_per_call": self.tokens_per_call,
            "tokens_per_s": self.tokens_per_s,
            "speedup": self.speedup.value,
            "low": self.speedup.low,
            "high": self.speedup.high,
        }


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One batch size: plain decoding in tokens per second of all sequences, and every way to draft.

    `weights_bytes` and `kv_bytes` are of target and best draft, `usable_bytes` of the machine. `break_even`
    maps each draft model to the least acceptance at which its drafts pay, and their length.
    """

    batch: int
    plain_tokens_per_s: float
    ways: Sequence[Way]
    break_even: Mapping[str, tuple[float, int] | None]
    weights_bytes: float
    kv_bytes: float
    usable_bytes: float

    @property
    def best(self) -> Way | None:
        """The fastest way; None where plain decoding is as fast."""
        return _paying(self.ways)

    def best_of(self, drafting: Drafting, draft: str) -> Way | None:
        """The fastest length of one drafter, whether it pays or not."""
        mine = [way for way in self.ways if (way.drafting, way.draft) == (drafting, draft)]
        return max(mine, key=lambda way: way.speedup.value, default=None)

    @property
    def drafters(self) -> list[Way]:
        """Each drafter at its fastest length, the fastest first; the ends of the range are at the lengths
        that suit them, as an automatic choice finds them."""
        found = []
        for drafting, draft in dict.fromkeys((way.drafting, way.draft) for way in self.ways):
            mine = [way for way in self.ways if (way.drafting, way.draft) == (drafting, draft)]
            best = max(mine, key=lambda way: way.speedup.value)
            low, high = max(way.speedup.low for way in mine), max(way.speedup.high for way in mine)
            found.append(replace(best, speedup=replace(best.speedup, low=low, high=high)))
        return sorted(found, key=lambda way: -way.speedup.value)

    def as_json(self) -> dict[str, Any]:
        memory = {name: getattr(self, name) for name in ("weights_bytes", "kv_bytes", "usable_bytes")}
        missing = max(self.weights_bytes + self.kv_bytes - self.usable_bytes, 0.0)
        return {
            "batch": self.batch,
            "plain_tokens_per_s": self.plain_tokens_per_s,
            "best": self.best and self.best.as_json(),
            "drafters": [way.as_json() for way in self.drafters],
            "ways": [way.as_json() for way in self.ways],
            "break_even_acceptance": {
                name: found and {"acceptance": found[0], "draft_length": found[1]}
                for name, found in self.break_even.items()
            },
            "memory": memory | {"missing_bytes": missing, "fits": not missing},
        }


def _paying(ways: Sequence[Way]) -> Way | None:
    fastest = max(ways, key=lambda way: way.speedup.value, default=None)
    return fastest if fastest is not None and fastest.speedup.value > 1 else None


@dataclass(frozen=True, slots=True)
class Plan:
    """All batch sizes. `pays_to` is the largest batch at which some way pays (0: none), `fits_to` the largest
    that fits; either is None where there is no end to it up to the largest that is looked at."""

    asked: Asked
    batches: Sequence[BatchPlan]
    pays_to: int | None
    fits_to: int | None

    def chosen(self, *, joins: bool) -> Way | None:
        """The fastest way at the first batch size, None where none pays; without `joins` of lookup alone and
        of draft models alone."""
        return _paying([way for way in self.batches[0].ways if joins or way.drafting != "both"])

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "target": _model_json(self.asked.target.shape),
            "drafts": [_model_json(draft.shape) for draft in self.asked.drafts],
            "hardware": self.asked.machine.as_json(),
            "context_tokens": self.asked.context,
            "batches": [batch.as_json() for batch in self.batches],
            "pays_to_batch": self.pays_to,
            "fits_to_batch": self.fits_to,
        }


def _model_json(shape: ModelShape) -> dict[str, Any]:
    return {
        "name": shape.name,
        "parameters": shape.parameters,
        "active_parameters": shape.active_parameters,
        "weights_bytes": shape.memory_bytes,
        "kv_token_bytes": shape.kv_bytes(1),
        "weights_type": shape.type,
    }


def make_plan(asked: Asked) -> Plan:
    """Plan every batch size. Raises SettingError for a draft that is larger than the target."""
    for draft in asked.drafts:
        sizes = [model.shape.active_parameters for model in (draft, asked.target)]
        if sizes[0] > sizes[1]:
            draft_size, target_size = map(short_count, sizes)
            reason = f"it is larger than its target ({draft_size} active parameters against {target_size})"
            raise SettingError(f"draft {draft.name}", reason, "Swap the two.")
    batches = [plan_batch(asked, batch) for batch in asked.batches]
    limit = min(largest_batch(asked.loaded(batches[0].best), asked.machine, asked.context), MAX_BATCH)
    pays = _pays_to(asked, limit)
    return Plan(asked, batches, None if pays >= limit else pays, None if limit == MAX_BATCH else limit)


class _Batch:
    """What steps of one batch size take: the calls that they are made of, each worked out once."""

    def __init__(self, asked: Asked, batch: int) -> None:
        self._asked = asked
        self._batch = batch
        self._known: dict[tuple[int, int], float] = {}
        self.plain_s = self.seconds(PLAIN, None)

    def call_s(self, model: PlannedModel, num_tokens: int) -> float:
        """A call over `num_tokens` of each sequence."""
        key = id(model), num_tokens
        if key not in self._known:
            self._known[key] = model.call_s(num_tokens, batch=self._batch, context=self._asked.context)
        return self._known[key]

    def seconds(self, step: Steps, draft: PlannedModel | None) -> float:
        """A step of every sequence."""
        total = sum(share * self.call_s(self._asked.target, n) for n, share in step.target_calls.items())
        if draft is not None:
            total += sum(number * self.call_s(draft, n) for n, number in step.draft_calls.items())
        return total

    def ways(self, drafting: Drafting, draft: PlannedModel | None) -> Iterator[Way]:
        """One drafter at every length; nothing where nothing is known of it."""
        asked, name = self._asked, draft.name if draft else ""
        tables = {"lookup": asked.lookup, "draft": draft.acceptance if draft else None}
        shifted = [
            {who: table and table.shifted(odds) for who, table in tables.items()}
            for odds in (1 / asked.odds, 1.0, asked.odds)
        ]
        for length in LENGTHS:
            steps = [step for some in shifted if (step := expected_steps(drafting, length, some))]
            if not steps:
                return
            low, value, high = (step.tokens * self.plain_s / self.seconds(step, draft) for step in steps)
            speedup = Interval(value, low / asked.costs, high * asked.costs)
            rate = self._batch / self.plain_s * value
            yield Way(drafting, name, length, steps[1].tokens, rate, speedup)

    def break_even(self, draft: PlannedModel) -> tuple[float, int] | None:
        """The least acceptance of each token at which a draft pays, and its length."""
        calls_s = [self.call_s(self._asked.target, n) for n in range(1, LONGEST + 2)]
        return StepCosts(calls_s, self.call_s(draft, 1), self.call_s(draft, 2)).least_needed()


def plan_batch(asked: Asked, batch: int) -> BatchPlan:
    """One batch size."""
    costs = _Batch(asked, batch)
    drafters: list[tuple[Drafting, PlannedModel | None]] = [("lookup", None)]
    for draft in asked.drafts:
        drafters += [("draft", draft), ("both", draft)]
    ways = [way for drafting, draft in drafters for way in costs.ways(drafting, draft)]
    weights, kv = memory_bytes(asked.loaded(_paying(ways)), batch=batch, context=asked.context)
    break_even = {draft.name: costs.break_even(draft) for draft in asked.drafts}
    usable = asked.machine.usable_bytes
    return BatchPlan(batch, batch / costs.plain_s, ways, break_even, weights, kv, usable)


def _pays_to(asked: Asked, limit: int) -> int:
    """The largest batch up to `limit` at which some way pays, of SIZES and those between the last of them
    that does and the next; 0 where none does."""

    def pays(batch: int) -> bool:
        return plan_batch(asked, batch).best is not None

    sizes = [0, *(size for size in SIZES if size < limit), limit]
    last = max((i for i, size in enumerate(sizes) if size and pays(size)), default=0)
    if last in (0, len(sizes) - 1):
        return sizes[last]
    between = range(sizes[last] + 1, sizes[last + 1])
    return sizes[last] + bisect_left(between, True, key=lambda batch: not pays(batch))
