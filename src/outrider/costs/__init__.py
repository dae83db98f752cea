"""What calls of a model cost on this machine: measured, kept, and refined by every real call."""

from outrider.costs.curve import MAX_TOKENS, CallCosts, CallPoint

__all__ = ["MAX_TOKENS", "CallCosts", "CallPoint"]
