"""The pretrained calibration of a draft model, kept in its file.

Confidence is calibrated differently in every model: the built-in coefficients were fitted to drafts of half a
billion parameters. A distilled draft's predictions along held-out answers are known, so its own calibration
can come with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from outrider.core.files import parse_json
from outrider.costs import CallCosts
from outrider.policy.state import PolicyState

CALIBRATION_KEY = "outrider.draft.acceptance"
"""string: what is known of a draft's acceptance, in JSON (`PolicyState.as_json`)"""

PretrainedCalibration = Mapping[str, Any]


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
    data["estimators"][f"{name} (constrained)"] = estimator.as_json()
    return data


def read_calibration(text: str) -> PretrainedCalibration:
    """What a file says. Raises ValueError where it is damaged."""
    data: PretrainedCalibration = parse_json(text)
    PolicyState(CallCosts()).recall(data)
    return data
