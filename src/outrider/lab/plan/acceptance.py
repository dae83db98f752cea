"""What drafts are expected to bring: tables of acceptance by position, given, bundled or of recordings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from outrider.core.errors import SettingError
from outrider.lab.plan.catalogue import bundled, unknown

Drafting = Literal["lookup", "draft", "both"]

LONGEST = 16
"""tokens of the longest draft that is planned"""
ALL = "all"
"""the bundled table over all kinds of text"""
_MEASURED_RATIO = 0.32
"""of the pair of the bundled tables"""
_SIZE_POWER = 0.3
"""Between what llama-swap's and draftbench's rows (benchmarks/plan) say of drafts of a 60th to a 10th."""
_WAY_OUT = "Give a probability such as 0.8, or the share accepted by position: 0.8,0.65,0.5."


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Of one kind of drafter: how often it has a draft, and by position how often that has a token there and
    how often this one and all before it are accepted, both as parts of the drafts.

    >>> Acceptance.of(0.5).expected(2)
    0.75
    """

    accepted: tuple[float, ...]
    drafted: tuple[float, ...] = (1.0,) * LONGEST
    offered: float = 1.0

    def shifted(self, odds: float) -> Acceptance:
        """With the odds of each token, once those before it are accepted, times `odds`."""
        shares, before, product = list[float](), 1.0, 1.0
        for share in self.accepted:
            given = share / before if before else 0.0
            product *= odds * given / (1 - given + odds * given)
            shares.append(product)
            before = share
        return replace(self, accepted=tuple(shares))

    def expected(self, length: int) -> float:
        """Expected accepted tokens of a draft of at most `length`."""
        return sum(self.accepted[:length])

    @classmethod
    def of(cls, probability: float) -> Acceptance:
        """Every token is accepted with this probability once those before it are."""
        return cls(tuple(probability**i for i in range(1, LONGEST + 1)))

    @classmethod
    def by_position(cls, accepted: Sequence[float]) -> Acceptance:
        """The share of drafts whose first 1, 2, … tokens are accepted; beyond the last it goes on falling as
        between the last two."""
        found = list(accepted)
        before = found[-2] if len(found) > 1 else 1.0
        ratio = found[-1] / before if before else 0.0
        while len(found) < LONGEST:
            found.append(found[-1] * ratio)
        return cls(tuple(found[:LONGEST]))


def read_acceptance(text: str) -> tuple[str, Acceptance]:
    """What is said of whom: "0.8", "0.8,0.6", "lookup=0.5" or "NAME=…" for a draft of several. Raises
    SettingError."""
    name, _, values = text.rpartition("=")
    try:
        found = [float(value) for value in values.split(",")]
    except ValueError:
        raise SettingError(f"--acceptance {text}", f"{values!r} is not a number", _WAY_OUT) from None
    if not all(0 <= value <= 1 for value in found):
        raise SettingError(f"--acceptance {text}", "a share is between 0 and 1", _WAY_OUT)
    if any(later > earlier for earlier, later in pairwise(found)):
        reason = "the shares by position rise, though a token counts only where all before it were accepted"
        raise SettingError(f"--acceptance {text}", reason, _WAY_OUT)
    return name, Acceptance.of(found[0]) if len(found) == 1 else Acceptance.by_position(found)


def of_workload(name: str) -> dict[Drafting, Acceptance]:
    """The bundled table of a kind of text, of lookup and of a draft model. Raises SettingError, with the
    nearest names."""
    tables = bundled("acceptance")["workloads"]
    if name not in tables:
        raise unknown("workload", name, tables)
    return {
        kind: Acceptance(tuple(entry["accepted"]), tuple(entry["drafted"]), entry["offered"])
        for kind, entry in tables[name].items()
    }


def of_draft(workload: str, size_ratio: float) -> Acceptance:
    """The bundled acceptance of a draft model with so much of its target's parameters: the odds of each token
    go with the power _SIZE_POWER of that, since a draft that is much smaller guesses less."""
    return of_workload(workload)["draft"].shifted((size_ratio / _MEASURED_RATIO) ** _SIZE_POWER)


def of_head(kind: str, workload: str) -> Acceptance:
    """The published acceptance of a head, on this kind of text or, where that was not published, on all."""
    tables = bundled("heads")[kind]
    return Acceptance.by_position(tables.get(workload, tables[ALL]))


def source(drafts: Sequence[str]) -> str:
    """What the bundled tables of these drafts were measured on."""
    heads = bundled("heads")
    found = [heads[name]["source"] for name in drafts if name in heads]
    others = [str(bundled("acceptance")["source"])] if not drafts or set(drafts) - set(heads) else []
    return "; ".join([*others, *found])


@dataclass(frozen=True, slots=True)
class Steps:
    """An expected step: the tokens that come of it, the shares of target calls and the numbers of draft calls
    by their size, in tokens of one sequence."""

    tokens: float
    target_calls: Mapping[int, float]
    draft_calls: Mapping[int, float]


PLAIN = Steps(1.0, {1: 1.0}, {})


def expected_steps(lookup: Acceptance | None, model: Acceptance | None, length: int) -> Steps:
    """The expected step with drafts of at most `length` tokens, of those who draft.

    Where both do, the model is asked when lookup has nothing; its acceptance there is taken to be that
    anywhere. A draft model's first call also reads the target's last token.
    """
    looked_up = lookup.offered if lookup else 0.0
    tokens, target, draft = 1.0, {1: 1.0}, dict[int, float]()
    for share, table in ((looked_up, lookup), (1.0 - looked_up, model)):
        if table is None:
            continue
        tokens += share * table.expected(length)
        target[1] -= share
        longer = [*table.drafted[1:length], 0.0]
        for size, (here, beyond) in enumerate(zip(table.drafted, longer, strict=False), 1):
            target[size + 1] = target.get(size + 1, 0.0) + share * (here - beyond)
    if model is not None:
        draft = {2: 1.0 - looked_up, 1: (1.0 - looked_up) * (length - 1)}
    return Steps(tokens, _positive(target), _positive(draft))


def _positive(calls: Mapping[int, float]) -> dict[int, float]:
    return {size: number for size, number in sorted(calls.items()) if number > 1e-12}
