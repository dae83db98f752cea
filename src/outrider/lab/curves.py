"""Cost curves as the engine meets them: measured calls, corrected by those that it really made.

A call that is measured by itself is not quite the one in a generation: there other memory was used in
between, the context is real, all rows of logits are read. So every size takes the ratio that real calls show
against the measured curve; sizes without any take their neighbours'.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from outrider.core.data import StepRecord
from outrider.costs import CallCosts
from outrider.lab.predict import Prices, bounds_s, policy_times, predict
from outrider.lab.record import Answer
from outrider.lab.rows import AnswerRow, CaseOutcome, CostsRow
from outrider.lab.settings import AUTO, AUTO_LOOKUP, LLAMA_CPP_DEFAULT, PLAIN, Setting, grid
from outrider.lab.statistics import Interval, speedup_of

_MIN_CALLS = 3
"""of a size that make its ratio known"""
_MAX_RATIO = 4.0
"""Ratios beyond are a hiccup's."""

Call = tuple[int, int, float]
"""tokens, context, seconds"""


def target_costs(measured: CallCosts, answers: Sequence[AnswerRow]) -> CallCosts:
    """The target's curve, corrected by all calls of its answers."""
    calls = [(n, context, s) for answer in answers for n, context, s, _ in answer.calls]
    return _corrected(measured, calls)


def own_times(answers: Sequence[AnswerRow]) -> tuple[float, float]:
    """The engine's own seconds in a plain step, and how many more for each drafted token that was checked."""
    own: dict[int, list[float]] = defaultdict(list)
    for answer in answers:
        for num_tokens, _, _, seconds in answer.calls:
            own[num_tokens].append(seconds)
    plain_s = median(own[1]) if own[1] else 0.0
    rises = [
        (median(seconds) - plain_s) / (num_tokens - 1)
        for num_tokens, seconds in own.items()
        if num_tokens > 3 and len(seconds) >= _MIN_CALLS
    ]
    return plain_s, max(median(rises), 0.0) if rises else 0.0


def draft_costs(measured: CallCosts, records: Sequence[StepRecord], target: CallCosts) -> CallCosts:
    """A draft model's curve, corrected by steps in which it drafted; the engine's own time for each of its
    tokens is made part of its calls.

    All times are those of a machine on which the `target`'s calls take what its curve says: a slow moment
    shows in the target's calls of the same steps, and is taken out.
    """
    drafting = [record for record in records if record.work.calls]
    if not drafting:
        return measured
    slowness = median(r.verify_s / target.call_s(r.num_evaluated, context=r.position) for r in drafting)
    ratio = median(r.work.model_s / _expected_s(measured, r) for r in drafting) / slowness
    ratio = min(max(ratio, 1 / _MAX_RATIO), _MAX_RATIO)
    own_s = median(max(r.draft_s - r.work.model_s, 0.0) / r.work.calls for r in drafting) / slowness
    points = [replace(point, seconds=point.seconds * ratio + own_s) for point in measured.points]
    read_s = sum(record.work.prefill_s for record in records) / slowness
    read_tokens = sum(record.work.prefill_tokens for record in records)
    token_s = read_s / read_tokens if read_s and read_tokens else measured.prefill_token_s
    return CallCosts(points, prefill_token_s=token_s, window=measured.window)


def _expected_s(measured: CallCosts, record: StepRecord) -> float:
    return sum(measured.call_s(n, context=record.position) for n in record.work.call_tokens)


def curve_of(row: CostsRow) -> CallCosts:
    """The curve that a row holds."""
    return CallCosts.from_json(row.curve, f"costs of {row.model}")


def _corrected(measured: CallCosts, calls: Sequence[Call]) -> CallCosts:
    ratios: dict[int, list[float]] = defaultdict(list)
    for num_tokens, context, seconds in calls:
        ratios[num_tokens].append(seconds / measured.call_s(num_tokens, context=context))
    known = {n: median(found) for n, found in ratios.items() if len(found) >= _MIN_CALLS}
    known = {n: min(max(ratio, 1 / _MAX_RATIO), _MAX_RATIO) for n, ratio in known.items()}
    if not known:
        return measured
    there = {point.num_tokens for point in measured.points if point.num_sequences == 1}
    points = [replace(p, seconds=p.seconds * _ratio(known, p.num_tokens)) for p in measured.points]
    points += [
        replace(
            measured.points[0],
            num_tokens=n,
            seconds=measured.call_s(n, context=0) * ratio,
            context_tokens=0,
            num_sequences=1,
        )
        for n, ratio in sorted(known.items())
        if n not in there
    ]
    return CallCosts(points, prefill_token_s=measured.prefill_token_s, window=measured.window)


def _ratio(known: Mapping[int, float], num_tokens: int) -> float:
    sizes = sorted(known)
    return float(np.interp(np.log(num_tokens), np.log(sizes), [known[n] for n in sizes]))


# What settings would make of the recorded answers: replayed at measured costs, with intervals.

_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
_P_MINS = (0.0, 0.5, 0.75)
_DRAFTERS = ("lookup", "model", "both")
BOUND = "bound"


@dataclass(frozen=True, slots=True)
class Speedups:
    """Expected speed-ups over plain decoding. `best` is the fastest of all settings, chosen on these
    prompts."""

    auto: Interval
    best_setting: str
    best: Interval
    llama_cpp_default: Interval | None
    bound: Interval


