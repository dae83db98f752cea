"""The automatic policy in simulated time: near plain decoding at worst, near the best fixed choice mostly."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from outrider.core.contracts import CHECKPOINTS, FREE, Rewinding
from outrider.core.params import Drafting
from outrider.lab.recording import Recording
from outrider.lab.replay import Replayed, replay
from outrider.policy.auto import AutoPolicy
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


def test_the_draft_that_is_the_target_is_made_use_of() -> None:
    for machine, least in (("stairs", 2.5), ("flat", 2.2)):
        for kind in ("random", "mixed"):
            assert mean([p.speedup for p in play(texts_of(kind, "target"), machine)]) > least


def test_finding_out_takes_little_of_the_time_and_pays_when_things_change() -> None:
    """A draft model that was always wrong is asked now and then all the same."""
    costs, draft = curve(FLAT), {"draft": curve(SMALL, 0.01)}
    policy = AutoPolicy(curve(FLAT), curve(SMALL, 0.01), Drafting("model"))
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


@pytest.mark.parametrize("machine", ["stairs", "flat"])
def test_a_draft_model_reads_no_prompt_of_a_short_answer(machine: str) -> None:
    """It would cost more than it can bring; a longer answer repays it, as soon as it is longer."""
    for length, reads in ((16, 0), (300, 1)):
        [played] = play([recording("random", "target", length=length, prompt_tokens=600)], machine)
        assert sum(record.work.prefill_calls for record in played.records) == reads
        assert played.speedup == pytest.approx(1.0) if not reads else played.speedup > 1.5
