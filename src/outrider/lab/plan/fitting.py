"""What is loaded: target and drafts at types of weights that fit, and what would fit where they do not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from outrider.core.errors import SettingError
from outrider.core.notices import notify
from outrider.core.numbers import gigabytes
from outrider.lab.plan.calls import Machine, memory_bytes
from outrider.lab.plan.catalogue import Catalogue
from outrider.lab.plan.shapes import HEADS, ModelShape, find_shape, head_of

_TYPES = {
    "llama.cpp": (("q4_k_m", "q8_0"), ("q4_k_m", "q4_k_m"), ("q3_k_m", "q4_k_m"), ("q2_k", "q4_k_m")),
    "vllm": (("", ""), ("fp8", "fp8"), ("int4", "int4")),
}
"""By engine the types of target and drafts that are tried for models of which none is asked for; "": its
own."""
_LEAST_CONTEXT = 1024


@dataclass(frozen=True, slots=True)
class Wanted:
    """Models by name for so many sequences of so many tokens; `drafts` None: those that could draft for
    it."""

    target: str
    drafts: tuple[str, ...] | None
    machine: Machine
    batch: int
    context: int
    kv_type: str = "f16"

    def shapes(self, known: Catalogue, types: tuple[str, str] = ("", "")) -> list[ModelShape]:
        """The target's, then the drafts'. Raises SettingError and ModelFileError."""
        target = find_shape(self.target, known, types[0], self.kv_type)
        return [
            target,
            *(
                head_of(target, name) if name in HEADS else find_shape(name, known, types[1], self.kv_type)
                for name in self.names(known)
            ),
        ]

    def names(self, known: Catalogue) -> Sequence[str]:
        if self.drafts is not None:
            return self.drafts
        name = known.spelled("models", self.target.rpartition(":")[0] or self.target)
        return known.drafts_for(name) if name in known.tables["models"] else ()

    def used_bytes(self, shapes: Sequence[ModelShape]) -> tuple[float, float]:
        """Weights and KV of what has to fit: of drafts that nobody asked for, none."""
        loaded = shapes if self.drafts is not None else shapes[:1]
        return memory_bytes(loaded, batch=self.batch, context=self.context)

    def free_bytes(self, shapes: Sequence[ModelShape]) -> float:
        """What is left beside these; below 0 what is missing."""
        return self.machine.usable_bytes - sum(self.used_bytes(shapes))


def fitting(wanted: Wanted, known: Catalogue) -> list[ModelShape]:
    """The shapes, at types of weights that fit where none is asked for; a notice says where these are not the
    usual ones. Raises SettingError where nothing fits, with what would."""
    choices = _TYPES[wanted.machine.engine]
    for types in choices:
        found = wanted.shapes(known, types)
        if (free := wanted.free_bytes(found)) < 0:
            continue
        if wanted.drafts is None:
            found = [found[0], *(draft for draft in found[1:] if sum(wanted.used_bytes([draft])) <= free)]
        if types[0] != choices[0][0]:
            notify(f"weights are planned at {found[0].type}: with more bits they do not fit")
        return found
    raise _too_large(wanted, known, found)


def _too_large(wanted: Wanted, known: Catalogue, shapes: Sequence[ModelShape]) -> SettingError:
    machine, missing = wanted.machine, -wanted.free_bytes(shapes)
    sizes = (missing, *wanted.used_bytes(shapes), machine.usable_bytes)
    lacks, weights, kv, usable = (gigabytes(round(size)) for size in sizes)
    reason = (
        f"{lacks} too little memory: {weights} of weights and {kv} of KV for {wanted.batch} x "
        f"{wanted.context} tokens, where {usable} of {machine.count} x {machine.device.memory_gb:g} GB can "
        "be used"
    )
    needed = math.ceil((missing / machine.usable_bytes + 1) * machine.count)
    ways = [*_changes_that_fit(wanted, known), f"more devices: --on {machine.device.name}x{needed}"]
    return SettingError(f"{wanted.target} on {machine.name}", reason, f"It fits with {'; or '.join(ways)}.")


def _changes_that_fit(wanted: Wanted, known: Catalogue) -> list[str]:
    """Changes that make it fit, each worked out: of one kind, or where none does of two or three together."""
    types = _TYPES[wanted.machine.engine][-1]
    kinds = [*map(list, (_fewer_bits(wanted, known), _smaller_drafts(wanted, known), _less_kv(wanted)))]

    def fits(changes: Sequence[_Change]) -> bool:
        changed = replace(wanted, **{name: value for _, fields in changes for name, value in fields.items()})
        return changed.free_bytes(changed.shapes(known, types)) >= 0

    for number in (1, 2, 3):
        first = (next(filter(fits, product(*chosen)), ()) for chosen in combinations(kinds, number))
        if found := [" and ".join(said for said, _ in changes) for changes in first if changes]:
            return found
    return []


_Change = tuple[str, dict[str, Any]]
"""How it is said, and the fields of `Wanted` that it sets."""


def _fewer_bits(wanted: Wanted, known: Catalogue) -> Iterator[_Change]:
    base, _, own = wanted.target.rpartition(":")
    if known.spelled("models", base) not in known.tables["models"] or own not in known.tables["types"]:
        return  # another's file, or a type that was tried down to the last
    is_gguf = known.weight_type(own).operations == "i8"
    names = [name for name, kind in known.tables["types"].items() if (kind["operations"] == "i8") == is_gguf]
    for name in sorted(names, key=lambda name: -known.weight_type(name).bits):
        if known.weight_type(name).bits < known.weight_type(own).bits:
            yield f"fewer bits: --target {base}:{name}", {"target": f"{base}:{name}"}


def _smaller_drafts(wanted: Wanted, known: Catalogue) -> Iterator[_Change]:
    if not wanted.drafts or wanted.drafts[0] in HEADS:
        return
    size = find_shape(wanted.drafts[0], known).parameters
    others = [name for name in replace(wanted, drafts=None).names(known) if name not in HEADS]
    for name in sorted(others, key=lambda name: -find_shape(name, known).parameters):
        if find_shape(name, known).parameters < size:
            yield f"a smaller draft: --draft {name}", {"drafts": (name,)}
    yield "no draft model: --draft none", {"drafts": ()}


def _less_kv(wanted: Wanted) -> Iterator[_Change]:
    if wanted.kv_type == "f16":
        yield "KV in 8 bits: --kv-type q8_0", {"kv_type": "q8_0"}
    for part in (2, 4, 8, 16):
        if (tokens := wanted.context // part) >= _LEAST_CONTEXT:
            yield f"a shorter context: -c {tokens}", {"context": tokens}
