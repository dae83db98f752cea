"""What calls of a model cost on this machine: measured, kept, and refined by every real call."""

from outrider.costs.calibrate import calibrate
from outrider.costs.curve import SCHEMA, CallCosts
from outrider.costs.expected_speed import StepCosts, best_call, good_sizes
from outrider.costs.points import MAX_TOKENS, CallPoint
from outrider.costs.store import (
    PairCosts,
    Subject,
    export_costs,
    fingerprint,
    import_costs,
    known_costs,
    store_refined,
)

__all__ = [
    "MAX_TOKENS",
    "SCHEMA",
    "CallCosts",
    "CallPoint",
    "PairCosts",
    "StepCosts",
    "Subject",
    "best_call",
    "calibrate",
    "export_costs",
    "fingerprint",
    "good_sizes",
    "import_costs",
    "known_costs",
    "store_refined",
]
