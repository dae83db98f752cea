"""What calls of a model cost on this machine: measured, kept, and refined by every real call."""

from outrider.costs.curve import SCHEMA, CallCosts
from outrider.costs.points import MAX_TOKENS, CallPoint

__all__ = ["MAX_TOKENS", "SCHEMA", "CallCosts", "CallPoint"]
