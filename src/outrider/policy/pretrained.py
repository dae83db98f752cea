"""What a draft model's file says of its acceptance: confidence is calibrated differently in every model, and
the built-in coefficients were fitted to drafts of half a billion parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.core.files import parse_json
from outrider.costs import CallCosts
from outrider.policy.state import PolicyState

CALIBRATION_KEY = "outrider.draft.acceptance"
"""string: what is known of a draft's acceptance, in JSON (`PolicyState.as_json`)"""

PretrainedCalibration = Mapping[str, Any]


def read_calibration(text: str) -> PretrainedCalibration:
    """What a file says. Raises ValueError where it is damaged."""
    data: PretrainedCalibration = parse_json(text)
    PolicyState(CallCosts()).recall(data)
    return data
