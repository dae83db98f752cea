"""What every policy makes of the stored recordings: simulated seconds at measured cost curves, no clock."""

import sys
from collections.abc import Callable, Mapping, Sequence
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from golden.normal import rounded
from outrider.core.contracts import Policy
from outrider.costs import CallCosts
from outrider.costs.store import PairCosts, import_costs
from outrider.lab.recording import Recording
from outrider.lab.replay import replay
from outrider.policy.auto import AutoPolicy
from outrider.policy.fixed import FixedPolicy
from policy.bound import hindsight_bound
from policy.recorded import read_recordings

__all__ = ["few_replays", "replays"]

_FOLDER = Path(__file__).parents[2] / "benchmarks" / "policy"
_RECORDINGS = {"heldout_q4": 1, "heldout_f16": 1, "qwen_q4": 1, "qwen_q4_ik": 4, "smollm2_ik": 4}
"""Of each file every so many recordings."""
_CURVES = ("epyc_ik_native", "xeon_ik_wheel", "xeon_q4_small_draft")
_DRAFT = "draft"

Make = Callable[[PairCosts], Policy]


def _automatic(costs: PairCosts) -> Policy:
    # A copy: real calls refine what it knows.
    target = CallCosts.from_json(costs.target.as_json())
    return AutoPolicy(target, CallCosts.from_json(costs.draft.as_json()) if costs.draft else None)


def _fixed(length: int, p_min: float = 0.65) -> Make:
    return lambda _costs: FixedPolicy(length, 0, p_min)


_POLICIES: Mapping[str, tuple[Make, bool, bool]] = {
    "automatic": (_automatic, True, True),
    "automatic, lookup": (_automatic, True, False),
    "automatic, draft model": (_automatic, False, True),
    "plain": (_fixed(0), True, True),
    "fixed 8": (_fixed(8), True, True),
    "fixed 3, any confidence": (_fixed(3, 0.0), True, True),
    "fixed 4, lookup": (_fixed(4, 0.0), True, False),
    "fixed 16, lookup": (_fixed(16, 0.5), True, False),
    "fixed 2, draft model": (_fixed(2, 0.0), False, True),
    "fixed 16, draft model": (_fixed(16, 0.75), False, True),
}
"""How each is made, and whether it may ask the lookup and the draft model."""

_WARM = "automatic, warm"
"""The automatic choice that goes on learning from one recording to the next."""


def replays() -> Any:
    """Every policy over all recordings at three curves."""
    return {name: _at(name, _recordings(_RECORDINGS)) for name in _CURVES}


def few_replays() -> Any:
    """Every policy over a few recordings at one curve."""
    return _at("xeon_q4_small_draft", _recordings({"heldout_f16": 4}))


def _recordings(files: Mapping[str, int]) -> list[Recording]:
    return [
        recording
        for name, every in files.items()
        for recording in read_recordings(_FOLDER / f"{name}.recordings.jsonl")[::every]
    ]


def _at(curve: str, recordings: Sequence[Recording]) -> Any:
    costs = import_costs(_FOLDER / "curves" / f"{curve}.json")
    drafts = {_DRAFT: costs.draft} if costs.draft else {}
    bounds = [hindsight_bound(recording, costs.target, drafts) for recording in recordings]
    found = {name: _figures(recordings, costs, bounds, *how) for name, how in _POLICIES.items()}
    found[_WARM] = _figures(recordings, costs, bounds, *_POLICIES["automatic"], warm=True)
    return rounded(found | {"bound": {"seconds": sum(bounds)}})


def _figures(
    recordings: Sequence[Recording],
    costs: PairCosts,
    bounds: Sequence[float],
    make: Make,
    lookup: bool,
    model: bool,
    *,
    warm: bool = False,
) -> Any:
    """Seconds in all, means over the recordings, calls and tokens, and the seconds of each recording."""
    drafts = {_DRAFT: costs.draft} if costs.draft and model else None
    policy, played = make(costs), []
    for recording in recordings:
        policy = policy if warm else make(costs)
        played.append(replay(recording, policy, costs.target, drafts, free=None if lookup else ()))
    records = [record for one in played for record in one.records]
    return {
        "seconds": sum(one.seconds for one in played),
        "speedup": _mean([one.speedup for one in played]),
        "share_of_bound": _mean([b / one.seconds for b, one in zip(bounds, played, strict=True)]),
        "target_calls": len(records),
        "drafted": sum(len(record.draft) for record in records),
        "accepted": sum(record.num_accepted for record in records),
        "each_s": " ".join(f"{one.seconds:.6g}" for one in played),
    }


def _mean(ratios: Sequence[float]) -> float:
    """Of ratios: geometric."""
    return exp(fmean(map(log, ratios)))
