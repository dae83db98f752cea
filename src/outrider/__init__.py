"""Speculative decoding that measures, decides and proves: the same text in fewer target calls.

with Session.load("target.gguf", draft="draft.gguf") as session:
    completion = session.generate("Once upon a time", max_tokens=64)
    print(completion.text, read_out(completion).tokens_per_target_call)
"""

# Nothing is imported before `__main__` has said what Ctrl-C does.

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from outrider.backends.gguf.options import LoadOptions
    from outrider.core.contracts import Constraint, Drafter, Model, Policy, Vocabulary
    from outrider.core.data import Completion, Draft, Grammar, Request, Span, StepRecord, Update
    from outrider.core.errors import BackendError, ConstraintError, GrammarError, InputError, OutriderError
    from outrider.core.params import Drafting, SamplingParams, Verification
    from outrider.engine import Engine
    from outrider.lab.comparison import Comparison, compare
    from outrider.policy.auto import AutoPolicy
    from outrider.policy.fixed import FixedPolicy
    from outrider.session.generation import Generation
    from outrider.session.options import SessionOptions
    from outrider.session.pair import Pair
    from outrider.session.readout import Readout, read_out
    from outrider.session.session import Session

__version__ = "0.1.0"

__all__ = [
    "AutoPolicy",
    "BackendError",
    "Comparison",
    "Completion",
    "Constraint",
    "ConstraintError",
    "Draft",
    "Drafter",
    "Drafting",
    "Engine",
    "FixedPolicy",
    "Generation",
    "Grammar",
    "GrammarError",
    "InputError",
    "LoadOptions",
    "Model",
    "OutriderError",
    "Pair",
    "Policy",
    "Readout",
    "Request",
    "SamplingParams",
    "Session",
    "SessionOptions",
    "Span",
    "StepRecord",
    "Update",
    "Verification",
    "Vocabulary",
    "__version__",
    "compare",
    "read_out",
]

_MODULES = (
    *("core.errors", "core.params", "core.data", "core.contracts", "policy.fixed", "policy.auto", "engine"),
    *("session.readout", "session.generation", "backends.gguf.options", "session.options"),
    *("session.pair", "session.session", "lab.comparison"),
)
"""They are searched for a name when it is used: `outrider --help` needs none of them."""


def __getattr__(name: str) -> Any:
    from importlib import import_module

    for module in _MODULES if name in __all__ else ():
        if (found := getattr(import_module(f"outrider.{module}"), name, None)) is not None:
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
