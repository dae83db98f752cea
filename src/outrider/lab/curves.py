"""Cost curves as the engine meets them: measured calls, corrected by those that it really made.

A call that is measured by itself is not quite the one in a generation: there other memory was used in
between, the context is real, all rows of logits are read. So every size takes the ratio that real calls show
against the measured curve; sizes without any take their neighbours'.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import numpy as np

from outrider.core.data import StepRecord
from outrider.costs import CallCosts
from outrider.lab.rows import AnswerRow, CostsRow

_MIN_CALLS = 3
"""of a size that make its ratio known"""
_MAX_RATIO = 4.0
"""Ratios beyond are a hiccup's."""


def target_costs(measured: CallCosts, answers: Sequence[AnswerRow]) -> CallCosts:
    """The target's curve, corrected by all calls of its answers."""
    ratios: dict[int, list[float]] = defaultdict(list)
    for answer in answers:
        for num_tokens, context, seconds, _ in answer.calls:
            ratios[num_tokens].append(seconds / measured.call_s(num_tokens, context=context))
    known = {n: median(found) for n, found in ratios.items() if len(found) >= _MIN_CALLS}
    known = {n: min(max(ratio, 1 / _MAX_RATIO), _MAX_RATIO) for n, ratio in known.items()}
    if not known:
        return measured
    sizes = sorted(known)
    ratio_of = partial(np.interp, xp=np.log(sizes), fp=[known[n] for n in sizes])
    there = {point.num_tokens for point in measured.points if point.num_sequences == 1}
    points = [replace(p, seconds=p.seconds * float(ratio_of(np.log(p.num_tokens)))) for p in measured.points]
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
    expected_s = [sum(measured.call_s(n, context=r.position) for n in r.work.call_tokens) for r in drafting]
    ratio = median(r.work.model_s / s for r, s in zip(drafting, expected_s, strict=True)) / slowness
    ratio = min(max(ratio, 1 / _MAX_RATIO), _MAX_RATIO)
    own_s = median(max(r.draft_s - r.work.model_s, 0.0) / r.work.calls for r in drafting) / slowness
    points = [replace(point, seconds=point.seconds * ratio + own_s) for point in measured.points]
    read_s = sum(record.work.prefill_s for record in records) / slowness
    read_tokens = sum(record.work.prefill_tokens for record in records)
    token_s = read_s / read_tokens if read_s and read_tokens else measured.prefill_token_s
    return CallCosts(points, prefill_token_s=token_s, window=measured.window)


def curve_of(row: CostsRow) -> CallCosts:
    """The curve that a row holds."""
    return CallCosts.from_json(row.curve, f"costs of {row.model}")
