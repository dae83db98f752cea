"""What the automatic choice makes of stored recordings, in simulated seconds at measured cost curves."""

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from golden.normal import rounded
from outrider.costs import CallCosts
from outrider.costs.store import import_costs
from outrider.lab.replay import replay
from outrider.policy.auto import AutoPolicy
from policy.recorded import read_recordings

__all__ = ["replays"]

_FOLDER = Path(__file__).parents[2] / "benchmarks" / "policy"
_RECORDINGS = {"xeon_q4_small_draft": ("heldout_f16", 4), "epyc_ik_native": ("qwen_q4_ik", 8)}
"""At each curve, of a file every so many recordings."""
_ASKED = {
    "both": (True, True),
    "lookup": (True, False),
    "draft": (False, True),
}
"""Whether the lookup and the draft model may be asked."""


def replays() -> Any:
    """Seconds, calls and tokens, by who may draft; the policy goes on learning from one text to the next."""
    return {f"{curve}, {who}": _at(curve, *asked) for curve in _RECORDINGS for who, asked in _ASKED.items()}


def _at(curve: str, lookup: bool, model: bool) -> Any:
    costs, (name, every) = import_costs(_FOLDER / "curves" / f"{curve}.json"), _RECORDINGS[curve]
    # A copy: real calls refine what it knows.
    target = CallCosts.from_json(costs.target.as_json())
    policy = AutoPolicy(target, CallCosts.from_json(costs.draft.as_json()) if costs.draft else None)
    drafts = {"draft": costs.draft} if costs.draft and model else None
    played = [
        replay(recording, policy, costs.target, drafts, free=None if lookup else ())
        for recording in read_recordings(_FOLDER / f"{name}.recordings.jsonl")[::every]
    ]
    records = [record for one in played for record in one.records]
    return rounded(
        {
            "target_calls": len(records),
            "drafted": sum(len(record.draft) for record in records),
            "accepted": sum(record.num_accepted for record in records),
            "each_s": " ".join(f"{one.seconds:.6g}" for one in played),
        }
    )
