"""The choices that are compared: what decides by itself, and every setting one could have fixed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from outrider.core.contracts import Policy
from outrider.costs import CallCosts
from outrider.lab.recording import Recording
from outrider.lab.replay import Replayed, replay
from outrider.policy.auto import AutoPolicy
from outrider.policy.fixed import FixedPolicy

LENGTHS = (2, 4, 8, 16)
P_MINS = (0.0, 0.5, 0.75)

Curves = Mapping[str, CallCosts]
"""draft models' curves by the drafter's name"""


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy and the drafters that it may ask. `policy` makes a fresh one that knows these curves."""

    name: str
    policy: Callable[[CallCosts, Curves], Policy]
    lookup: bool = True
    model: bool = True

    def replay(
        self, recording: Recording, policy: Policy, costs: CallCosts, drafts: Curves, own_s: float = 0.0
    ) -> Replayed:
        """Decode a recording with `policy` and this choice's drafters."""
        free = None if self.lookup else ()
        return replay(recording, policy, costs, drafts if self.model else None, free=free, own_s=own_s)


def _auto(costs: CallCosts, drafts: Curves) -> Policy:
    return AutoPolicy(costs, next(iter(drafts.values()), None))


def fixed(length: int, p_min: float, *, lookup: bool = True, model: bool = True) -> Choice:
    """A draft length and a least probability that somebody set."""
    who = {(True, True): "both", (True, False): "lookup", (False, True): "model"}[lookup, model]
    return Choice(
        f"{who} {length}/{p_min:g}", lambda _costs, _drafts: FixedPolicy(length, p_min), lookup, model
    )


AUTO = Choice("auto", _auto)
PLAIN = Choice("plain", lambda _costs, _drafts: FixedPolicy(0), False, False)


def autos(has_draft: bool) -> list[Choice]:
    """Those that decide by themselves, with all drafters and with one kind."""
    if not has_draft:
        return [AUTO]
    return [AUTO, Choice("auto, lookup", _auto, model=False), Choice("auto, model", _auto, lookup=False)]


def settings(has_draft: bool) -> list[Choice]:
    """Plain decoding and every fixed length, p-min and set of drafters."""
    kinds = [(True, False), (False, True), (True, True)] if has_draft else [(True, False)]
    return [PLAIN] + [
        fixed(length, p_min, lookup=lookup, model=model)
        for lookup, model in kinds
        for length in LENGTHS
        for p_min in P_MINS
    ]
