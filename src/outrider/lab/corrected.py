"""Measured curves corrected by real answers: calls of a generation are not quite those of a measurement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from outrider.core.data import StepRecord
from outrider.costs import CallCosts, CallPoint

_MIN_CALLS = 3
"""of a size that make its ratio known"""
_MAX_RATIO = 4.0
"""A larger ratio is a disturbance of the machine."""


def corrected(measured: CallCosts, calls: Iterable[tuple[int, int, float]]) -> CallCosts:
    """The curve as real calls show it, each given by its tokens, its context and its seconds.

    Every size takes the median ratio of its real calls to the curve, other sizes their neighbours'.
    """
    ratios: dict[int, list[float]] = {}
    for num_tokens, context, seconds in calls:
        ratio = seconds / measured.call_s(num_tokens, context=context)
        ratios.setdefault(num_tokens, []).append(ratio)
    known = {n: _bounded(median(found)) for n, found in sorted(ratios.items()) if len(found) >= _MIN_CALLS}
    if not known:
        return measured
    sizes, values = np.log(list(known)), list(known.values())
    spread = next((point.spread_ratio for point in measured.points), 0.05)
    there = {point.num_tokens for point in measured.points if point.num_sequences == 1}
    added = [
        CallPoint(n, measured.call_s(n, context=0), spread_ratio=spread) for n in known if n not in there
    ]
    points = [
        replace(p, seconds=p.seconds * float(np.interp(np.log(p.num_tokens), sizes, values)))
        for p in (*measured.points, *added)
    ]
    return CallCosts(points, prefill_token_s=measured.prefill_token_s, window=measured.window)


def corrected_by_drafts(measured: CallCosts, records: Sequence[StepRecord], target: CallCosts) -> CallCosts:
    """A draft model's curve as the steps show it in which it drafted, with the engine's own time for each of
    its tokens made part of its calls.

    All times are those of a machine on which the `target`'s calls take what its curve says: a slow moment
    shows in the target's calls of the same steps, and is taken out. Steps that read a prompt do not count.
    """
    steps = [record for record in records if record.work.calls and not record.read_tokens]
    if not steps:
        return measured
    slowness = median(r.verify_s / target.call_s(r.num_evaluated, context=r.position) for r in steps)
    expected_s = [sum(measured.call_s(n, context=r.position) for n in r.work.call_tokens) for r in steps]
    ratio = _bounded(median(r.work.model_s / s for r, s in zip(steps, expected_s, strict=True)) / slowness)
    own_s = median(max(r.draft_s - r.work.model_s, 0.0) / r.work.calls for r in steps) / slowness
    read_s = sum(record.work.prefill_s for record in records) / slowness
    read_tokens = sum(record.work.prefill_tokens for record in records)
    return CallCosts(
        [replace(point, seconds=point.seconds * ratio + own_s) for point in measured.points],
        prefill_token_s=read_s / read_tokens if read_s and read_tokens else measured.prefill_token_s,
        window=measured.window,
    )


def _bounded(ratio: float) -> float:
    return min(max(ratio, 1 / _MAX_RATIO), _MAX_RATIO)
