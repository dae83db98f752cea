"""What limits a request: its grammar, and how much of its reasoning there may be."""

from __future__ import annotations

from collections.abc import Callable

from outrider.core.contracts import Constraint, Model
from outrider.core.data import Grammar, Request
from outrider.core.errors import SettingError
from outrider.engine.sequence import RunningRequest
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
    return None if inner is None else _preferring(inner, target, preferred), thought


def end_thought(sequence: RunningRequest, target: Model, preferred: PreferredTokenization) -> None:
    """Let the reasoning of a running request end at its next token."""
    request = sequence.request
    if sequence.thought is None and request.thought is not None and sequence.constraint is None:
        limit = ThoughtLimit(request.thought, target.vocabulary)
        limit.accept(sequence.tokens[len(request.prompt) :])
        sequence.limit(_preferring(limit, target, preferred), limit)
    if sequence.thought is not None:
        sequence.thought.end()


def _preferring(
    constraint: Constraint, target: Model, preferred: PreferredTokenization
) -> PreferredConstraint:
    return PreferredConstraint(constraint, preferred, min(target.max_batch_tokens, target.max_rows))
