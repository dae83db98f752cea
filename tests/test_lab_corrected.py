"""Measured curves corrected by the calls and the steps of real answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.core.data import Draft, DraftWork, StepRecord
from outrider.costs import CallCosts, CallPoint
from outrider.lab.subject import corrected, corrected_by_drafts


def test_recorded_calls_correct_a_curve() -> None:
    measured = CallCosts([CallPoint(1, 0.1), CallPoint(4, 0.2)], prefill_token_s=0.01, window=50)
    calls = [(1, 0, 0.2)] * 3 + [(2, 0, 0.5 * measured.call_s(2, context=0))] * 3 + [(4, 0, 9.0)] * 2
    found = corrected(measured, calls)
    assert found.calls_s(4, context=0)[[0, 1, 3]] == pytest.approx([0.2, 0.0667, 0.1], rel=1e-3)
    assert found.window == 50
    assert found.prefill_s(10) == pytest.approx(0.1)
    assert corrected(measured, [(1, 0, 50.0)] * 3).call_s(1, context=0) == pytest.approx(0.4)
    assert corrected(measured, [(4, 0, 9.0)] * 2) is measured


def test_steps_correct_a_drafts_curve_by_what_the_target_did_not_take_longer() -> None:
    target, draft = CallCosts([CallPoint(1, 0.1)]), CallCosts([CallPoint(1, 0.01)])
    work = DraftWork(calls=2, call_tokens=(1, 1), model_s=0.08, prefill_tokens=4, prefill_s=0.4)
    verify_s = 2 * target.call_s(1, context=0)
    slow = StepRecord(0, 0, "decode", 0, 1, Draft(), 0, (5,), work, 0.12, verify_s, 0.0, 0.0, 0.4)
    reading = replace(slow, verify_s=verify_s / 100, read_tokens=99, read_s=verify_s)
    found = corrected_by_drafts(draft, [reading, slow, reading], target)
    assert found.call_s(1, context=0) == pytest.approx(0.02 + 0.01)
    assert found.prefill_s(10) == pytest.approx(0.5)
    assert corrected_by_drafts(draft, [reading], target) is draft
    assert corrected_by_drafts(draft, [], target) is draft
