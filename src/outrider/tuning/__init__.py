"""What this machine does with a model: its cost curves from the cache, and the load options that suit it."""

from outrider.tuning.curves import costs_of, keep_costs, subject_of
from outrider.tuning.judging import Trial
from outrider.tuning.options import Tuning, choose_options, tune, tuned_options

__all__ = [
    "Trial",
    "Tuning",
    "choose_options",
    "costs_of",
    "keep_costs",
    "subject_of",
    "tune",
    "tuned_options",
]
