"""What an answer took: `usage` in OpenAI's terms, and the `outrider` object (docs/api.md). All of it is
derived from step records by `outrider.session.readout` and `outrider.session.explain`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from outrider.core.data import Completion
from outrider.policy import AutoPolicy
from outrider.server.jobs import Job
from outrider.server.prepare.plan import Plan
from outrider.session.explain import Estimate, estimate_speedup
from outrider.session.readout import Readout, read_out

_FORCED = "grammar"
"""The source of drafted tokens that a grammar left no choice about."""
_COUNTS = ("target_calls", "draft_calls", "generated_tokens", "drafted_tokens", "accepted_tokens")
_DRAFTER_COUNTS = ("drafted_tokens", "accepted_tokens", "calls_saved")


def usage_of(plan: Plan, jobs: Sequence[Job], reasoning_tokens: int = 0) -> dict[str, Any]:
    """Prompt and completion tokens. The choices of one prompt share it: it counts once for them."""
    completions = [job.completion for job in jobs]
    readouts = [read_out(completion) for completion in completions]
    prompts = completions[:: plan.choices_per_prompt]
    prompt_tokens = sum(completion.prompt_tokens for completion in prompts)
    generated = sum(readout.generated_tokens for readout in readouts)
    accepted = sum(readout.accepted_tokens for readout in readouts)
    drafted = sum(readout.drafted_tokens for readout in readouts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prompt_tokens + generated,
        "prompt_tokens_details": {
            "cached_tokens": sum(completion.reused_tokens for completion in prompts),
            "audio_tokens": 0,
        },
        "completion_tokens_details": {
            "reasoning_tokens": reasoning_tokens,
            "audio_tokens": 0,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def account_of(plan: Plan, jobs: Sequence[Job], policy: AutoPolicy | None) -> dict[str, Any]:
    """What speculation did. Of several choices counts add up, and `choices` has each one's."""
    each = [_of_choice(job, policy) for job in jobs]
    whole = {"policy": plan.policy, "rule": jobs[0].completion.rule, "lossy": jobs[0].completion.lossy}
    whole["bitwise"] = plan.bitwise
    whole |= each[0] if len(each) == 1 else _together(each)
    whole["notices"] = list(plan.notices)
    return whole


def _of_choice(job: Job, policy: AutoPolicy | None) -> dict[str, Any]:
    readout = read_out(job.completion)
    estimate, why = estimate_of(job.completion, policy)
    return _counts(readout) | {
        "times": _times(readout, job.queued_s),
        "estimated_speedup": asdict(estimate) if estimate else None,
        "estimated_speedup_unknown": why,
    }


def _counts(readout: Readout) -> dict[str, Any]:
    forced = readout.drafters.get(_FORCED)
    return {
        **{name: getattr(readout, name) for name in _COUNTS},
        "forced_tokens": forced.accepted_tokens if forced else 0,
        "tokens_per_target_call": readout.tokens_per_target_call,
        "drafters": {
            name: {count: getattr(counts, count) for count in _DRAFTER_COUNTS}
            for name, counts in readout.drafters.items()
        },
        "reused_prompt_tokens": readout.reused_tokens,
    }


def _times(readout: Readout, queued_s: float) -> dict[str, float]:
    time = readout.time_s
    return {
        "queued_s": queued_s,
        "prefill_s": readout.prefill_s,
        "decode_s": readout.decode_s,
        "target_s": time.verify,
        "draft_s": time.draft,
        "sampling_s": time.sampling,
        "constraint_s": time.constraint,
        "other_s": time.other,
    }


def _together(each: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several choices as one: counts add up, of times the longest holds, for the choices ran side by side."""
    first, drafters = each[0], dict[str, dict[str, int]]()
    for one in each:
        for name, counts in one["drafters"].items():
            so_far = drafters.setdefault(name, dict.fromkeys(counts, 0))
            for key, count in counts.items():
                so_far[key] += count
    whole: dict[str, Any] = {
        key: sum(one[key] for one in each) for key, value in first.items() if isinstance(value, int)
    }
    whole["tokens_per_target_call"] = whole["generated_tokens"] / max(whole["target_calls"], 1)
    whole["drafters"] = drafters
    whole["times"] = {key: max(one["times"][key] for one in each) for key in first["times"]}
    whole["estimated_speedup"] = None
    whole["estimated_speedup_unknown"] = "the choices were generated side by side"
    whole["choices"] = list(each)
    return whole


def estimate_of(completion: Completion, policy: AutoPolicy | None) -> tuple[Estimate | None, str | None]:
    """How much faster than plain decoding an answer was, or why nobody knows."""
    if policy is None:
        return None, "what calls cost is not measured under this policy"
    estimate = estimate_speedup(completion.records, policy)
    return estimate, None if estimate else "what calls cost is not known yet"
