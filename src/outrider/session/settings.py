"""The settings in force in a session, as plain data."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from outrider.backends.bitwise import BitwiseModel
from outrider.backends.gguf import GgufModel
from outrider.core.contracts import Policy
from outrider.core.data import Request
from outrider.drafters.model import ModelDrafter
from outrider.policy import AutoPolicy, FixedPolicy
from outrider.session.session import Session


def describe_policy(policy: Policy) -> dict[str, Any]:
    """Who drafts and how far, as plain data."""
    if isinstance(policy, AutoPolicy) and policy.fixed is not None:
        policy = policy.fixed
    if isinstance(policy, FixedPolicy):
        return {"kind": "fixed", **asdict(policy)}
    if isinstance(policy, AutoPolicy):
        names = ("free", "models", "draft_max")
        return {"kind": "auto", **{name: getattr(policy, name) for name in names}}
    return {"kind": type(policy).__name__}


def settings_of(session: Session, request: Request, seed: int) -> dict[str, Any]:
    """The settings in force, read back from the loaded models rather than from what was asked."""
    target = session.target
    policy = session.engine.policy
    settings: dict[str, Any] = {
        "context_length": target.context_length,
        "rewind": target.rewinding.kind,
        "sampling": asdict(replace(request.sampling, seed=seed)),
        "verification": asdict(request.verification),
        "grammar": asdict(request.grammar) if request.grammar else None,
        "drafters": [drafter.name for drafter in session.engine.drafters],
        "policy": describe_policy(policy),
    }
    drafts = [drafter.model for drafter in session.engine.drafters if isinstance(drafter, ModelDrafter)]
    native = target.inner if isinstance(target, BitwiseModel) else target
    settings["bitwise"] = session.bitwise
    for role, model in (("target", native), *(("draft", draft) for draft in drafts)):
        if isinstance(model, GgufModel):
            context = (target if role == "target" else model).context_length
            settings[role] = asdict(model.options) | {
                "name": model.name,
                "build": model.weights.library.build_id,
                "path": str(model.weights.path),
                "batch_tokens": model.max_batch_tokens,
                "micro_batch_tokens": model.micro_batch_tokens,
                "threads": model.threads,
                "threads_batch": model.threads_batch,
                "context_length": context,
            }
    return settings
