"""What this machine does with a model: its cost curves from the cache, and the load options that suit it."""

from outrider.backends.tuning.equality import open_target
from outrider.backends.tuning.options import Tuning, choose_options, tune, tuned_options
from outrider.backends.tuning.scoring import (
    Loaded,
    Trial,
    costs_of,
    keep_costs,
    native_of,
    spare_cores,
    subject_of,
)

__all__ = [
    "Loaded",
    "Trial",
    "Tuning",
    "choose_options",
    "costs_of",
    "keep_costs",
    "native_of",
    "open_target",
    "spare_cores",
    "subject_of",
    "tune",
    "tuned_options",
]
