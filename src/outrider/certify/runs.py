"""Requests run to their end, whatever ends them."""

from __future__ import annotations

from typing import cast

from outrider.core.data import Completion, Request, Update
from outrider.core.errors import ConstraintError
from outrider.engine import Engine

__all__ = ["generate"]


def generate(engine: Engine, request: Request) -> Completion:
    """Run one request to its end. A constrained output that cannot go on has ended there, which is to
    be compared like any other end."""
    updates: list[Update] = []
    stream = engine.stream(request)
    try:
        while True:
            updates.append(next(stream))
    except StopIteration as end:
        return cast(Completion, end.value)
    except ConstraintError as error:
        return Completion(
            text=error.text,
            tokens=error.tokens,
            finish_reason="error",
            prompt_tokens=len(request.prompt),
            reused_tokens=0,
            seed=request.sampling.seed or 0,
            rule=request.verification.rule,
            lossy=request.verification.is_lossy,
            records=tuple(update.record for update in updates),
            is_complete=False,
        )