@dataclass(frozen=True, slots=True)
class Expectation:
    """Decoding seconds of each answer by setting, and by "bound", the hindsight bound. `drafting` is the
    share of a setting's steps that have a draft; `error` how uncertain the costs of these are against those
    of plain ones, as a relative standard error. `counts` are the tokens that a setting drafted in each
    answer, and those of them that were right."""

    seconds: Mapping[str, tuple[float, ...]]
    drafting: Mapping[str, float]
    error: float
    counts: Mapping[str, tuple[tuple[int, int], ...]]

    @property
    def looked_up(self) -> tuple[int, int]:
        """The tokens that lookup alone drafted, and those of them that were right."""
        counts = self.counts[AUTO_LOOKUP.name]
        return sum(drafted for drafted, _ in counts), sum(right for _, right in counts)

    def of(self, answers: Sequence[int]) -> Expectation:
        """The same for some of the answers, by their numbers."""
        return replace(
            self,
            seconds={name: tuple(found[i] for i in answers) for name, found in self.seconds.items()},
            counts={name: tuple(found[i] for i in answers) for name, found in self.counts.items()},
        )

    def over(self, setting: str, other: str) -> Interval:
        """How much faster one setting is than another."""
        slow_s, fast_s = self.seconds[other], self.seconds[setting]
        drafting = max(self.drafting.get(setting, 1.0), self.drafting.get(other, 1.0))
        return speedup_of(slow_s, fast_s, error=0.0 if slow_s == fast_s else self.error * drafting)

    def speedups(self, auto: Setting) -> Speedups:
        """Over plain decoding; `auto` is the automatic choice in question."""
        names = [name for name in self.seconds if name != BOUND]
        best = min(names, key=lambda name: sum(map(math.log, self.seconds[name])))
        default = LLAMA_CPP_DEFAULT.name
        return Speedups(
            auto=self.over(auto.name, PLAIN.name),
            best_setting=best,
            best=self.over(best, PLAIN.name),
            llama_cpp_default=self.over(default, PLAIN.name) if default in self.seconds else None,
            bound=self.over(BOUND, PLAIN.name),
        )


def with_policy_times(answers: Sequence[Answer], prices: Prices) -> Prices:
    """The prices with the time that looking up and choosing take in a step, measured while replaying."""
    auto = AUTO_LOOKUP if prices.draft is None else AUTO
    cases = [answer.scored for answer in answers]
    spent = policy_times(cases, prices, {"lookup": Setting("lookup", 4), "auto": auto})
    plain_s = prices.own.step_s.get("plain", 0.0)
    steps = {"plain": plain_s} | {kind: plain_s + seconds for kind, seconds in spent.items()}
    return replace(prices, own=replace(prices.own, step_s=steps))


def expect(
    answers: Sequence[Answer], prices: Prices, settings: Sequence[Setting] | None = None
) -> Expectation:
    """Replay settings (None: all there are) over the answers; those of a draft model need its offers in each
    of them.

    An automatic setting goes on learning from one answer to the next, as a session does.
    """
    if settings is None:
        settings = grid(_LENGTHS, _P_MINS, _DRAFTERS, has_model=prices.draft is not None)
    cases = [answer.scored for answer in answers]
    seconds: dict[str, tuple[float, ...]] = {}
    drafting: dict[str, float] = {}
    counts: dict[str, tuple[tuple[int, int], ...]] = {}
    for setting in settings:
        found = predict(cases, setting, prices)
        seconds[setting.name] = tuple(
            _seconds(answer, outcome, prices.draft) for answer, outcome in zip(answers, found, strict=True)
        )
        drafting[setting.name] = _share_drafting(found)
        counts[setting.name] = tuple((sum(outcome.drafted), sum(outcome.accepted)) for outcome in found)
    seconds[BOUND] = tuple(_bound_s(answer, prices) for answer in answers)
    return Expectation(seconds, drafting, _uncertainty(prices), counts)


def _seconds(answer: Answer, outcome: CaseOutcome, draft: CallCosts | None) -> float:
    """Of decoding, with this answer's part of the draft model's reading of the prompt."""
    if draft is None or not outcome.draft_calls:
        return outcome.seconds
    read_s = draft.prefill_s(len(answer.scored.recording.prompt))
    return outcome.seconds - read_s * (1 - answer.whole_ratio)


def _bound_s(answer: Answer, prices: Prices) -> float:
    draft = prices.draft
    if draft is not None:
        tokens = len(answer.scored.recording.prompt)
        token_s = draft.prefill_s(tokens) / tokens * answer.whole_ratio
        draft = CallCosts(draft.points, prefill_token_s=token_s)
    [bound_s] = bounds_s([answer.scored], replace(prices, draft=draft))
    return bound_s


def _share_drafting(found: Sequence[CaseOutcome]) -> float:
    drafts = sum(outcome.drafted[0] for outcome in found if outcome.drafted)
    return drafts / max(sum(outcome.target_calls for outcome in found), 1)


def _uncertainty(prices: Prices) -> float:
    """The standard error of what a call over a single token costs: that of all ratios to it."""
    curves = [prices.target] if prices.draft is None else [prices.target, prices.draft]
    return max(map(_spread, curves))


def _spread(costs: CallCosts) -> float:
    return min((p.spread_ratio for p in costs.points if p.num_tokens == p.num_sequences == 1), default=0.05)
