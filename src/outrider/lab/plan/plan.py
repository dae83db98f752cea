"""The plan: for each batch size who should draft and how far, what that gains, and whether it fits; and what
vLLM starts with for it."""

from __future__ import annotations

import json
import math
import shlex
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from pydantic_core import to_jsonable_python

from outrider.core.errors import SettingError
from outrider.core.notices import notify
from outrider.core.numbers import counted, gigabytes, short_count
from outrider.costs.expected_speed import StepCosts
from outrider.lab.plan.acceptance import LONGEST, PLAIN, Acceptance, Drafting, Steps, expected_steps
from outrider.lab.plan.calls import Machine, PlannedModel, largest_batch, memory_bytes
from outrider.lab.plan.catalogue import Catalogue
from outrider.lab.plan.shapes import HEADS, ModelShape, find_shape, head_of

SCHEMA = "outrider.plan/1"
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, LONGEST)
"""draft lengths that are compared"""
MAX_BATCH = 4096
"""Larger batches are not looked at."""
_SIZES: Sequence[int] = (*sorted({size for i in range(12) for size in (2**i, 3 * 2**i // 2)}), MAX_BATCH)
"""batch sizes that are tried where all are of interest"""
ODDS = 2.0
"""between kinds of text, and between pairs of models: about what published acceptances differ by from the
tables"""
COSTS = 1.15
"""about what the cost model is off by where it was checked"""
_TYPES = {
    "llama.cpp": (("q4_k_m", "q8_0"), ("q4_k_m", "q4_k_m"), ("q3_k_m", "q4_k_m"), ("q2_k", "q4_k_m")),
    "vllm": (("", ""), ("fp8", "fp8"), ("int4", "int4")),
}
"""By engine the types of target and drafts that are tried for models of which none is asked for; "": its
own."""


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

    def loaded(self, way: Way | None) -> list[ModelShape]:
        """What a way of drafting has in memory: the target, and its draft where it has one."""
        drafts = [draft.shape for draft in self.drafts if way and draft.name == way.draft]
        return [self.target.shape, *drafts]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to draft at one batch size, as JSON has it. `speedup` is over plain decoding of that batch, and
    may be from `low` to `high`; `draft` is None where lookup alone drafts."""

    drafters: Drafting
    draft: str | None
    draft_length: int
    tokens_per_call: float
    tokens_per_s: float
    speedup: float
    low: float
    high: float

    @property
    def name(self) -> str:
        return " and ".join(filter(None, ["lookup" if self.drafters != "draft" else "", self.draft]))


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One batch size, as JSON has it; rates are of all sequences together.

    `best` is the fastest of the `ways`, None where plain decoding is as fast. `drafters` has each drafter at
    its fastest length, the fastest first; the ends of its range are at the lengths that suit them, as an
    automatic choice finds them. `break_even_acceptance` has for each draft model the least acceptance at
    which its drafts pay, and their length. `memory` has the bytes of weights and KV of target and best draft,
    beside those that the machine has for them.
    """

    batch: int
    plain_tokens_per_s: float
    best: Way | None
    drafters: Sequence[Way]
    ways: Sequence[Way]
    break_even_acceptance: Mapping[str, Mapping[str, float] | None]
    memory: Mapping[str, float]


def _paying(ways: Iterable[Way]) -> Way | None:
    fastest = max(ways, key=lambda way: way.speedup, default=None)
    return fastest if fastest is not None and fastest.speedup > 1 else None


@dataclass(frozen=True, slots=True)
class Plan:
    """All batch sizes. `pays_to` is the largest batch at which some way pays (0: none), `fits_to` the largest
    that fits; either is None where there is no end to it up to the largest that is looked at."""

    asked: Asked
    batches: Sequence[BatchPlan]
    pays_to: int | None
    fits_to: int | None

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "target": _model_json(self.asked.target.shape),
            "drafts": [_model_json(draft.shape) for draft in self.asked.drafts],
            "hardware": self.asked.machine.as_json(),
            "context_tokens": self.asked.context,
            "batches": to_jsonable_python(self.batches),
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


def plan_batch(asked: Asked, batch: int) -> BatchPlan:
    """One batch size: every drafter of which something is known, at every length."""

    @cache
    def call_s(model: PlannedModel, num_tokens: int) -> float:
        return model.call_s(num_tokens, batch=batch, context=asked.context)

    def step_s(step: Steps, draft: PlannedModel | None) -> float:
        total = sum(share * call_s(asked.target, n) for n, share in step.target_calls.items())
        return total + sum(number * call_s(draft, n) for n, number in step.draft_calls.items() if draft)

    plain_s = step_s(PLAIN, None)
    ways = []
    for drafting, draft, lookup, model in _drafters(asked):
        odds = 1 / asked.odds, 1.0, asked.odds
        tables = [(lookup and lookup.shifted(each), model and model.shifted(each)) for each in odds]
        for length in LENGTHS:
            steps = [expected_steps(*pair, length) for pair in tables]
            low, value, high = (step.tokens * plain_s / step_s(step, draft) for step in steps)
            rate, name = batch / plain_s * value, draft.name if draft else None
            ends = low / asked.costs, high * asked.costs
            ways.append(Way(drafting, name, length, steps[1].tokens, rate, value, *ends))
    break_even: dict[str, Mapping[str, float] | None] = {}
    for draft in asked.drafts:
        calls_s = [call_s(asked.target, n) for n in range(1, LONGEST + 2)]
        least = StepCosts(calls_s, call_s(draft, 1), call_s(draft, 2)).least_needed()
        break_even[draft.name] = least and {"acceptance": least[0], "draft_length": least[1]}
    best_way = _paying(ways)
    weights, kv = memory_bytes(asked.loaded(best_way), batch=batch, context=asked.context)
    usable = asked.machine.usable_bytes
    memory = {
        "weights_bytes": weights,
        "kv_bytes": kv,
        "usable_bytes": usable,
        "fits": weights + kv <= usable,
    }
    return BatchPlan(batch, batch / plain_s, best_way, _each_at_its_best(ways), ways, break_even, memory)


def _drafters(
    asked: Asked,
) -> Iterable[tuple[Drafting, PlannedModel | None, Acceptance | None, Acceptance | None]]:
    if asked.lookup is not None:
        yield "lookup", None, asked.lookup, None
    for draft in asked.drafts:
        if draft.acceptance is not None:
            yield "draft", draft, None, draft.acceptance
            if asked.lookup is not None:
                yield "both", draft, asked.lookup, draft.acceptance


def _each_at_its_best(ways: Sequence[Way]) -> list[Way]:
    found = []
    for drafters, draft in dict.fromkeys((way.drafters, way.draft) for way in ways):
        mine = [way for way in ways if (way.drafters, way.draft) == (drafters, draft)]
        best = max(mine, key=lambda way: way.speedup)
        low, high = max(way.low for way in mine), max(way.high for way in mine)
        found.append(replace(best, low=low, high=high))
    return sorted(found, key=lambda way: -way.speedup)


def _pays_to(asked: Asked, limit: int) -> int:
    """The largest batch up to `limit` at which some way pays, of _SIZES and those between the last of them
    that does and the next; 0 where none does."""

    def pays(batch: int) -> bool:
        return plan_batch(asked, batch).best is not None

    sizes = [0, *(size for size in _SIZES if size < limit), limit]
    last = max((i for i, size in enumerate(sizes) if size and pays(size)), default=0)
    if last in (0, len(sizes) - 1):
        return sizes[last]
    between = range(sizes[last] + 1, sizes[last + 1])
    return sizes[last] + bisect_left(between, True, key=lambda batch: not pays(batch))


# What is loaded: target and drafts at types of weights that fit


def fitting(
    target: str,
    drafts: Sequence[str] | None,
    machine: Machine,
    known: Catalogue,
    *,
    batch: int,
    context: int,
    kv_type: str = "f16",
) -> list[ModelShape]:
    """The shapes of a target and its drafts (None: of those that could draft for it the ones that fit beside
    it), at types of weights that fit where none is asked for; a notice says where these are not the usual
    ones. Raises SettingError where nothing fits, and for unknown names; ModelFileError."""

    def used(shapes: Sequence[ModelShape]) -> tuple[float, float]:
        return memory_bytes(shapes, batch=batch, context=context)

    names = _usual_drafts(target, known) if drafts is None else drafts
    choices = _TYPES[machine.engine]
    for kind, draft_kind in choices:
        first = find_shape(target, known, kind, kv_type)
        others = [
            head_of(first, name) if name in HEADS else find_shape(name, known, draft_kind, kv_type)
            for name in names
        ]
        weights, kv = used([first] if drafts is None else [first, *others])
        free = machine.usable_bytes - weights - kv
        if free >= 0:
            if kind != choices[0][0]:
                notify(f"weights are planned at {first.type}: with more bits they do not fit")
            return [first, *(shape for shape in others if drafts is not None or sum(used([shape])) <= free)]
    lacks, needs, takes, usable = (gigabytes(round(n)) for n in (-free, weights, kv, machine.usable_bytes))
    reason = (
        f"{lacks} too little memory: {needs} of weights and {takes} of KV for {batch} x {context} tokens, "
        f"where {usable} of {machine.count} x {machine.device.memory_gb:g} GB can be used"
    )
    count = math.ceil((1 - free / machine.usable_bytes) * machine.count)
    way_out = (
        f"Take more devices (--on {machine.device.name}x{count}), fewer bits (MODEL:TYPE), a smaller draft, "
        "a shorter context (-c) or --kv-type q8_0."
    )
    raise SettingError(f"{target} on {machine.name}", reason, way_out)


def _usual_drafts(target: str, known: Catalogue) -> Sequence[str]:
    name = known.spelled("models", target.rpartition(":")[0] or target)
    return known.drafts_for(name) if name in known.tables["models"] else ()


# What vLLM starts with

_HEAD_NAME = "NAME-OF-THE-HEAD"
_NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}
"""vLLM's lookup, with matches of 2 to 5 tokens"""
_CHECKPOINTS = ("int4", "awq", "gptq", "nvfp4", "mxfp4", "int8")
"""types of weights that vLLM does not make by itself"""


@dataclass(frozen=True, slots=True)
class Export:
    """What vLLM is started with. `config` is its --speculative-config; None where the plan is to decode
    plainly. `notes` say what is predicted and what to know, a sentence each."""

    command: Sequence[str]
    config: Mapping[str, Any] | None
    notes: Sequence[str]

    @property
    def script(self) -> str:
        """The command as a shell script, with the notes as its comments."""
        return "\n".join([*(f"# {note}" for note in self.notes), shlex.join(self.command)]) + "\n"


def export_vllm(plan: Plan) -> Export:
    """Who drafts at the first batch size, lookup alone or a draft model alone: vLLM joins none."""
    asked, devices = plan.asked, plan.asked.machine.count
    way = _paying(way for way in plan.batches[0].ways if way.drafters != "both")
    draft = next((draft for draft in asked.drafts if way and draft.name == way.draft), None)
    command = ["vllm", "serve", _loaded_name(asked.target)]
    command += ["--tensor-parallel-size", str(devices)] if devices > 1 else []
    command += ["--max-model-len", str(asked.context), "--max-num-seqs", str(max(asked.batches))]
    command += ["--quantization", "fp8"] if _is_made_8_bit(asked.target) else []
    notes = _notes(plan, way)
    if way is None:
        return Export(command, None, notes)
    config: dict[str, Any] = {"num_speculative_tokens": way.draft_length}
    if draft is None:
        config |= _NGRAM
    elif draft.name in HEADS:
        config |= {"method": way.draft} | ({} if way.draft == "mtp" else {"model": _HEAD_NAME})
    else:
        config |= {"method": "draft_model", "model": _loaded_name(draft)}
        config |= {"draft_tensor_parallel_size": _draft_devices(plan, draft)} if devices > 1 else {}
        config |= {"quantization": "fp8"} if _is_made_8_bit(draft) else {}
    notes.append("With a speculative config vLLM refuses requests with min_p or logit_bias.")
    return Export([*command, "--speculative-config", json.dumps(config)], config, notes)


def _loaded_name(model: PlannedModel) -> str:
    return model.shape.hub or model.name


def _is_made_8_bit(model: PlannedModel) -> bool:
    """Whether vLLM makes its 8-bit weights of a checkpoint that comes in others."""
    return model.name.endswith(":fp8")


def _draft_devices(plan: Plan, draft: PlannedModel) -> int:
    """1 or all, as vLLM has it: where the draft's steps are faster."""
    machine = plan.asked.machine
    one, all_ = (
        PlannedModel(draft.shape, (place,)).call_s(1, context=plan.asked.context)
        for place in (replace(machine, count=1), machine)
    )
    return 1 if one <= all_ else machine.count


def _notes(plan: Plan, way: Way | None) -> list[str]:
    asked, batch = plan.asked, plan.batches[0]
    start = f"Outrider's plan for vLLM: {asked.target.name} on {asked.machine.name}, "
    start += f"{batch.batch} x {asked.context} tokens: {batch.plain_tokens_per_s:.0f} tokens/s plainly"
    if way is None:
        return [f"{start}; no draft is expected to pay."]
    found = [
        f"{start}, {way.tokens_per_s:.0f} with {way.name} drafting {way.draft_length} "
        f"({way.speedup:.2f}x): a prediction, not a measurement."
    ]
    if plan.pays_to is not None:
        most = counted(plan.pays_to, "sequence")
        found.append(f"Above {most} at once drafts are expected to cost more than they gain.")
    models = (asked.target, *asked.drafts)
    if others := [model.name for model in models if model.name.rpartition(":")[2] in _CHECKPOINTS]:
        found.append(f"{', '.join(others)}: name a checkpoint of that type, the one below has other weights.")
    if way.draft in HEADS and way.draft != "mtp":
        found.append(f"Put the head's own name in the place of {_HEAD_NAME}.")
    return found
