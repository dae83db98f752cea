"""Why the automatic policy chose as it did, from step records and costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.data import StepRecord
from outrider.costs.expected_speed import StepCosts
from outrider.policy.auto import AutoPolicy
from outrider.session.speedup import Estimate, estimate_speedup

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
"""of calls, in tokens"""
DRAFTED = (1, 2, 4, 8)
"""lengths of drafts whose break-even is shown"""


@dataclass(frozen=True, slots=True)
class Choices:
    """How often something was chosen, and what came of it."""

    steps: int
    drafted_tokens: int
    accepted_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `--explain` shows. A break-even acceptance is None where even correct drafts do not pay; `choices`
    are keyed by the drafts' sources, "plain" for none."""

    target_calls_s: dict[int, float]
    draft_step_s: float | None
    drift: float
    break_even_lookup: dict[int, float | None]
    break_even_draft: dict[int, float | None] | None
    acceptance: dict[str, float]
    choices: dict[str, Choices]
    estimate: Estimate | None
    estimate_unknown: str | None

    @property
    def draft_must_be_right(self) -> float | None:
        """The acceptance from which the draft model pays at its best length; None if there is none, or it
        cannot pay."""
        return min(filter(None, (self.break_even_draft or {}).values()), default=None)


def explain(records: Sequence[StepRecord], policy: AutoPolicy) -> Explanation:
    """Explain one request's choices."""
    state = policy.state
    decode = [record for record in records if record.kind == "decode"]
    context = decode[-1].position if decode else 0
    calls_s = state.costs.calls_s(max(SIZES), context=context)
    draft_s = None
    if state.draft_costs.is_known and policy.models:
        draft_s = state.draft_costs.call_s(1, context=context)
    accepted = {name: state.accepted[name] / number for name, number in state.verified.items()}
    estimate, unknown = estimate_speedup(records, policy)
    return Explanation(
        target_calls_s={n: float(calls_s[n - 1]) for n in SIZES},
        draft_step_s=draft_s,
        drift=state.costs.drift,
        break_even_lookup={n: StepCosts(calls_s).break_even(n) for n in DRAFTED},
        break_even_draft=None
        if draft_s is None
        else {n: StepCosts(calls_s, draft_s).break_even(n) for n in DRAFTED},
        acceptance=accepted,
        choices=_choices(decode),
        estimate=estimate,
        estimate_unknown=unknown,
    )


def _choices(decode: Sequence[StepRecord]) -> dict[str, Choices]:
    groups: dict[str, list[StepRecord]] = defaultdict(list)
    for record in decode:
        groups[" + ".join(dict.fromkeys(record.draft.sources)) or "plain"].append(record)
    return {
        name: Choices(
            steps=len(records),
            drafted_tokens=sum(len(record.draft) for record in records),
            accepted_tokens=sum(record.num_accepted for record in records),
            seconds=sum(record.total_s - record.read_s for record in records),
        )
        for name, records in sorted(groups.items(), key=lambda group: -len(group[1]))
    }
