"""A draft's own calibration, from its predictions along held-out answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from outrider.costs import CallCosts
from outrider.policy.state import PolicyState, PretrainedCalibration


def pretrained_calibration(
    name: str, answers: Iterable[Sequence[tuple[float, bool]]]
) -> PretrainedCalibration:
    """The calibration by the predictions of the draft model `name` along some answers: for each position, its
    confidence in its most likely token, and whether that was correct."""
    state = PolicyState(CallCosts())
    estimator = state.estimator(name)
    seen: list[float] = []
    for answer in answers:
        text = state.new_request(1, None)
        for confidence, correct in answer:
            evidence, bias = (confidence,), text.bias(name)
            seen.append(estimator.probability(evidence, bias))
            estimator.learn(evidence, bias, correct)
    if seen:
        state.mean_confidence = fmean(seen)
    data = state.as_json()
    # In constrained text, which held-out answers seldom are, its confidence means the same.
    data["estimators"][f"{name} (constrained)"] = {"weights": estimator.weights}
    return data
