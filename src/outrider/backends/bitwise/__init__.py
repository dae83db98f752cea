"""Text whose bits do not depend on drafts, on how prompts are cut up, or on what else runs: equal sizes of
calls, and a model that makes no others."""

from outrider.backends.bitwise.model import BitwiseModel
from outrider.backends.bitwise.probe import Equality, EqualSizes, Price, find_equality

__all__ = ["BitwiseModel", "EqualSizes", "Equality", "Price", "find_equality"]
