"""What limits a request: its grammar, and how much of its reasoning there may be."""

from __future__ import annotations

from collections.abc import Callable

from outrider.core.contracts import Constraint, Model
from outrider.core.data import Grammar, Request
from outrider.core.errors import SettingError
from outrider.engine.thought import ThoughtLimit
from outrider.engine.tokenization import PreferredConstraint, PreferredTokenization


def limits_of(
    request: Request,
    target: Model,
    constrain: Callable[[Grammar], Constraint] | None,
    preferred: PreferredTokenization,
) -> tuple[PreferredConstraint | None, ThoughtLimit | None]:
    """The constraint of a request, and the part of it that limits its reasoning. Raises GrammarError, and
    SettingError for a grammar without `constrain`."""
    inner: Constraint | None = None
    if request.grammar is not None:
        if constrain is None:
            raise SettingError("grammar", "this engine was made without constraints", "Give it `constrain`.")
        inner = constrain(request.grammar)
    thought = None
    if request.thought is not None and (inner is not None or request.thought.budget is not None):
        inner = thought = ThoughtLimit(request.thought, target.vocabulary, inner)
    if inner is None:
        return None, None
    return PreferredConstraint(inner, preferred, min(target.max_batch_tokens, target.max_rows)), thought
