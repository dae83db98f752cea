"""What an output may be: JSON schemas, regular expressions, choices and grammars, on llguidance."""

from outrider.constraints.compiler import Compiled, Compiler
from outrider.constraints.walker import GrammarConstraint

__all__ = ["Compiled", "Compiler", "GrammarConstraint"]
