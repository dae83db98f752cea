"""Speculative decoding that measures, decides and proves: the same text in fewer target calls.

with Session.load("target.gguf", draft="draft.gguf") as session:
    completion = session.generate("Once upon a time", max_tokens=64)
    print(completion.text, read_out(completion).tokens_per_target_call)
"""

from outrider.backends.gguf import LoadOptions
from outrider.compare import Comparison, compare
from outrider.core.contracts import Constraint, Drafter, Model, Policy, Vocabulary
from outrider.core.data import Completion, Draft, Grammar, Request, Span, StepRecord, Update
from outrider.core.errors import BackendError, ConstraintError, GrammarError, InputError, OutriderError
from outrider.core.params import SamplingParams, Verification
from outrider.engine import Engine
from outrider.policy import AutoPolicy, FixedPolicy
from outrider.readout import Readout, read_out
from outrider.session import Pair, Session
from outrider.session.generation import Generation
from outrider.session.learned import AutoSettings

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
    "Span",
    "StepRecord",
    "Update",
    "Verification",
    "Vocabulary",
    "__version__",
    "compare",
    "read_out",
]
