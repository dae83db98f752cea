"""What step records tell of a generation: counts and times (docs/json.md defines each).

Plain decoding would have made a call for each token that a drafter got emitted in front of the last one of
its step (`calls_saved`); the step's own call counts for that.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from outrider.core.data import Completion, StepRecord
from outrider.costs import CallCosts
from outrider.costs.expected_speed import StepCosts
from outrider.policy.auto import AutoPolicy


@dataclass(frozen=True, slots=True)
class DrafterCounts:
    """What one drafter, or all together, drafted, and how much was accepted."""

    drafted_tokens: int
    accepted_tokens: int
    acceptance_rate: float | None
    acceptance_by_position: tuple[float | None, ...]
    calls_saved: int


@dataclass(frozen=True, slots=True)
class DecodeTime:
    """Decoding time in seconds."""

    draft: float
    draft_model: float
    verify: float
    sampling: float
    other: float
    constraint: float


@dataclass(frozen=True, slots=True)
class Readout:
    """The counts and times of one generation."""

    finish_reason: str
    complete: bool
    rule: str
    prompt_tokens: int
    reused_tokens: int
    read_tokens: int
    generated_tokens: int
    prefill_calls: int
    draft_prefill_calls: int
    target_calls: int
    draft_calls: int
    tokens_per_target_call: float
    target_calls_saved: float
    drafted_tokens: int
    drawn_tokens: int
    accepted_tokens: int
    acceptance_rate: float | None
    acceptance_by_position: tuple[float | None, ...]
    drafters: dict[str, DrafterCounts]
    prefill_s: float
    decode_s: float
    tokens_per_s: float
    time_s: DecodeTime
    constraint_share: float
    overhead: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def read_out(completion: Completion) -> Readout:
    """The readout of a finished generation."""
    decode = [record for record in completion.records if record.kind == "decode"]
    prefill = [record for record in completion.records if record.kind == "prefill"]
    generated = len(completion.tokens)
    overall = _count(decode, None)
    names = sorted({source for record in decode for source in record.draft.sources})
    time = DecodeTime(
        draft=sum(record.draft_s for record in decode),
        draft_model=sum(record.work.model_s for record in decode),
        verify=sum(record.verify_s for record in decode),
        sampling=sum(record.sampling_s for record in decode),
        other=sum(record.other_s for record in decode),
        constraint=sum(record.constraint_s for record in decode),
    )
    decode_s = time.draft + time.verify + time.sampling + time.other
    return Readout(
        finish_reason=completion.finish_reason,
        complete=completion.is_complete,
        rule=completion.rule,
        prompt_tokens=completion.prompt_tokens,
        reused_tokens=completion.reused_tokens,
        read_tokens=sum(r.num_evaluated for r in prefill) + sum(r.read_tokens for r in decode),
        generated_tokens=generated,
        prefill_calls=len(prefill),
        draft_prefill_calls=sum(record.work.prefill_calls for record in completion.records),
        target_calls=len(decode),
        draft_calls=sum(record.work.calls for record in decode),
        tokens_per_target_call=_ratio(generated, len(decode)),
        target_calls_saved=1 - _ratio(len(decode), generated) if generated else 0.0,
        drafted_tokens=overall.drafted_tokens,
        drawn_tokens=sum(len(record.draft) for record in decode if record.draft.probs is not None),
        accepted_tokens=overall.accepted_tokens,
        acceptance_rate=overall.acceptance_rate,
        acceptance_by_position=overall.acceptance_by_position,
        drafters={name: _count(decode, name) for name in names},
        prefill_s=sum(r.total_s for r in prefill) + sum(r.work.prefill_s + r.read_s for r in decode),
        decode_s=decode_s,
        tokens_per_s=_ratio(generated, decode_s),
        time_s=time,
        constraint_share=_ratio(time.constraint, decode_s),
        overhead=_ratio(decode_s - time.verify - time.draft_model, decode_s),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _count(records: Sequence[StepRecord], drafter: str | None) -> DrafterCounts:
    drafted: list[int] = []
    accepted: list[int] = []
    saved = 0
    for record in records:
        for position, source in enumerate(record.draft.sources):
            if position == len(drafted):
                drafted.append(0)
                accepted.append(0)
            if drafter in (None, source):
                drafted[position] += 1
                accepted[position] += position < record.num_accepted
                saved += position < min(record.num_accepted, len(record.tokens) - 1)
    return DrafterCounts(
        drafted_tokens=sum(drafted),
        accepted_tokens=sum(accepted),
        acceptance_rate=sum(accepted) / sum(drafted) if sum(drafted) else None,
        acceptance_by_position=tuple(a / d if d else None for a, d in zip(accepted, drafted, strict=True)),
        calls_saved=saved,
    )


# Why the automatic policy chose as it did, and how much faster than plain decoding an answer was

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
"""of calls, in tokens"""
DRAFTED = (1, 2, 4, 8)
"""lengths of drafts whose break-even is shown"""
_MIN_TOKENS = 8
"""of an answer whose speed-up is estimated"""
_MIN_PLAIN_CALLS = 4
_MAX_BLOCKS = 16
_MIN_ERROR = 0.01
_CURVE_ERROR = 0.1
"""of a cost curve's call over one token against its larger ones, where no call of the answer shows it"""
_MAX_WIDTH = 2.0
"""of an interval that is given as a number: its upper end over its lower"""
_BUSY = 1.25
"""from this ratio on to the measured times the machine is not as it was measured: then an estimate has to be
within a tenth or so"""
_MAX_BUSY_WIDTH = 1.15


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimated speed-up over plain decoding, with an interval."""

    speedup: float
    low: float
    high: float


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
    if state.draft_costs.is_known:
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


class _Steps(NamedTuple):
    """Seconds of each step; shape (steps,)."""

    spent: npt.NDArray[np.float64]
    expected: npt.NDArray[np.float64]
    """what the call should have taken by the cost curve; 0 where plain decoding would have made it too"""
    plain: npt.NDArray[np.float64]
    """of plain decoding, without the calls that `curve` holds"""
    curve: npt.NDArray[np.float64]
    """by the cost curve, of the calls that plain decoding would have made in place of others"""
    ratio: npt.NDArray[np.float64]
    """what the call took against the curve"""
    is_yardstick: npt.NDArray[np.float64]
    """1 where that tells what a plain call takes, else 0"""

    def speedup(self, times: npt.NDArray[np.bool_]) -> float:
        """The estimate, all steps with what calls took in those of them that `times` says."""
        weights = self.is_yardstick * times
        yardstick = np.average(self.ratio, weights=weights if weights.any() else times)
        spent_s = self.spent[self.expected == 0].sum()
        others = times & (self.expected > 0)
        if others.any():
            spent_s += self.spent[others].sum() / self.expected[others].sum() * self.expected.sum()
        return float((self.plain.sum() + yardstick * self.curve.sum()) / spent_s)


def estimate_speedup(
    records: Sequence[StepRecord], policy: AutoPolicy | None
) -> tuple[Estimate | None, str | None]:
    """How much faster than plain decoding a request was; or None, and why it is not known.

    The draft model's reading of the prompt counts against it; a step that read of the prompt is left out.

    The speed-up is the time that plain decoding would have taken, over the time that was spent:

    - A call without drafts, after another one, is what plain decoding would have made. So it counts with its
      own time, however busy the machine was, and an answer without drafts has a ratio near 1.
    - Any other step counts with a call over one token for each token it emitted: as long as the cost curve
      says, times what the answer's calls of the first kind took against the curve (the yardstick). Steps
      right after a larger call are among them: their calls took 5 to 16 % longer (SmolLM2 on an EPYC,
      benchmarks/policy). Where there are fewer than four of the first kind, all calls are the yardstick.
    - What plain decoding takes beside its calls is the lower quartile of what the steps without drafts took:
      the rest is spent on drafters and on learning.
    - Where requests share their calls, plain decoding is thought to be in the same company: each of its calls
      is this step's without anybody's drafts.

    The interval is twice the jackknife's standard error: the times of one block of successive steps after the
    other are left out, and all steps are estimated from the rest. Blocks keep a slow phase together: H. R.
    Künsch, "The jackknife and the bootstrap for general stationary observations" (Annals of Statistics 17,
    1989). There is no estimate where the steps say too little.
    """
    if policy is None:
        return None, "what calls cost is not measured under this policy"
    decode = [record for record in records if record.kind == "decode" and not record.read_tokens]
    costs = policy.state.costs
    if not any(record.tokens for record in records):
        return None, "no token was generated"
    if not decode:
        return None, "its only call read the prompt too"
    if not costs.is_known or not any(record.total_s for record in decode):
        return None, "what calls cost is not known yet"
    if sum(len(record.tokens) for record in decode) < _MIN_TOKENS:
        return None, "so few tokens tell nothing"
    steps = _steps(decode, costs)
    speedup = steps.speedup(np.full(len(decode), True))
    error = _error(steps, speedup)
    estimate = Estimate(speedup, max(speedup - error, 0.0), speedup + error)
    slowness = _slowness(decode, costs)
    if slowness >= _BUSY and estimate.high > _MAX_BUSY_WIDTH * estimate.low:
        return None, f"calls took {slowness:.2f}x the measured time (does another program use the CPU?)"
    if estimate.high > _MAX_WIDTH * estimate.low:
        return None, "its calls took too different times, or were too few"
    return estimate, None


def _steps(decode: Sequence[StepRecord], costs: CallCosts) -> _Steps:
    drafted = [record.batch_drafted > 0 for record in decode]
    is_plain = [not (now or before) for now, before in zip(drafted, (False, *drafted), strict=False)]
    own = [r.sampling_s + r.other_s for r, has_drafts in zip(decode, drafted, strict=True) if not has_drafts]
    own_s = np.quantile(own or [r.sampling_s + r.other_s for r in decode], 0.25)
    rows = []
    for record, plain in zip(decode, is_plain, strict=True):
        call_s = costs.call_s(record.batch_tokens, context=record.position)
        together = record.batch_tokens - record.batch_drafted
        places = range(record.position, record.position + len(record.tokens))
        calls_s = [costs.call_s(together, context=place) for place in places]
        plain_s, curve_s = (record.verify_s + own_s, 0.0) if plain else (own_s * len(calls_s), sum(calls_s))
        is_yardstick = plain or sum(is_plain) < _MIN_PLAIN_CALLS
        expected_s = 0.0 if plain else call_s
        rows.append((record.total_s, expected_s, plain_s, curve_s, record.verify_s / call_s, is_yardstick))
    return _Steps(*np.array(rows, dtype=np.float64).T)


def _slowness(decode: Sequence[StepRecord], costs: CallCosts) -> float:
    if not costs.is_measured:
        return 1.0
    measured = CallCosts(costs.points)
    return sum(record.verify_s for record in decode) / sum(
        measured.call_s(r.batch_tokens, context=r.position) for r in decode
    )


def _error(steps: _Steps, speedup: float) -> float:
    num_steps = len(steps.spent)
    error = _MIN_ERROR
    if steps.curve.any() and steps.is_yardstick.all():
        error = _CURVE_ERROR
    if num_steps < _MIN_PLAIN_CALLS:
        return speedup * max(error, _CURVE_ERROR)
    num_blocks = min(num_steps, _MAX_BLOCKS)
    block_of = np.arange(num_steps) * num_blocks // num_steps
    found = np.array([steps.speedup(block_of != block) for block in range(num_blocks)])
    variance = (num_blocks - 1) * found.var()
    return math.hypot(speedup * error, 2 * math.sqrt(variance))
