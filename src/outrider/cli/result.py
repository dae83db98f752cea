"""The object that `outrider run --json` prints; the README documents its keys."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from outrider.cli.settings import RunSettings
from outrider.core.contracts import Vocabulary
from outrider.core.data import Completion, Request, TokenLogprob
from outrider.core.errors import ConstraintError
from outrider.lab.comparison import Comparison
from outrider.session import Session, settings_of
from outrider.session.readout import Readout


def request_settings(
    settings: RunSettings, session: Session, request: Request, completion: Completion
) -> dict[str, Any]:
    """The effective settings of the run, models and request."""
    return settings_of(session, request, completion.seed) | {
        "max_tokens": request.max_tokens,
        "stop": list(request.stop),
        "ignore_end": request.ignore_end,
        "raw": settings.raw,
    }


def as_json(
    session: Session,
    settings: dict[str, Any],
    readout: Readout,
    run: Completion,
    comparison: Comparison | None,
) -> dict[str, Any]:
    """The result of a run: of a comparison's median one, where there was a comparison."""
    result = {"text": run.text, **readout.as_json(), "settings": settings, "notices": session.notices}
    if run.logprobs:
        vocabulary = session.target.vocabulary
        result["logprobs"] = [_logprob(scored, vocabulary) for scored in run.logprobs]
    if comparison:
        result |= {
            "plain": comparison.plain.as_json(),
            "speedup": asdict(comparison.speedup),
            "equal": comparison.equal,
            "divergence": asdict(comparison.divergence) if comparison.divergence else None,
        }
    return result


def failure_as_json(error: ConstraintError) -> dict[str, Any]:
    """What is left of a constrained output that could not go on."""
    return {
        "text": error.text,
        "complete": False,
        "finish_reason": "error",
        "generated_tokens": len(error.tokens),
        "error": str(error),
    }


def _logprob(scored: TokenLogprob, vocabulary: Vocabulary) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        piece = vocabulary.piece(token)
        text = piece.decode("utf-8", errors="replace")
        return {"id": token, "token": text, "bytes": list(piece), "logprob": logprob}

    top = [entry(token, logprob) for token, logprob in scored.top]
    return entry(scored.token, scored.logprob) | {"forced": scored.forced, "top_logprobs": top}
