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
    from outrider.core.params import SamplingParams, Verification
    from outrider.engine import Engine
    from outrider.lab.comparison import Comparison, compare
    from outrider.policy.auto import AutoPolicy, AutoSettings
    from outrider.policy.fixed import FixedPolicy
    from outrider.session import Pair, Session, SessionOptions
    from outrider.session.generation import Generation
    from outrider.session.readout import Readout, read_out

__version__ = "0.1.0"

__all__ = [
    "AutoPolicy",
    "AutoSettings",
    "BackendError",
    "Comparison",
    "Completion",
    "Constraint",
    "ConstraintError",
    "Draft",
    "Drafter",
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

_MODULES = {
    "backends.gguf.options": ("LoadOptions",),
    "lab.comparison": ("Comparison", "compare"),
    "core.contracts": ("Constraint", "Drafter", "Model", "Policy", "Vocabulary"),
    "core.data": ("Completion", "Draft", "Grammar", "Request", "Span", "StepRecord", "Update"),
    "core.errors": ("BackendError", "ConstraintError", "GrammarError", "InputError", "OutriderError"),
    "core.params": ("SamplingParams", "Verification"),
    "engine": ("Engine",),
    "session.generation": ("Generation",),
    "policy.auto": ("AutoPolicy", "AutoSettings"),
    "policy.fixed": ("FixedPolicy",),
    "session.readout": ("Readout", "read_out"),
    "session": ("Pair", "Session", "SessionOptions"),
}
"""The module of each name, which is imported when the name is used: `outrider --help` needs none of them."""


def __getattr__(name: str) -> Any:
    from importlib import import_module

    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"outrider.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
