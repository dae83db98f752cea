"""The automatic policy in simulated time: near plain decoding at worst, near the best fixed choice mostly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from outrider.core.contracts import CHECKPOINTS, FREE, Rewinding
from outrider.costs import CallCosts
from outrider.costs.points import Curve
from outrider.lab.recording import Recording
from outrider.lab.replay import Replayed, replay
from outrider.policy import AutoPolicy, FixedPolicy
from recordings import FLAT, SMALL, STAIRS, STEEP, DraftKind, TextKind, curve, recording

MACHINES = {"stairs": (STAIRS, 0.01), "steep": (STEEP, 0.05), "flat": (FLAT, 0.02)}
"""target calls, and a draft model's step where a target's takes 0.1 s"""


def play(
    texts: Sequence[Recording],
    machine: str,
    *,
    believed: float = 1.0,
    draft_believed: float = 1.0,
    rewinding: Rewinding = FREE,
) -> list[Replayed]:
    """Decode the texts one after another with one policy, which may have wrong ideas of what calls take."""
    ratios, step_s = MACHINES[machine]
    thought = curve(ratios, 0.1 * believed), curve(SMALL, step_s * draft_believed)
    policy = AutoPolicy(*thought)
    drafts = {"draft": curve(SMALL, step_s)}
    return [replay(each, policy, curve(ratios), drafts, rewinding=rewinding) for each in texts]


def mean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(float(np.mean(np.log(values))))


def texts_of(kind: TextKind, draft: DraftKind, count: int = 3) -> list[Recording]:
    return [recording(kind, draft, seed=seed) for seed in range(count)]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("draft", "kind"),
    [
        ("wrong", "random"),
        ("wrong but sure", "random"),
        ("coin", "random"),
        ("wrong but sure", "mixed"),
        ("wrong", "copying"),
        ("target", "mixed"),
    ],
)
@pytest.mark.parametrize("rewinding", [FREE, CHECKPOINTS], ids=["free", "checkpoints"])
def test_never_slower_than_plain_decoding(
    machine: str, draft: DraftKind, kind: TextKind, rewinding: Rewinding
) -> None:
    speeds = [played.speedup for played in play(texts_of(kind, draft, 6), machine, rewinding=rewinding)]
    assert mean(speeds[:3]) > 0.92, "texts on which the draft model had to be found out"
    assert mean(speeds[3:]) > 0.93
    assert min(speeds) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [(2.0, 2.0), (0.5, 0.5), (0.5, 2.0), (2.0, 0.5)])
@pytest.mark.parametrize("draft", ["wrong but sure", "calibrated"])
@pytest.mark.parametrize("machine", ["stairs", "flat"])
def test_wrong_costs_are_seen_through(machine: str, draft: DraftKind, wrong: tuple[float, float]) -> None:
    """By a factor of two: the target's and the draft model's, in the same direction and in opposite ones."""
    texts = [*texts_of("random", draft, 2), *texts_of("mixed", draft, 2)]
    misled = [p.speedup for p in play(texts, machine, believed=wrong[0], draft_believed=wrong[1])]
    assert mean(misled) > 0.97 and min(misled) > 0.92
    informed = [p.speedup for p in play(texts, machine)]
    assert mean(misled) > 0.88 * mean(informed)


class Jumping(CallCosts):
    """Calls take longer from a context of so many tokens on."""

    def __init__(self, ratios: Mapping[int, float], unit_s: float, factor: float, at: int) -> None:
        super().__init__()
        self._slow, self._fast = curve(ratios, unit_s * factor), curve(ratios, unit_s)
        self._at = at

    def calls_s(self, most: int, *, context: int, others: int = 0, num_sequences: int = 1) -> Curve:
        costs = self._fast if context < self._at else self._slow
        return costs.calls_s(most, context=context, others=others, num_sequences=num_sequences)


@pytest.mark.slow
@pytest.mark.parametrize("factors", [(1.5, 1.0), (1.5, 1.5), (1.0, 4.0)])
@pytest.mark.parametrize("machine", ["stairs", "flat"])
def test_it_follows_costs_that_change_in_the_middle(machine: str, factors: tuple[float, float]) -> None:
    ratios, step_s = MACHINES[machine]
    speeds: list[float] = []
    informed: list[float] = []
    for seed in range(2):
        made = recording("mixed", "calibrated", seed=seed, length=200)
        costs = Jumping(ratios, 0.1, factors[0], 270)
        draft = Jumping(SMALL, step_s, factors[1], 270)
        policies = (
            AutoPolicy(curve(ratios), curve(SMALL, step_s)),
            AutoPolicy(curve(ratios, 0.1 * factors[0]), curve(SMALL, step_s * factors[1])),
        )
        for policy, found in zip(policies, (speeds, informed), strict=True):
            played = replay(made, policy, costs, {"draft": draft})
            late = [record for record in played.records if record.position >= 270]
            plain_s = sum(costs.call_s(1, context=270) * len(record.tokens) for record in late)
            found.append(plain_s / sum(record.total_s for record in late))
    assert min(speeds) > 0.95
    assert mean(speeds) > 0.9 * mean(informed)


def test_the_draft_that_is_the_target_is_made_use_of() -> None:
    for machine, least in (("stairs", 2.5), ("flat", 2.2)):
        for kind in ("random", "mixed"):
            assert mean([p.speedup for p in play(texts_of(kind, "target"), machine)]) > least


def test_finding_out_takes_little_of_the_time_and_pays_when_things_change() -> None:
    """A draft model that was always wrong is asked now and then all the same."""
    costs, draft = curve(FLAT), {"draft": curve(SMALL, 0.01)}
    policy = AutoPolicy(curve(FLAT), curve(SMALL, 0.01), free=False)
    for made in texts_of("random", "wrong", 6):
        replay(made, policy, costs, draft)
    wrong = replay(recording("random", "wrong", seed=7, length=1000, prompt_tokens=40), policy, costs, draft)
    assert sum(record.work.calls for record in wrong.records) > 0
    assert 1 - 0.03 < wrong.speedup < 1
    right = replay(recording("random", "target", seed=8, length=1000, prompt_tokens=40), policy, costs, draft)
    assert right.speedup > 2


def test_a_bad_draft_model_is_hardly_asked() -> None:
    played = play(texts_of("random", "wrong", 8), "flat")
    asked = [sum(record.work.calls for record in each.records) for each in played]
    assert 0 < sum(asked[:4]) <= 10 * 4
    assert sum(asked[6:]) <= sum(asked[:2]) / 2


def fixed_choices(made: Recording, machine: str) -> float:
    """The best of the fixed choices, in hindsight."""
    ratios, step_s = MACHINES[machine]
    models: dict[str, CallCosts] = {"draft": curve(SMALL, step_s)}
    found = [
        replay(made, FixedPolicy(most, p_min=p_min), curve(ratios), using).speedup
        for using in (None, models)
        for most in (1, 3, 8)
        for p_min in (0.5, 0.8)
    ]
    return max(1.0, *found)


@pytest.mark.parametrize("machine", ["stairs", "flat"])
def test_mostly_as_good_as_the_best_fixed_choice_in_hindsight(machine: str) -> None:
    texts = [*texts_of("random", "calibrated", 4), *texts_of("mixed", "calibrated", 4)]
    ratios = [p.speedup / fixed_choices(t, machine) for t, p in zip(texts, play(texts, machine), strict=True)]
    assert np.median(ratios) > 0.92
    assert min(ratios) > 0.7


@pytest.mark.parametrize("machine", ["stairs", "flat"])
def test_a_draft_model_reads_no_prompt_of_a_short_answer(machine: str) -> None:
    """It would cost more than it can bring; a longer answer repays it, as soon as it is longer."""
    for length, reads in ((16, 0), (300, 1)):
        [played] = play([recording("random", "target", length=length, prompt_tokens=600)], machine)
        assert sum(record.work.prefill_calls for record in played.records) == reads
        assert played.speedup == pytest.approx(1.0) if not reads else played.speedup > 1.5
